"""`init`: join the world that the environment describes, or be a world of one.

The same script then runs under torchrun, inside launch() and alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from weft.comm import install_desync_check
from weft.errors import ConfigError
from weft.launcher.backends import check_backend, default_local_backend, is_same_backend
from weft.launcher.options import check_timeouts
from weft.launcher.stores import memory_store
from weft.launcher.world import is_rank_thread

# What torchrun sets and c10d's env:// rendezvous reads. All of them or none.
_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """Who this rank is.

    `device` is where its tensors belong: a GPU of this host, shared out by `local_rank`, or the CPU.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    backend: str
    device: torch.device


@dataclass(frozen=True)
class RankVariables:
    """The rank that environment variables give to this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def init(backend: str | None = None, timeout: float = 300.0, *, desync_check: bool = False) -> World:
    """Initialise torch.distributed for this process, if nobody has, and say who it is.

    Takes torchrun's environment where there is one; without one this is a world of one rank, which
    needs no port and no peer. Inside launch(), or called again, it returns the world that is there.

    `backend`: as for init_process_group. By default "weft" where all ranks are on this host and it is
    Linux, else gloo for CPU tensors, and nccl for CUDA tensors where both are there.
    `timeout`: seconds that joining, and one collective, may wait for peers.
    `desync_check`: compare every collective of weft.comm between ranks before it moves data.

    Raises ConfigError when the environment is incomplete, or when the world that is there has another
    backend than the one asked for.
    """
    check_timeouts("init", timeout=timeout)
    if backend is not None:
        check_backend(backend, "init")
    if not dist.is_initialized():
        _init_default_group(backend, timedelta(seconds=timeout))
    elif backend is not None and not is_same_backend(backend, dist.get_backend_config()):
        raise ConfigError(
            f"init: backend={backend!r} was asked for, but torch.distributed is already initialised with "
            f"{dist.get_backend()!r}. Leave the backend out, or call dist.destroy_process_group() first."
        )
    if desync_check:
        install_desync_check()
    return _current_world()


def read_rank_variables(env: Mapping[str, str]) -> RankVariables | None:
    """Read torchrun's variables; None where there are none, ConfigError where they don't add up. Pure."""
    present = [name for name in _REQUIRED if name in env]
    if not present:
        return None
    missing = [name for name in _REQUIRED if name not in env]
    if missing:
        raise ConfigError(
            f"init: the environment has {', '.join(present)} but not {', '.join(missing)}. torchrun sets all "
            f"of them: start the script with it, or unset {', '.join(present)} to run alone."
        )
    rank, size = _read_integer(env, "RANK"), _read_integer(env, "WORLD_SIZE")
    if not 0 <= rank < size:
        raise ConfigError(
            f"init: the environment has RANK={rank} and WORLD_SIZE={size}; 0 <= RANK < WORLD_SIZE must hold."
        )
    # Without the local ones nothing is known of the other hosts, so nothing is assumed to be shared.
    local_rank = _read_integer(env, "LOCAL_RANK") if "LOCAL_RANK" in env else rank
    local_size = _read_integer(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else 1
    return RankVariables(rank, size, local_rank, local_size)


def default_backend(variables: RankVariables | None) -> str:
    """The backend for a world: the local group where all ranks share the host, else what reaches others."""
    if variables is None or variables.local_size == variables.size:
        return default_local_backend()
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def _init_default_group(backend: str | None, timeout: timedelta) -> None:
    variables = read_rank_variables(os.environ)
    if backend is None:
        backend = default_backend(variables)
        check_backend(backend, "init")
    if variables is None:
        dist.init_process_group(backend, store=memory_store(), rank=0, world_size=1, timeout=timeout)
        return
    if torch.cuda.is_available():
        # Before the group is made: nccl binds to the current device.
        torch.cuda.set_device(_device(variables.local_rank))
    try:
        dist.init_process_group(backend, init_method="env://", timeout=timeout)
    except dist.DistNetworkError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        busy = variables.rank == 0 and "EADDRINUSE" in str(error)
        raise ConfigError(
            f"init: rank {variables.rank} can't meet the others at {where}: "
            + (
                "the port is in use by another program. Set MASTER_PORT to a free one."
                if busy
                else f"{str(error).splitlines()[0]} Check MASTER_ADDR and MASTER_PORT, and that rank 0 runs."
            )
        ) from None


def _current_world() -> World:
    rank, size = dist.get_rank(), dist.get_world_size()
    # Threads share one environment, so it can't tell them apart; all of them are on this host.
    variables = None if is_rank_thread() else read_rank_variables(os.environ)
    if variables is None or (variables.rank, variables.size) != (rank, size):
        variables = RankVariables(rank, size, local_rank=rank, local_size=size)
    return World(
        rank=rank,
        size=size,
        local_rank=variables.local_rank,
        local_size=variables.local_size,
        backend=str(dist.get_backend()),
        device=_device(variables.local_rank),
    )


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _read_integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ConfigError(
            f"init: the environment has {name}={env[name]!r}, which must be an integer."
        ) from None

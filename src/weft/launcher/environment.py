"""`init`: join the world that the environment describes, or be a world of one.

The same script then runs under torchrun, inside launch() and alone.

Ranks seal their values in the store with a secret (weft.trust): the launcher's, or that of WEFT_SECRET_FILE;
else ranks of one host share one that rank 0 makes (weft.trust.sharing). Ranks of several hosts have a secret
only by WEFT_SECRET_FILE.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from weft.comm import install_desync_check
from weft.errors import ConfigError, PeerError, WeftError
from weft.launcher.agreement import RankVariables, agree_on_facts, device_of, wait_for_first, withdraw
from weft.launcher.backends import (
    AS_ASKED,
    EngineChoice,
    EngineFacts,
    announce_engine,
    check_backend,
    choose_engine,
    choose_local_engine,
    is_same_backend,
    prepare_nccl,
)
from weft.launcher.options import check_timeouts
from weft.launcher.stores import Store, corner_of, is_loopback, join_store, memory_store
from weft.launcher.world import is_rank_thread
from weft.torch_private import check_torch
from weft.trust import JobSecret, address_of, enter_world, install_secret, job_secret, share_secret

# What torchrun sets and c10d's env:// rendezvous reads. All of them or none.
_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# A store may serve one default group after another; their keys must not collide.
_generation = itertools.count()

# The secret that the ranks of the last world shared, where they had been given none.
_shared_secret: JobSecret | None = None


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


def init(backend: str | None = None, timeout: float = 300.0, *, desync_check: bool = False) -> World:
    """Initialise torch.distributed for this process, if nobody has, and say who it is.

    Takes torchrun's environment where there is one; without one this is a world of one rank, which
    needs no port and no peer. Inside launch(), or called again, it returns the world that is there.

    `backend`: as for init_process_group. By default the ranks agree on one and rank 0 says which and why:
    nccl for CUDA tensors and gloo for CPU tensors where every rank has a GPU of its own; "weft" where all
    ranks are on this Linux host and share a GPU or have none; else gloo.
    `timeout`: seconds that joining, and one collective, may wait for peers.
    `desync_check`: compare every collective of weft.comm between ranks before it moves data.

    Raises ConfigError when the environment is incomplete, when ranks ask for different backends, or when
    the world that is there has another one than is asked for; PeerTimeoutError, naming the ranks that
    don't come; TamperedError for values in their store that the ranks did not write.
    """
    check_timeouts("init", timeout=timeout)
    if backend is not None:
        check_backend(backend, "init")
    if not dist.is_initialized():
        check_torch()
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
    if {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= env.keys() and not 0 <= local_rank < local_size:
        raise ConfigError(
            f"init: the environment has LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_size}; "
            "0 <= LOCAL_RANK < LOCAL_WORLD_SIZE must hold."
        )
    return RankVariables(rank, size, local_rank, local_size)


def _init_default_group(backend: str | None, timeout: timedelta) -> None:
    variables = read_rank_variables(os.environ)
    if variables is None:
        backend = backend or choose_local_engine(1).backend
        dist.init_process_group(backend, store=memory_store(), rank=0, world_size=1, timeout=timeout)
        return
    if torch.cuda.is_available():
        # Before the group is made: nccl binds to the current device.
        torch.cuda.set_device(device_of(variables.local_rank))
    generation = next(_generation)
    enter_world(f"init {generation}")
    store, facts, shares_gpu = _meet_ranks(variables, backend, generation, timeout)
    choice = choose_engine(facts) if backend is None else EngineChoice(backend, AS_ASKED)
    check_backend(choice.backend, "init")
    prepare_nccl(choice.backend, variables.rank, shares_gpu=shares_gpu, is_one_host=facts.is_one_host)
    if variables.rank == 0:
        announce_engine(variables.size, choice)
    dist.init_process_group(
        choice.backend,
        # Not the one of the world before: in torchrun's store its addresses are still there.
        store=corner_of(store, f"weft world {generation}", timeout),
        rank=variables.rank,
        world_size=variables.size,
        timeout=timeout,
    )


def _meet_ranks(
    variables: RankVariables, backend: str | None, generation: int, timeout: timedelta
) -> tuple[Store, EngineFacts, bool]:
    """Return the store in which the ranks meet, and the results of agree_on_facts."""
    end = time.monotonic() + timeout.total_seconds()
    while True:
        store = _rendezvous(variables, timeout)
        name = f"weft engine {generation}"
        corner = corner_of(store, name, timeout)
        try:
            secret = _find_secret(corner, variables)
            return store, *agree_on_facts(corner, variables, backend, secret, group=name)
        except dist.DistNetworkError as error:
            # After another world this may have been its store, which rank 0 closes before it hosts the next.
            if generation > 0 and time.monotonic() < end:
                continue
            raise PeerError(
                f"init: rank {variables.rank} has lost the store at {_where()}, in which ranks meet: "
                f"{_first_line(error)}. Rank 0, or torchrun, hosts it and has ended. Look at its output.",
                [0],
            ) from None


def _find_secret(corner: Store, variables: RankVariables) -> JobSecret | None:
    """Return the job's secret and install it: the given one, else the one that ranks of one host share.

    None among ranks of several hosts that were given none: their values in the store are then checked for
    types and bounds only.
    """
    global _shared_secret
    if _shared_secret is not None and job_secret() is _shared_secret:
        install_secret(None)  # it was another world's, whose ranks may be others
    if variables.size == 1 or not _is_one_host(os.environ, variables):
        return job_secret()
    if variables.rank != 0 and job_secret() is None:
        wait_for_first(corner, variables)
    try:
        secret = share_secret(corner, variables.rank, bound_to=address_of(corner))
    except WeftError:
        withdraw(corner, variables)
        raise
    if job_secret() is None:
        install_secret(secret)
        _shared_secret = secret
    return secret


def _is_one_host(env: Mapping[str, str], variables: RankVariables) -> bool:
    """Whether all ranks are on this host, by the environment alone: the store is not trusted."""
    if "LOCAL_WORLD_SIZE" in env:
        return variables.local_size == variables.size
    return is_loopback(env["MASTER_ADDR"])


def _rendezvous(variables: RankVariables, timeout: timedelta) -> Store:
    """The store in which the ranks meet: torchrun's, else rank 0 hosts one."""
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store, _, _ = next(rendezvous("env://", timeout=timeout))
            return store
        port = _read_integer(os.environ, "MASTER_PORT")
        return join_store(os.environ["MASTER_ADDR"], port, timeout, is_host=variables.rank == 0)
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        if variables.rank == 0 and "EADDRINUSE" in str(error):
            problem = "the port is in use by another program. Set MASTER_PORT to a free one."
        else:
            problem = f"{_first_line(error)}. Check MASTER_ADDR and MASTER_PORT, and that rank 0 runs."
        raise ConfigError(
            f"init: rank {variables.rank} can't meet the others at {_where()}: {problem}"
        ) from None


def _where() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".?")


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
        device=device_of(variables.local_rank),
    )


def _read_integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ConfigError(
            f"init: the environment has {name}={env[name]!r}, which must be an integer."
        ) from None

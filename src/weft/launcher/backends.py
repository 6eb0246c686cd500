"""Which c10d backend a run uses and why, and whether this machine has it.

The choice follows the hardware: a GPU for each rank: nccl, with gloo for CPU tensors. Ranks of one host that
share a GPU or have none: the local group. Several hosts: nccl or gloo. One line at the start says it.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import ConfigError
from weft.local.kernel import check_supported, find_obstacle

logger = logging.getLogger("weft")

GPU_EACH = "cpu:gloo,cuda:nccl"
AS_ASKED = "as asked for"


@dataclass(frozen=True)
class EngineFacts:
    """What the choice of an engine depends on, of all ranks together."""

    num_ranks: int
    num_gpus: int = 0  # that the ranks use, each counted once
    is_one_host: bool = True
    are_threads: bool = False
    has_nccl: bool = True  # on every rank
    obstacle: str | None = None  # why the local group can't run on one rank at least; None where it can


@dataclass(frozen=True)
class EngineChoice:
    """A backend, as init_process_group takes it, and the reason in a few words."""

    backend: str
    reason: str


def choose_engine(facts: EngineFacts) -> EngineChoice:
    """The engine for a run. Pure."""
    if facts.num_ranks == 1:
        backend = "weft" if facts.obstacle is None else "gloo"
        return EngineChoice(backend, "one rank has no peers")
    has_gpu_each = facts.num_gpus == facts.num_ranks
    if facts.are_threads:
        reason = "threads of one process"
    else:
        where = "of one host" if facts.is_one_host else "of several hosts"
        reason = f"ranks {where} {_describe_gpus(facts.num_gpus, has_gpu_each=has_gpu_each)}"
    if has_gpu_each and not facts.are_threads:
        if facts.has_nccl:
            return EngineChoice(GPU_EACH, reason)
        reason += ", but this build of torch has no nccl"
    if not facts.is_one_host:
        return EngineChoice("gloo", reason)
    if facts.obstacle is not None:
        return EngineChoice("gloo", f"{reason}; the local group (weft) can't run: {facts.obstacle}")
    return EngineChoice("weft", reason)


def _describe_gpus(num_gpus: int, *, has_gpu_each: bool) -> str:
    if num_gpus == 0:
        return "that have no GPU"
    if has_gpu_each:
        return "with a GPU each"
    return "that share a GPU" if num_gpus == 1 else f"that share {num_gpus} GPUs"


def choose_local_engine(num_ranks: int, *, are_threads: bool = False) -> EngineChoice:
    """The engine for ranks that this process starts on this host."""
    return choose_engine(
        EngineFacts(
            num_ranks,
            num_gpus=min(num_ranks, torch.cuda.device_count()),
            are_threads=are_threads,
            has_nccl=dist.is_nccl_available(),
            obstacle=find_obstacle(),
        )
    )


def resolve_local_engine(
    backend: str | None, num_ranks: int, asker: str, *, are_threads: bool = False
) -> EngineChoice:
    """The backend that is asked for, else what choose_local_engine chooses; checked, in `asker`'s name."""
    if backend is None:
        choice = choose_local_engine(num_ranks, are_threads=are_threads)
    else:
        choice = EngineChoice(backend, AS_ASKED)
    check_backend(choice.backend, asker, are_threads=are_threads)
    return choice


def announce_engine(num_ranks: int, choice: EngineChoice) -> None:
    """Say in one line which engine a run uses and why. One rank has no peers: nothing is said.

    Goes to the log "weft" (INFO) where the program has set logging up, else to stderr, once a process.
    """
    if num_ranks > 1:
        announce(f"weft: {num_ranks} ranks on backend {choice.backend!r}: {choice.reason}")


@cache
def announce(line: str, level: int = logging.INFO) -> None:
    """Say a line once a process: to the log where logging is set up, else to stderr."""
    if logger.hasHandlers():
        logger.log(level, line)
    else:
        print(line, file=sys.stderr, flush=True)


def prepare_nccl(backend: str, rank: int, *, shares_gpu: bool, is_one_host: bool) -> None:
    """Let nccl ranks share a GPU, before their group is made; nothing to do where each has its own.

    nccl refuses two ranks of a host on one GPU, so each is presented to it as a host of its own. They then
    talk over sockets: every stream and communicator is real, and slow.
    """
    if not shares_gpu or not uses_nccl(backend):
        return
    # nccl reads them when it starts. What the user has set stays.
    os.environ.setdefault("NCCL_HOSTID", f"{socket.gethostname()}-rank{rank}")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")
    if is_one_host:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if rank == 0:
        announce(
            "weft: nccl ranks share a GPU and talk over sockets: for tests. Leave the backend out for the "
            "local group, which is fast there.",
            logging.WARNING,
        )


def check_backend(backend: str, asker: str, *, are_threads: bool = False) -> None:
    """Raise ConfigError, in `asker`'s name, unless every backend that the string names can be used here.

    Understands what init_process_group does: "gloo", or "cpu:gloo,cuda:nccl".
    """
    known = sorted(set(dist.Backend.backend_list) - {"undefined"})
    for name in _names(backend):
        if name not in known:
            raise ConfigError(
                f"{asker}: backend={backend!r} names {name!r}, which c10d does not know. "
                f"It knows {', '.join(known)}; or pairs such as 'cpu:gloo,cuda:nccl'."
            )
    for name in _names(backend):
        if not dist.is_backend_available(name):
            raise ConfigError(
                f"{asker}: backend={backend!r} names {name!r}, which this build of torch does not have. "
                f"Use 'gloo', or leave the backend out."
            )
    if "weft" in _names(backend):
        check_supported()
    if uses_nccl(backend):
        if torch.cuda.device_count() == 0:
            raise ConfigError(
                f"{asker}: backend={backend!r} names 'nccl', which needs a GPU, and this process sees none. "
                "Use 'gloo', or leave the backend out."
            )
        if are_threads:
            raise ConfigError(
                f"{asker}: backend={backend!r} names 'nccl', which takes the threads of a process for one "
                "rank. Use kind='process', or leave the backend out."
            )


def uses_nccl(backend: str) -> bool:
    """Whether a backend string names nccl, in capitals or not, as c10d takes it."""
    return "nccl" in _names(backend)


def _names(backend: str) -> list[str]:
    return [pair.rpartition(":")[2].strip().lower() for pair in backend.split(",")]


def is_same_backend(asked: str, config: str) -> bool:
    """Whether a backend string means what a group has, as dist.get_backend_config gives it."""
    to_config: Any = dist.BackendConfig  # it takes what Backend() makes, which is typed as a plain string
    return str(to_config(dist.Backend(asked))) == config

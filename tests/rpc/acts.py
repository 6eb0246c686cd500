"""What members of a crew are told to do, with weft.rpc."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import weft
from tests.rpc.remote_functions import Counter, Tracked, give, pass_gate, visits_at
from tests.rpc.workers import WEFT
from weft import rpc

held: dict[str, Any] = {}


def join(name: str, rank: int, size: int | None, init_method: str, **options: Any) -> None:
    rpc.init_rpc(
        name,
        rank=rank,
        world_size=size,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=init_method, **options),
    )


def leave(graceful: bool = True, timeout: float = 0) -> None:
    rpc.shutdown(graceful=graceful, timeout=timeout)


def call(to: Any, function: Callable[..., Any], *args: Any, timeout: float = 30.0) -> Any:
    return rpc.rpc_sync(to, function, args, timeout=timeout)


def hold_remote(key: str, to: str, function: Callable[..., Any], *args: Any) -> None:
    """Make an RRef there and hold it here."""
    rref = rpc.remote(to, function, args)
    rref.to_here()
    held[key] = rref


def let_go(key: str) -> None:
    held.pop(key)


def send_held(key: str, to: str) -> None:
    """Have another worker hold it too."""
    rpc.rpc_sync(to, receive_held, (key, held[key]))


def receive_held(key: str, rref: Any) -> None:
    held[key] = rref


def count_at(worker: str, key: str) -> int:
    return visits_at(worker, key)


@dataclass(frozen=True)
class Sighting:
    """The error that one act of one worker ended with."""

    what: str
    error: str  # the type's name
    is_peer_error: bool
    ranks: tuple[int, ...]
    text: str
    entered_secs: float
    raised_secs: float


def see(what: str, *args: Any) -> Sighting:
    """Do one of the acts below; the error that it ends with, and when."""
    entered = time.monotonic()
    try:
        ACTS[what](*args)
    except BaseException as error:
        return Sighting(
            what,
            type(error).__name__,
            isinstance(error, weft.PeerError),
            tuple(getattr(error, "ranks", ())),
            f"{error}",
            entered,
            time.monotonic(),
        )
    raise AssertionError(f"{what} {args} returned")


def _sync(to: str, key: str, timeout: float = 30.0) -> None:
    rpc.rpc_sync(to, pass_gate, (WEFT, key), timeout=timeout)


def _async(to: str, key: str, timeout: float = 30.0) -> None:
    rpc.rpc_async(to, pass_gate, (WEFT, key), timeout=timeout).wait()


def _to_here(to: str, key: str, timeout: float = 30.0) -> None:
    rpc.remote(to, pass_gate, (WEFT, key)).to_here(timeout=timeout)


def _proxy(to: str, key: str, timeout: float = 30.0) -> None:
    rpc.remote(to, Counter).rpc_sync(timeout=timeout).pass_gate(WEFT, key)


def _held_to_here(key: str) -> None:
    held[key].to_here(timeout=30.0)


def _held_proxy(key: str) -> None:
    held[key].rpc_sync(timeout=30.0).get()


def _shutdown(timeout: float = 0) -> None:
    rpc.shutdown(timeout=timeout)


ACTS: dict[str, Callable[..., None]] = {
    "sync": _sync,
    "async": _async,
    "to_here": _to_here,
    "proxy": _proxy,
    "held to_here": _held_to_here,
    "held proxy": _held_proxy,
    "shutdown": _shutdown,
}


def run_exit() -> None:
    os._exit(3)


def die_in_call() -> None:
    """A handler in which its process ends."""
    os._exit(4)


def python_threads() -> list[str]:
    """Of this process, but those that the crew's orders run on and the main one."""
    ours = [thread.name for thread in threading.enumerate() if not thread.name.startswith("crew-")]
    return sorted(name for name in ours if name != "MainThread")


def open_files() -> dict[str, int]:
    """How many files of each kind this process has open."""
    kinds: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        kind = target.split(":")[0] if ":" in target else target
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def shared_mappings() -> list[str]:
    """Shared memory that is still mapped here."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split(maxsplit=5)[5] for line in lines if "/memfd:" in line or "/dev/shm/" in line})


def native_threads(wanted: int = 0) -> int:
    """How many threads this process has; waits a while for them to become as few as wanted.

    The kernel lists a thread until it is quite gone, which on a busy machine is after it was joined.
    """
    ends_at = time.monotonic() + 5
    while (count := len(os.listdir("/proc/self/task"))) > wanted and wanted and time.monotonic() < ends_at:
        os.sched_yield()
    return count


def make_tracked(key: str) -> Tracked:
    return Tracked(WEFT, key)


def calls_after_shutdown() -> list[str]:
    """What each function says on a process that is no worker."""
    texts: list[str] = []
    for use in [
        lambda: rpc.rpc_sync("worker0", make_tracked, ("x",)),
        lambda: rpc.rpc_async("worker0", make_tracked, ("x",)),
        lambda: rpc.remote("worker0", make_tracked, ("x",)),
        lambda: rpc.get_worker_info(),
        lambda: rpc.shutdown(),
        lambda: rpc.RRef(3),
        lambda: rpc.api._all_gather(1),
    ]:
        try:
            use()
        except weft.StateError as error:
            texts.append(str(error))
        else:
            texts.append("returned")
    return texts


def echo_tensor(to: str, num_bytes: int) -> bool:
    """There and back; whether it is what it was."""
    tensor = torch.arange(num_bytes // 8)
    return torch.equal(rpc.rpc_sync(to, give, (tensor,)), tensor)


def remote_in_vain(to: str, timeout: float) -> list[str]:
    """What an RRef says whose owner does not answer: as its future, and to those who use it after that."""
    rref = rpc.remote(to, Counter, timeout=timeout)
    texts: list[str] = []
    for use in [lambda: rref._get_future().wait(), lambda: rref.to_here(timeout=5)]:
        try:
            use()
        except RuntimeError as error:
            texts.append(str(error))
        else:
            texts.append("returned")
    return texts

"""What workers do around a shutdown, and what must not stay after it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.rpc_bodies.places import Counter, add, count, gate_of, give, pass_gate
from tests.rpc_bodies.running import WEFT
from weft import rpc


def call_on(to: str) -> int:
    return rpc.rpc_sync(to, add, (3, 4))


def begin_and_forget(to: str, key: str) -> None:
    """Two calls whose answers nobody waits for."""
    rpc.rpc_async(to, pass_gate_and_count, (key,))
    rpc.remote(to, pass_gate_and_count, (key,))


def pass_gate_and_count(key: str) -> None:
    pass_gate(WEFT, key)
    count(WEFT, "after gate")


def open_here(worker: str, key: str) -> None:
    """From outside: this thread runs no call."""
    gate_of(worker, key).set()


def begin_chain(hops: list[str]) -> None:
    rpc.rpc_async(hops[0], hop_on, (hops[1:],))


def hop_on(hops: list[str]) -> None:
    count(WEFT, "hop")
    if hops:
        rpc.rpc_async(hops[0], hop_on, (hops[1:],))


def use_all(to: str) -> None:
    """Calls, RRefs that are never dropped, large tensors both ways, an error, a timeout."""
    large = torch.ones(500_000)
    assert torch.equal(rpc.rpc_sync(to, give, (large,)), large)
    rref = rpc.remote(to, Counter, (1,))
    assert rref.rpc_sync().bump() == 2
    _kept.append(rref)
    _kept.append(rpc.RRef(large))
    futures = [rpc.rpc_async(to, add, (i, 1)) for i in range(100)]
    assert [future.wait() for future in futures] == list(range(1, 101))
    try:
        rpc.rpc_sync(to, rpc.rpc_sync, (to, no_such_luck))
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError("no error came")


_kept: list[object] = []


def no_such_luck() -> float:
    return 1 / 0


def socket_paths() -> list[str]:
    """The socket files that this process listens on."""
    own: set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            own.add(target[8:-1])
    found: list[str] = []
    for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]:
        parts = line.split()
        if len(parts) > 7 and parts[6] in own and not parts[7].startswith("@"):
            found.append(parts[7])
    return found


def try_init(init_method: str, arguments: dict[str, Any]) -> tuple[list[str], str]:
    """The types of the error that init_rpc raises with these arguments, and its text."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method, rpc_timeout=2)
    try:
        rpc.init_rpc(
            **({"name": "worker0", "rank": 0, "world_size": 1, "rpc_backend_options": options} | arguments)
        )
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    rpc.shutdown(graceful=False)
    return [], "no error"


def join_with_torchs_options(name: str, rank: int, init_method: str) -> float:
    from torch.distributed import rpc as torch_rpc

    options = torch_rpc.TensorPipeRpcBackendOptions(
        init_method=init_method, rpc_timeout=7.5, num_worker_threads=4
    )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    return rpc.get_rpc_timeout()


def give_timeout(timeout: Any) -> list[tuple[str, str]]:
    """The errors of all that takes a timeout, by type and text."""
    rref = rpc.remote("worker0", add, (1, 2))
    takers: list[Callable[[], object]] = [
        lambda: rpc.rpc_sync("worker0", add, (1, 2), timeout=timeout),
        lambda: rpc.rpc_async("worker0", add, (1, 2), timeout=timeout),
        lambda: rpc.remote("worker0", add, (1, 2), timeout=timeout),
        lambda: rref.to_here(timeout=timeout),
        lambda: rref.rpc_sync(timeout=timeout).bit_length(),
        lambda: rref.rpc_async(timeout=timeout).bit_length(),
        lambda: rref.remote(timeout=timeout).bit_length(),
        lambda: rpc.shutdown(timeout=timeout),
        lambda: rpc._set_rpc_timeout(timeout),
        lambda: rpc.api._all_gather(None, timeout=timeout),
    ]
    seen: list[tuple[str, str]] = []
    for take in takers:
        try:
            take()
        except Exception as error:
            seen.append((type(error).__name__, str(error)))
        else:
            seen.append(("nothing", "was taken"))
    return seen

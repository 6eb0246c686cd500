"""Thread-ranks that are workers: each its own; joining again; ends that leave nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch.distributed as dist

import weft
from tests.ranks import run_on
from tests.rpc.remote_functions import add, spot
from tests.rpc.workers import WEFT
from weft import rpc
from weft.testing import on_ranks

pytestmark = run_on(threads=2, timeout=60, collective_timeout=60)


def join(**arguments: object) -> str:
    rpc.init_rpc(f"worker{dist.get_rank()}", **arguments)
    return f"worker{(dist.get_rank() + 1) % dist.get_world_size()}"


@run_on(threads=3, timeout=60, collective_timeout=60)
def test_rank_and_world_may_be_left_out() -> None:
    other = join()
    assert rpc.get_worker_info().id == dist.get_rank()
    assert rpc.rpc_sync(other, spot, (WEFT,)).worker == other
    rpc.shutdown()


@run_on(threads=3, timeout=60, collective_timeout=60)
def test_rank_and_world_may_be_given() -> None:
    other = join(rank=dist.get_rank(), world_size=dist.get_world_size())
    assert rpc.get_worker_info().id == dist.get_rank()
    assert rpc.rpc_sync(other, spot, (WEFT,)).worker == other
    rpc.shutdown()


def test_again_and_again() -> None:
    for _ in range(10):
        other = join()
        assert rpc.rpc_sync(other, add, (1, 2)) == 3
        rpc.shutdown()
        with pytest.raises(weft.StateError, match="RPC has not been initialized"):
            rpc.rpc_sync(other, add, (1, 2))


def test_init_twice() -> None:
    join()
    with pytest.raises(RuntimeError, match="RPC is already initialized"):
        join()
    rpc.shutdown()
    with pytest.raises(weft.StateError, match="RPC has not been initialized"):
        rpc.shutdown()


def test_one_rank_is_a_worker_and_the_other_is_not(tmp_path: Path) -> None:
    """What one rank is does not make the other one, though they share a process."""
    if dist.get_rank() == 0:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path / 'store'}")
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        assert rpc.rpc_sync("alone", add, (1, 2)) == 3
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(weft.StateError, match="RPC has not been initialized"):
            rpc.get_worker_info()
    dist.barrier()
    if dist.get_rank() == 0:
        rpc.shutdown()


def test_one_that_leaves_is_named() -> None:
    other = join()
    dist.barrier()
    if dist.get_rank() == 1:
        rpc.shutdown(graceful=False)
        dist.barrier()
        return
    dist.barrier()
    with pytest.raises(weft.PeerError, match=other) as caught:
        rpc.rpc_sync(other, add, (1, 2))
    assert caught.value.ranks == (1,)
    with pytest.raises(weft.PeerError, match=other):
        rpc.shutdown()


@run_on()
@pytest.mark.threads
def test_no_thread_stays() -> None:
    @on_ranks(3)
    def body() -> None:
        other = join()
        assert rpc.rpc_sync(other, add, (1, 2)) == 3
        rpc.shutdown()

    before = set(threading.enumerate())
    body()
    assert [thread.name for thread in set(threading.enumerate()) - before if "rpc" in thread.name] == []


@run_on(threads=3, timeout=60, collective_timeout=60)
def test_uneven_work() -> None:
    """Ranks end their work at different times; who waits in shutdown still answers."""
    other = join()
    for i in range(dist.get_rank() * 100):
        assert rpc.rpc_sync(other, add, (i, 1)) == i + 1
    rpc.shutdown()


@run_on(threads=8, timeout=60, collective_timeout=60)
def test_eight_workers_call_each_other() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    join()
    futures = [rpc.rpc_async(f"worker{(rank + i) % size}", add, (rank, i)) for i in range(size * 10)]
    assert [future.wait() for future in futures] == [rank + i for i in range(size * 10)]
    rpc.shutdown()

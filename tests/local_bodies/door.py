"""Bodies for ranks: every function of `weft.comm`, on any backend."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.local_bodies.inputs import (
    assert_same,
    assert_still_usable,
    me,
    num_ranks,
    reduced,
    sample,
    samples,
)
from weft import comm


def on_gloo() -> bool:
    return dist.get_backend() == "gloo"


def reductions() -> None:
    for numel in (7, 50_000):
        want = reduced(samples(numel))
        tensor = sample(me(), numel)
        handle = comm.all_reduce(tensor)
        assert isinstance(handle, comm.Handle)
        assert handle.wait() is tensor
        assert_same(tensor, want, "all_reduce")
        tensor = sample(me(), numel)
        assert_same(
            comm.all_reduce(tensor, dist.ReduceOp.MAX).wait(), reduced(samples(numel), dist.ReduceOp.MAX)
        )
        tensor = sample(me(), numel)
        handle = comm.reduce(tensor, 1)
        assert isinstance(handle, comm.Handle)
        assert handle.wait() is tensor
        if me() == 1:
            assert_same(tensor, want, "reduce")
        tensors = [sample(me(), numel), sample(me(), 3)]
        got = comm.all_reduce_coalesced(tensors).wait()
        for out, tensor, shape in zip(got, tensors, (numel, 3), strict=True):
            assert out is tensor
            assert_same(out, reduced(samples(shape)), "all_reduce_coalesced")


def copies() -> None:
    for numel in (7, 50_000):
        tensor = sample(me(), numel)
        assert comm.broadcast(tensor, 1).wait() is tensor
        assert_same(tensor, sample(1, numel), "broadcast")
        outs = [torch.empty(numel) for _ in range(num_ranks())]
        got = comm.all_gather(outs, sample(me(), numel)).wait()
        assert_same(torch.cat(list(got)), torch.cat(samples(numel)), "all_gather's result")
        assert_same(torch.cat(outs), torch.cat(samples(numel)), "all_gather's outputs")
        out = torch.empty(num_ranks() * numel)
        assert comm.all_gather_into_tensor(out, sample(me(), numel)).wait() is out
        assert_same(out, torch.cat(samples(numel)), "all_gather_into_tensor")
        outs = [torch.empty(num_ranks() * numel), torch.empty(num_ranks() * 3)]
        comm.all_gather_into_tensor_coalesced(outs, [sample(me(), numel), sample(me(), 3)]).wait()
        for out, shape in zip(outs, (numel, 3), strict=True):
            assert_same(out, torch.cat(samples(shape)), "all_gather_into_tensor_coalesced")
        root = num_ranks() - 1
        outs = [torch.empty(numel) for _ in range(num_ranks())] if me() == root else None
        got = comm.gather(sample(me(), numel), outs, root).wait()
        assert (got is None) == (me() != root)
        if outs:
            assert_same(torch.cat(outs), torch.cat(samples(numel)), "gather")
        out = torch.empty(numel)
        assert comm.scatter(out, samples(numel) if me() == 0 else None, 0).wait() is out
        assert_same(out, sample(me(), numel), "scatter")


def scattered_reductions() -> None:
    for numel in (7, 50_000):
        want = reduced(samples(num_ranks() * numel)).chunk(num_ranks())[me()]
        out = torch.empty(numel)
        assert comm.reduce_scatter_tensor(out, sample(me(), num_ranks() * numel)).wait() is out
        assert_same(out, want, "reduce_scatter_tensor")
        out = torch.empty(numel)
        parts = list(sample(me(), num_ranks() * numel).chunk(num_ranks()))
        assert comm.reduce_scatter(out, parts).wait() is out
        assert_same(out, want, "reduce_scatter")
        outs = [torch.empty(numel), torch.empty(numel)]
        tensors = [sample(me(), num_ranks() * numel) for _ in outs]
        for out in comm.reduce_scatter_tensor_coalesced(outs, tensors).wait():
            assert_same(out, want, "reduce_scatter_tensor_coalesced")


def all_to_alls() -> None:
    for numel in (7, 50_000):
        tensors = [sample(me(), numel, salt=rank) for rank in range(num_ranks())]
        want = torch.cat([sample(rank, numel, salt=me()) for rank in range(num_ranks())])
        out = torch.empty(num_ranks() * numel)
        assert comm.all_to_all_single(out, torch.cat(tensors)).wait() is out
        assert_same(out, want, "all_to_all_single")
        outs = [torch.empty(numel) for _ in range(num_ranks())]
        comm.all_to_all(outs, tensors).wait()
        assert_same(torch.cat(outs), want, "all_to_all")
    gives = [me() + 1] * num_ranks()
    gets = [rank + 1 for rank in range(num_ranks())]
    out = torch.empty(sum(gets), 2)
    comm.all_to_all_single(out, torch.full((sum(gives), 2), float(me())), gets, gives).wait()
    want = torch.cat([torch.full((rank + 1, 2), float(rank)) for rank in range(num_ranks())])
    assert_same(out, want, "all_to_all_single, uneven")


def messages() -> None:
    for numel in (7, 50_000):
        after, before = (me() + 1) % num_ranks(), (me() - 1) % num_ranks()
        out = torch.empty(numel)
        got = comm.exchange([("send", sample(me(), numel), after), ("recv", out, before)]).wait()
        assert len(got) == 1
        assert got[0] is out
        assert_same(out, sample(before, numel), "exchange")


def sends() -> None:
    for numel in (7, 50_000):
        if me() == 0:
            tensor = sample(0, numel)
            assert comm.send(tensor, 1, tag=3).wait() is tensor
            comm.send(sample(0, numel, salt=1), 1).wait()
        elif me() == 1:
            out = torch.empty(numel)
            assert comm.recv(out, 0, tag=3).wait() is out
            assert_same(out, sample(0, numel), "recv")
            assert_same(comm.recv(out).wait(), sample(0, numel, salt=1), "recv from anyone")


def objects() -> None:
    own = {"rank": me(), "text": "ä" * (1 + 5000 * me())}
    every = [{"rank": rank, "text": "ä" * (1 + 5000 * rank)} for rank in range(num_ranks())]
    assert comm.all_gather_object(own).wait() == every
    assert comm.gather_object(own, 1).wait() == (every if me() == 1 else None)
    given = [own, 7] if me() == 1 else [None, None]
    assert comm.broadcast_object_list(given, 1).wait() == [every[1], 7]
    assert comm.scatter_object_list(every if me() == 0 else None, 0).wait() == own
    assert comm.barrier().wait() is None


def on_a_group_of_some() -> None:
    """Roots and peers are ranks of the world, in any group."""
    members = [num_ranks() - 1, 0]
    group = dist.new_group(members)
    if me() in members:
        tensor = sample(me(), 9)
        comm.broadcast(tensor, members[0], group).wait()
        assert_same(tensor, sample(members[0], 9), "broadcast in a group")
        assert comm.all_gather_object(me(), group).wait() == sorted(members)
        assert comm.gather_object(me(), 0, group).wait() == (sorted(members) if me() == 0 else None)
    dist.barrier()


def allocations() -> None:
    tensor = comm.allocate((3, 4), torch.float64)
    assert_same(tensor, torch.zeros(3, 4, dtype=torch.float64), "allocate")
    assert_same(comm.all_reduce(tensor.fill_(1)).wait(), torch.full((3, 4), num_ranks() * 1.0).double())


def waited_twice() -> None:
    tensor = torch.ones(5)
    handle = comm.all_reduce(tensor)
    assert handle.wait() is handle.wait()
    assert handle.is_done()
    assert (tensor == num_ranks()).all(), "reduced twice"


def steps_run_once() -> None:
    calls: list[float] = []

    def step(tensor: torch.Tensor) -> float:
        calls.append(tensor[0].item())
        return calls[-1] * 2

    handle = comm.all_reduce(torch.ones(5)).then(step)
    assert isinstance(handle, comm.Handle)
    assert handle.wait() == handle.wait() == 2 * num_ranks()
    assert calls == [num_ranks()]
    chained = comm.all_reduce(torch.ones(5)).then(lambda t: t + 1).then(lambda t: t.sum().item())
    assert chained.wait() == 5 * (num_ranks() + 1)


def steps_run_once_between_threads() -> None:
    calls: list[int] = []
    handle = comm.all_reduce(torch.ones(5)).then(lambda tensor: calls.append(1))
    threads = [threading.Thread(target=handle.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1], f"the step ran {len(calls)} times"


def a_failing_step() -> None:
    def step(tensor: torch.Tensor) -> None:
        calls.append(1)
        raise OSError("disk full")

    calls: list[int] = []
    handle = comm.all_reduce(torch.ones(5)).then(step)
    for _ in range(2):
        with pytest.raises(OSError, match="disk full"):
            handle.wait()
    assert calls == [1]
    assert_still_usable()


def buffers_are_held() -> None:
    tensor = torch.ones(100_000)
    alive = weakref.ref(tensor)
    handle = comm.all_reduce(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    assert (handle.wait() == num_ranks()).all()
    out, whole = torch.empty(5), torch.ones(5 * num_ranks())
    alive = weakref.ref(whole)
    handle = comm.reduce_scatter_tensor(out, whole)
    del whole
    gc.collect()
    assert alive() is not None or handle.is_done()
    handle.wait()
    gc.collect()
    assert alive() is None, "an input that is held after the wait"


def dropped_handles_warn() -> None:
    beside = dist.new_group()
    if dist.get_rank() > 0:
        dist.barrier(group=beside)  # so that rank 0's collective can't be done before its handle is dropped
        comm.all_reduce(torch.ones(5)).wait()
    else:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comm.all_reduce(torch.ones(5))
            gc.collect()
        dist.barrier(group=beside)
        seen = [str(warning.message) for warning in caught if issubclass(warning.category, ResourceWarning)]
        assert len(seen) == 1, seen
        assert "all_reduce" in seen[0]
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm.all_reduce(torch.ones(5)).wait()
        gc.collect()
        dist.barrier()
    assert not [w for w in caught if issubclass(w.category, ResourceWarning)]


def futures() -> None:
    tensor = torch.ones(5)
    future = comm.all_reduce(tensor).future()
    assert isinstance(future, torch._C.Future), type(future)  # what c10d's own works give
    got = future.wait()
    got = got[0] if isinstance(got, list) else got
    assert (got == num_ranks()).all()
    assert (tensor == num_ranks()).all()
    doubled = comm.all_reduce(torch.ones(5)).then(lambda t: t * 2).future()
    assert (doubled.wait() == 2 * num_ranks()).all()


def late_ranks_are_named() -> None:
    """wait(timeout) gives up for now; the collective goes on, and the next wait gets it."""
    late = num_ranks() - 1
    tensor = torch.ones(5)
    if me() == late:
        for rank in range(late):
            comm.recv(torch.empty(1), rank).wait()  # all others have given up once
        comm.all_reduce(tensor).wait()
    else:
        handle = comm.all_reduce(tensor)
        assert not handle.is_done()
        for _ in range(2):
            with pytest.raises(weft.PeerTimeoutError) as caught:
                handle.wait(timeout=0.2)
        comm.send(torch.ones(1), late).wait()
        assert caught.value.ranks == (late,), caught.value
        assert isinstance(caught.value, TimeoutError)
        assert "all_reduce" in str(caught.value)
        assert handle.wait() is tensor
    assert (tensor == num_ranks()).all()
    assert_still_usable()


def errors_are_kept() -> None:
    """The same error, at every wait. gloo notices nothing without the desync check."""
    tensor = torch.ones(5 if me() else 6)
    if on_gloo():
        return
    handle = comm.all_reduce(tensor)
    for _ in range(3):
        with pytest.raises(weft.DesyncError):
            handle.wait()
    assert handle.is_done()
    assert_still_usable()


BODIES: list[Callable[[], Any]] = [
    reductions,
    copies,
    scattered_reductions,
    all_to_alls,
    messages,
    sends,
    objects,
    on_a_group_of_some,
    allocations,
    waited_twice,
    steps_run_once,
    steps_run_once_between_threads,
    a_failing_step,
    buffers_are_held,
    futures,
    errors_are_kept,
]

"""The one door: every function of `weft.comm`, on the local group and on gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.local.inputs import assert_same, me, num_ranks, reduced, sample, samples
from tests.ranks import run_on
from weft import comm

pytestmark = [run_on(threads=3, timeout=60), run_on(weft=3, gloo=3, timeout=20)]


def test_reductions() -> None:
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


def test_copies() -> None:
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


def test_scattered_reductions() -> None:
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


def test_all_to_alls() -> None:
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


def test_messages_in_a_ring() -> None:
    for numel in (7, 50_000):
        after, before = (me() + 1) % num_ranks(), (me() - 1) % num_ranks()
        out = torch.empty(numel)
        got = comm.exchange([("send", sample(me(), numel), after), ("recv", out, before)]).wait()
        assert len(got) == 1
        assert got[0] is out
        assert_same(out, sample(before, numel), "exchange")


def test_sends_and_receives() -> None:
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


def test_objects() -> None:
    own = {"rank": me(), "text": "ä" * (1 + 5000 * me())}
    every = [{"rank": rank, "text": "ä" * (1 + 5000 * rank)} for rank in range(num_ranks())]
    assert comm.all_gather_object(own).wait() == every
    assert comm.gather_object(own, 1).wait() == (every if me() == 1 else None)
    given = [own, 7] if me() == 1 else [None, None]
    assert comm.broadcast_object_list(given, 1).wait() == [every[1], 7]
    assert comm.scatter_object_list(every if me() == 0 else None, 0).wait() == own
    assert comm.barrier().wait() is None


def test_a_group_of_some() -> None:
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


def test_allocations() -> None:
    tensor = comm.allocate((3, 4), torch.float64)
    assert_same(tensor, torch.zeros(3, 4, dtype=torch.float64), "allocate")
    assert_same(comm.all_reduce(tensor.fill_(1)).wait(), torch.full((3, 4), num_ranks() * 1.0).double())

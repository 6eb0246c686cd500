"""Coalesced, object, sparse and barrier forms, and groups of some ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.local.inputs import (
    all_gather_single,
    assert_same,
    assert_still_usable,
    me,
    num_ranks,
    reduce_scatter_single,
    reduced,
    sample,
    samples,
)
from tests.ranks import run_on

pytestmark = [
    run_on(threads=(2, 3), timeout=60),
    run_on(weft=(2, 4), timeout=60, full=True),
    run_on(gloo=4, timeout=20, full=True),
]
# By torch, and still there.
DEPRECATED = pytest.mark.filterwarnings("ignore:.*coalesced.* will be deprecated:FutureWarning")

SHAPES = [(3,), (0,), (40, 50), (), (20_001,)]


@DEPRECATED
def test_all_reduce_coalesced() -> None:
    for is_async in (False, True):
        tensors = [sample(me(), shape) for shape in SHAPES]
        work = dist.all_reduce_coalesced(tensors, async_op=is_async)
        if is_async:
            work.wait()
        for shape, tensor in zip(SHAPES, tensors, strict=True):
            assert_same(tensor, reduced(samples(shape)), f"all_reduce_coalesced, {shape}")


@DEPRECATED
def test_all_gather_coalesced() -> None:
    tensors = [sample(me(), shape) for shape in SHAPES]
    outs = [[torch.full(shape, -1.0) for shape in SHAPES] for _ in range(num_ranks())]
    dist.all_gather_coalesced(outs, tensors)
    for rank, of_rank in enumerate(outs):
        for shape, out in zip(SHAPES, of_rank, strict=True):
            assert_same(out, sample(rank, shape), f"all_gather_coalesced, {shape} of {rank}")


def test_torchs_coalescing_manager() -> None:
    for is_async in (False, True):
        tensors = [sample(me(), shape) for shape in SHAPES]
        with dist._coalescing_manager(async_ops=is_async) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if is_async:
            manager.wait()
        for shape, tensor in zip(SHAPES, tensors, strict=True):
            assert_same(tensor, reduced(samples(shape)), f"coalesced all_reduce, {shape}")

        sizes = (5, 20_001)
        outs = [torch.empty(num_ranks() * numel) for numel in sizes]
        with dist._coalescing_manager(async_ops=is_async) as manager:
            for out, numel in zip(outs, sizes, strict=True):
                all_gather_single(out, sample(me(), numel))
        if is_async:
            manager.wait()
        for out, numel in zip(outs, sizes, strict=True):
            assert_same(out, torch.cat(samples(numel)), f"coalesced all_gather, {numel}")

        parts = [torch.empty(numel) for numel in sizes]
        with dist._coalescing_manager(async_ops=is_async) as manager:
            for part, numel in zip(parts, sizes, strict=True):
                reduce_scatter_single(part, sample(me(), num_ranks() * numel))
        if is_async:
            manager.wait()
        for part, numel in zip(parts, sizes, strict=True):
            want = reduced(samples(num_ranks() * numel)).chunk(num_ranks())[me()]
            assert_same(part, want, f"coalesced reduce_scatter, {numel}")


def test_objects() -> None:
    own = {"rank": me(), "text": "ä" * (1 + 1000 * me()), "tensor": sample(me(), 3).tolist()}
    every = [None] * num_ranks()
    dist.all_gather_object(every, own)
    assert [value["rank"] for value in every] == list(range(num_ranks()))
    assert every[-1]["text"] == "ä" * (1 + 1000 * (num_ranks() - 1))
    for root in range(num_ranks()):
        gathered = [None] * num_ranks() if me() == root else None
        dist.gather_object(own, gathered, root)
        assert gathered is None or gathered == every
        values = [own, None, 7] if me() == root else [None] * 3
        dist.broadcast_object_list(values, root)
        assert values == [every[root], None, 7]
        out = [None]
        dist.scatter_object_list(out, every if me() == root else [None] * num_ranks(), root)
        assert out == [own]
    if me() == 0:
        dist.send_object_list([own, (1, 2)], 1)
    elif me() == 1:
        got = [None, None]
        dist.recv_object_list(got, 0)
        assert got == [every[0], (1, 2)]


def sparse(rows: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        rows.reshape(1, -1), torch.ones(rows.numel(), 3), (10, 3), check_invariants=True
    )


def test_sparse_all_reduce() -> None:
    """Ranks may give different places, places twice, and none at all (as rank 0 does)."""
    rows = torch.arange(me() * 2)
    tensor = sparse(torch.cat([rows, rows]))
    dist.all_reduce(tensor)
    want = torch.zeros(10, 3)
    for rank in range(num_ranks()):
        want[: rank * 2] += 2
    assert_same(tensor.to_dense(), want, "sparse all_reduce")


def test_sparse_all_reduce_of_coalesced_tensors() -> None:
    tensor = sparse(torch.arange(me() * 2)).coalesce()
    dist.all_reduce(tensor)
    want = torch.zeros(10, 3)
    for rank in range(num_ranks()):
        want[: rank * 2] += 1
    assert_same(tensor.to_dense(), want, "sparse all_reduce of coalesced tensors")


def test_sparse_all_reduce_of_nothing() -> None:
    tensor = torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (5,), check_invariants=True
    )
    dist.all_reduce(tensor)
    assert_same(tensor.to_dense(), torch.zeros(5), "sparse all_reduce of nothing")


def test_barriers() -> None:
    for _ in range(20):
        dist.barrier()
        dist.barrier(async_op=True).wait()
    # dist.monitored_barrier refuses every backend that isn't called gloo.
    world: Any = dist.group.WORLD
    world.monitored_barrier()
    world.monitored_barrier(wait_all_ranks=True)


def test_groups_of_some_ranks() -> None:
    """Subsets, odd orders and groups of one; ranks that are not in a group go on."""
    everyone = list(range(num_ranks()))
    for members in (everyone[::-1], everyone[:-1], everyone[1:], [0], [num_ranks() - 1], everyone):
        group = dist.new_group(members)
        if me() not in members:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
            continue
        members = [dist.get_global_rank(group, rank) for rank in range(len(members))]
        tensor = sample(me(), 1000)
        dist.all_reduce(tensor, group=group)
        assert_same(tensor, reduced([sample(rank, 1000) for rank in members]), f"all_reduce in {members}")
        outs = [torch.empty(3) for _ in members]
        dist.all_gather(outs, sample(me(), 3), group=group)
        for rank, out in zip(members, outs, strict=True):
            assert_same(out, sample(rank, 3), f"all_gather in {members}")
        tensor = sample(me(), 30_000)
        dist.broadcast(tensor, members[-1], group=group)
        assert_same(tensor, sample(members[-1], 30_000), f"broadcast in {members}")
        if me() == members[0] and len(members) > 1:
            dist.send(sample(me(), 9), members[1], group=group)
        elif len(members) > 1 and me() == members[1]:
            tensor = torch.empty(9)
            dist.recv(tensor, members[0], group=group)
            assert_same(tensor, sample(members[0], 9), f"recv in {members}")
        dist.barrier(group)
        dist.destroy_process_group(group)
    assert_still_usable()


def test_two_groups_started_in_opposite_orders() -> None:
    """Groups of the same ranks."""
    one, two = dist.new_group(), dist.new_group()
    for numel in (5, 200_000):
        first, second = sample(me(), numel), sample(me(), numel, salt=1)
        if me() % 2:
            works = [
                dist.all_reduce(second, group=two, async_op=True),
                dist.all_reduce(first, group=one, async_op=True),
            ]
        else:
            works = [
                dist.all_reduce(first, group=one, async_op=True),
                dist.all_reduce(second, group=two, async_op=True),
            ]
        for work in works:
            work.wait()
        assert_same(first, reduced(samples(numel)), "all_reduce on the first group")
        assert_same(second, reduced(samples(numel, salt=1)), "all_reduce on the second group")


def test_many_works_waited_for_backwards() -> None:
    tensors = [sample(me(), 1 + 997 * i, salt=i) for i in range(30)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works[::-1]:
        work.wait()
    for i, tensor in enumerate(tensors):
        assert_same(tensor, reduced(samples(1 + 997 * i, salt=i)), f"async all_reduce {i}")


@run_on(threads=4, timeout=60)
@run_on(weft=4, timeout=60, full=True)
@run_on(gloo=4, timeout=20, full=True)
def test_a_mesh_of_two_dimensions() -> None:
    """A 2 x 2 mesh: ranks 0 1 / 2 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    for axis, partner in (("row", (me() + 2) % 4), ("column", me() ^ 1)):
        tensor = sample(me(), 5000)
        dist.all_reduce(tensor, group=mesh.get_group(axis))
        assert_same(tensor, reduced([sample(me(), 5000), sample(partner, 5000)]), f"all_reduce over {axis}")

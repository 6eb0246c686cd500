"""The local group on CUDA: several ranks on one GPU, as processes and as threads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import weft
from tests.ranks import run_on

pytestmark = run_on(gpu=(2, 3), gpu_threads=3, timeout=120, collective_timeout=60)

SIZES = (0, 1, 1000, 262_145, 3_000_001)


def _rank_tensor(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + numel % 997)
    return torch.randint(-8, 8, (numel,), generator=generator).to(dtype)


def _all(numel: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [_rank_tensor(rank, numel, dtype) for rank in range(dist.get_world_size())]


def _mine(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return _rank_tensor(dist.get_rank(), numel, dtype).cuda()


def test_reductions() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for numel in SIZES:
            total = torch.stack(_all(numel, dtype)).sum(0).to(dtype) if numel else torch.empty(0, dtype=dtype)
            tensor = _mine(numel, dtype)
            dist.all_reduce(tensor)
            assert torch.equal(tensor.cpu(), total), (dtype, numel)
            tensor = _mine(numel, dtype)
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
            assert torch.equal(tensor.cpu(), total)
            tensor = _mine(numel, dtype)
            dist.reduce(tensor, size - 1)
            expected = total if rank == size - 1 else _rank_tensor(rank, numel, dtype)
            assert torch.equal(tensor.cpu(), expected)
            whole = _mine(numel * size, dtype)
            part = torch.empty(numel, dtype=dtype, device="cuda")
            weft.comm.reduce_scatter_tensor(part, whole).wait()
            if numel:
                sums = torch.stack(_all(numel * size, dtype)).sum(0).to(dtype)
                assert torch.equal(part.cpu(), sums[rank * numel : (rank + 1) * numel])


def test_movements() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for numel in SIZES:
        out = torch.empty(numel * size, device="cuda")
        weft.comm.all_gather_into_tensor(out, _mine(numel)).wait()
        assert torch.equal(out.cpu(), torch.cat(_all(numel)))
        tensor = _mine(numel)
        dist.broadcast(tensor, size - 1)
        assert torch.equal(tensor.cpu(), _rank_tensor(size - 1, numel))
        outs = [torch.empty(numel, device="cuda") for _ in range(size)] if rank == 0 else None
        dist.gather(_mine(numel), outs, 0)
        if outs is not None:
            assert all(torch.equal(a.cpu(), b) for a, b in zip(outs, _all(numel), strict=True))
        given = [torch.full((numel,), float(rank * 10 + peer), device="cuda") for peer in range(size)]
        got = [torch.empty(numel, device="cuda") for _ in range(size)]
        dist.all_to_all(got, given)
        for peer, tensor in enumerate(got):
            assert torch.equal(tensor.cpu(), torch.full((numel,), float(peer * 10 + rank)))
        if rank == 0:
            dist.send(_mine(numel), 1)
        if rank == 1:
            tensor = torch.empty(numel, device="cuda")
            dist.recv(tensor, 0)
            assert torch.equal(tensor.cpu(), _rank_tensor(0, numel))


def test_allocated_buffers() -> None:
    group: Any = dist.group.WORLD
    for numel in (1000, 3_000_001):
        for _ in range(3):
            tensor = group.allocate(numel, device="cuda")
            assert not tensor.any()
            tensor.copy_(_mine(numel))
            dist.all_reduce(tensor)
            assert torch.equal(tensor.cpu(), torch.stack(_all(numel)).sum(0))
            view = tensor[100:900]
            view.fill_(1.0)
            dist.all_reduce(view)
            assert (view == dist.get_world_size()).all()
            del tensor, view


def test_a_collective_keeps_its_place_on_the_callers_stream() -> None:
    """It sees what was written before it, and later work sees its result."""
    side = torch.cuda.Stream()
    for numel in (10_000, 2_000_000):
        for turn in range(20):
            with torch.cuda.stream(side):
                torch.cuda._sleep(
                    2_000_000
                )  # the GPU is busy: an unordered collective would read stale numbers
                tensor = torch.full((numel,), float(turn), device="cuda")
                handle = weft.comm.all_reduce(tensor)
                handle.wait()
                doubled = tensor * 2
            side.synchronize()
            assert (doubled == 2.0 * turn * dist.get_world_size()).all()


def test_works_in_flight() -> None:
    """A call that overlaps, then one on the caller's stream: neither may disturb the other's buffers."""
    size = dist.get_world_size()
    for turn in range(20):
        first = torch.full((3_000_001,), float(turn), device="cuda")
        second = torch.full((3_000_001,), float(turn + 1), device="cuda")
        work = dist.all_reduce(first, async_op=True)
        dist.all_reduce(second)
        work.wait()
        assert (first == turn * size).all()
        assert (second == (turn + 1) * size).all()


def test_gather_from_a_side_stream() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    side = torch.cuda.Stream()
    for turn in range(10):
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            tensor = torch.full((300_001,), float(turn * 10 + rank), device="cuda")
            outs = [torch.empty_like(tensor) for _ in range(size)] if rank == 0 else None
            dist.gather(tensor, outs, 0, async_op=True).wait()
        side.synchronize()
        for peer, out in enumerate(outs or []):
            assert (out == turn * 10 + peer).all()

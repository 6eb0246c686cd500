"""Buffers from `group.allocate`, which peers read in place."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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

pytestmark = [run_on(threads=3, timeout=60), run_on(weft=3, timeout=60, full=True)]

NUMELS = (1, 1000, 20_001, 300_001)


def allocate(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    world: Any = dist.group.WORLD
    return world.allocate(*shape, dtype=dtype)


def given(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """This rank's sample, in an allocated buffer."""
    return allocate(numel, dtype=dtype).copy_(sample(me(), numel, dtype))


def test_buffers_are_ordinary_tensors() -> None:
    for shape in ((), (0,), (3, 0, 2), (5,), (3, 4), (2, 3, 500)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8):
            tensor = allocate(*shape, dtype=dtype)
            assert type(tensor) is torch.Tensor
            assert_same(tensor, torch.zeros(shape, dtype=dtype), "a new buffer")
            assert tensor.is_contiguous()
            assert tensor.device.type == "cpu"
            assert not tensor.requires_grad
            assert tensor.data_ptr() % 64 == 0 or tensor.numel() == 0
            tensor.fill_(1)
            assert_same(tensor, torch.ones(shape, dtype=dtype), "a written buffer")
    weight = torch.nn.Parameter(allocate(4, 4).fill_(2))
    (weight @ torch.ones(4)).sum().backward()
    assert_same(weight.grad, torch.ones(4, 4), "a gradient")
    torch.optim.SGD([weight], lr=1).step()
    assert_same(weight.detach(), torch.ones(4, 4), "a parameter after a step")


def test_every_collective_takes_buffers() -> None:
    for numel in NUMELS:
        tensor = given(numel)
        dist.all_reduce(tensor)
        assert_same(tensor, reduced(samples(numel)), f"all_reduce of {numel}")
        tensor = given(numel)
        dist.broadcast(tensor, 1)
        assert_same(tensor, sample(1, numel), f"broadcast of {numel}")
        tensor = given(numel)
        dist.reduce(tensor, 0)
        if me() == 0:
            assert_same(tensor, reduced(samples(numel)), f"reduce of {numel}")
        outs = [allocate(numel) for _ in range(num_ranks())]
        dist.all_gather(outs, given(numel))
        assert_same(torch.cat(outs), torch.cat(samples(numel)), f"all_gather of {numel}")
        out = allocate(num_ranks() * numel)
        all_gather_single(out, given(numel))
        assert_same(out, torch.cat(samples(numel)), f"all_gather_into_tensor of {numel}")
        out = allocate(numel)
        reduce_scatter_single(out, given(num_ranks() * numel))
        want = reduced(samples(num_ranks() * numel)).chunk(num_ranks())[me()]
        assert_same(out, want, f"reduce_scatter_tensor of {numel}")
        out = allocate(num_ranks() * numel)
        dist.all_to_all_single(out, given(num_ranks() * numel))
        want = torch.cat([every.chunk(num_ranks())[me()] for every in samples(num_ranks() * numel)])
        assert_same(out, want, f"all_to_all_single of {numel}")
        outs = [allocate(numel) for _ in range(num_ranks())] if me() == 0 else None
        dist.gather(given(numel), outs, 0)
        if outs:
            assert_same(torch.cat(outs), torch.cat(samples(numel)), f"gather of {numel}")
        out = allocate(numel)
        parts = [allocate(numel).copy_(part) for part in samples(numel)] if me() == 0 else None
        dist.scatter(out, parts, 0)
        assert_same(out, sample(me(), numel), f"scatter of {numel}")
        if me() == 0:
            dist.send(given(numel), 1)
        elif me() == 1:
            out = allocate(numel)
            dist.recv(out, 0)
            assert_same(out, sample(0, numel), f"recv of {numel}")


def test_every_dtype_and_op() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.int32, torch.bool):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            tensor = given(20_001, dtype)
            dist.all_reduce(tensor, op)
            assert_same(tensor, reduced(samples(20_001, dtype), op), f"all_reduce {op}")


def test_a_buffer_on_one_rank_only() -> None:
    for numel in NUMELS:
        for owner in range(num_ranks()):
            tensor = given(numel) if me() == owner else sample(me(), numel)
            dist.all_reduce(tensor)
            assert_same(tensor, reduced(samples(numel)), f"all_reduce, allocated on {owner}")
            tensor = given(numel) if me() == owner else sample(me(), numel)
            dist.broadcast(tensor, 0)
            assert_same(tensor, sample(0, numel), f"broadcast, allocated on {owner}")
            out = allocate(num_ranks() * numel) if me() == owner else torch.empty(num_ranks() * numel)
            all_gather_single(out, sample(me(), numel))
            assert_same(out, torch.cat(samples(numel)), f"all_gather_into_tensor, allocated on {owner}")
            whole = given(num_ranks() * numel) if me() == owner else sample(me(), num_ranks() * numel)
            out = torch.empty(numel)
            reduce_scatter_single(out, whole)
            want = reduced(samples(num_ranks() * numel)).chunk(num_ranks())[me()]
            assert_same(out, want, f"reduce_scatter_tensor, allocated on {owner}")


def test_views_and_slices() -> None:
    """Each rank's slice is at another place of its buffer; what is around it stays."""
    for numel in (7, 30_000):
        buffer = allocate(numel + 100).fill_(9)
        view = buffer[10 * me() + 3 : 10 * me() + 3 + numel]
        view.copy_(sample(me(), numel))
        dist.all_reduce(view)
        assert_same(view, reduced(samples(numel)), "all_reduce of a slice")
        assert (buffer[: 10 * me() + 3] == 9).all()
        assert (buffer[10 * me() + 3 + numel :] == 9).all()
        columns = allocate(numel, 2).fill_(9)
        columns[:, 1].copy_(sample(me(), numel))
        dist.all_reduce(columns[:, 1])
        assert_same(columns[:, 1], reduced(samples(numel)), "all_reduce of a column")
        assert (columns[:, 0] == 9).all()
        whole = allocate(num_ranks() * numel).fill_(-1)
        part = whole[me() * numel :][:numel]
        part.copy_(sample(me(), numel))
        all_gather_single(whole, part)
        assert_same(whole, torch.cat(samples(numel)), "all_gather in place")
        as_bytes = given(numel).view(torch.uint8)
        dist.broadcast(as_bytes, 0)
        assert_same(as_bytes.view(torch.float32), sample(0, numel), "broadcast of a buffer as bytes")


def test_a_view_keeps_the_memory() -> None:
    tail = given(50_000)[40_000:]
    gc.collect()
    others = [allocate(50_000).fill_(7) for _ in range(3)]
    dist.all_reduce(tail)
    assert_same(tail, reduced(samples(50_000))[40_000:], "all_reduce of what is left of a buffer")
    assert all((other == 7).all() for other in others)


def test_memory_is_dropped_and_allocated_again() -> None:
    """A new buffer may have the old one's memory: it is zeroed, and peers must not see the old one's."""
    kept: list[torch.Tensor] = []
    for i in range(60):
        numel = (1000, 30_000, 5)[i % 3]
        tensor = allocate(numel)
        assert not tensor.any(), "a buffer that is not zeroed"
        tensor.copy_(sample(me(), numel, salt=i))
        dist.all_reduce(tensor)
        assert_same(tensor, reduced(samples(numel, salt=i)), f"all_reduce in buffer {i}")
        if me() == i % num_ranks():
            kept[:] = [allocate(200_000).fill_(i)]  # so that ranks' buffers come to lie in different places
        del tensor
        if i % 20 == 19 and me() == i % num_ranks():
            kept.clear()


def test_a_buffer_may_be_dropped_while_it_is_under_way() -> None:
    """The collective holds its buffers, or it would write into somebody else's."""
    for i in range(10):
        work = dist.all_reduce(given(100_000), async_op=True)
        other = allocate(100_000).fill_(5)
        work.wait()
        assert (other == 5).all(), f"round {i}"


def test_a_buffer_may_be_used_on_another_group() -> None:
    group: Any = dist.new_group(list(range(num_ranks()))[::-1])
    for numel in (5, 50_000):
        tensor = group.allocate(numel).copy_(sample(me(), numel))
        dist.all_reduce(tensor)  # on the default group
        assert_same(tensor, reduced(samples(numel)), "all_reduce of another group's buffer")
        tensor = given(numel)
        dist.all_reduce(tensor, group=group)
        assert_same(tensor, reduced(samples(numel)), "all_reduce of the default group's buffer")
    buffer = group.allocate(50_000).copy_(sample(me(), 50_000))
    dist.destroy_process_group(group)
    assert_same(buffer, sample(me(), 50_000), "a buffer whose group is gone")
    dist.all_reduce(buffer)
    assert_same(buffer, reduced(samples(50_000)), "all_reduce of a buffer whose group is gone")


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_many_buffers_leave_nothing() -> None:
    """200 buffers of 4 MB, one after another: no more memory or files at the end than after a few."""

    def use(num_buffers: int) -> None:
        for i in range(num_buffers):
            tensor = allocate(1 << 20)
            tensor.fill_(1)
            if i % 10 == 0:
                dist.all_reduce(tensor)
                assert tensor[-1] == num_ranks()

    use(20)
    gc.collect()
    dist.barrier()
    fds, memory = num_fds(), resident_bytes()
    use(200)
    gc.collect()
    dist.barrier()
    # Thread ranks share the process with what other tests have left; a leak would be 200 files and 800 MB.
    assert num_fds() <= fds + 20, f"{num_fds() - fds} more open files"
    assert resident_bytes() < memory + (160 << 20), f"{(resident_bytes() - memory) >> 20} MiB more"


def test_many_buffers_at_once() -> None:
    buffers = [allocate(300).fill_(me()) for _ in range(300)]
    for i in (0, 150, 299):
        dist.all_reduce(buffers[i])
        assert (buffers[i] == sum(range(num_ranks()))).all()
    assert (buffers[1] == me()).all()


def test_groups_leave_nothing() -> None:
    def make(num_groups: int) -> None:
        for _ in range(num_groups):
            group: Any = dist.new_group()
            tensor = group.allocate(1000).fill_(1)
            dist.all_reduce(tensor, group=group)
            assert (tensor == num_ranks()).all()
            dist.all_reduce(torch.ones(50_000), group=group)
            dist.destroy_process_group(group)

    make(5)
    gc.collect()
    dist.barrier()
    fds, memory = num_fds(), resident_bytes()
    make(50)
    gc.collect()
    dist.barrier()
    assert num_fds() <= fds + 2, f"{num_fds() - fds} more open files"
    assert resident_bytes() < memory + (32 << 20), f"{(resident_bytes() - memory) >> 20} MiB more"
    assert_still_usable()

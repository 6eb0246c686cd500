"""Tensors that are not one plain run of memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tests.local.inputs import (
    all_gather_single,
    as_bytes,
    assert_same,
    functional_all_gather,
    me,
    num_ranks,
    reduce_scatter_single,
    reduced,
    sample,
    samples,
)
from tests.ranks import run_on

pytestmark = [run_on(threads=(2, 3), timeout=60), run_on(weft=(2, 4), timeout=60, full=True)]

# Each gives a tensor of the wanted shape, strided in its own way, filled with 9.
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.full((40, 30), 9.0).t(),
    "strided": lambda: torch.full((30, 80), 9.0)[:, ::2],
    "offset": lambda: torch.full((33, 41), 9.0)[1:31, 1:],
    "channels_last": lambda: torch.full((2, 3, 5, 7), 9.0).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.full((3, 50, 4, 60), 9.0).permute(3, 1, 0, 2),
    "0-dim": lambda: torch.tensor(9.0),
    "0-dim of a vector": lambda: torch.full((5,), 9.0)[3],
    "empty": lambda: torch.empty(3, 0, 5),
    "empty, transposed": lambda: torch.empty(0, 5).t(),
    "large, transposed": lambda: torch.full((600, 500), 9.0).t(),
}


def laid_out(layout: str, rank: int) -> torch.Tensor:
    tensor = LAYOUTS[layout]()
    return tensor.copy_(sample(rank, tensor.shape))


def each_laid_out(layout: str) -> list[torch.Tensor]:
    return [sample(rank, LAYOUTS[layout]().shape) for rank in range(num_ranks())]


def test_reductions_of_any_layout() -> None:
    for layout in LAYOUTS:
        want = reduced(each_laid_out(layout))
        tensor = laid_out(layout, me())
        strides = tensor.stride()
        dist.all_reduce(tensor)
        assert_same(tensor, want, f"all_reduce, {layout}")
        assert tensor.stride() == strides
        tensor = laid_out(layout, me())
        dist.reduce(tensor, 1)
        if me() == 1:
            assert_same(tensor, want, f"reduce, {layout}")


def test_neighbours_of_a_view_stay() -> None:
    """What lies between the elements of a strided tensor is not the collective's."""
    for numel in (4, 50_000):
        whole = torch.full((numel, 2), 9.0)
        dist.all_reduce(whole[:, 0])
        dist.broadcast(whole[:, 0], 0)
        out = torch.full((num_ranks(), numel, 2), 9.0)
        dist.all_gather([*out[:, :, 0]], whole[:, 0].contiguous())
        assert (whole[:, 1] == 9).all()
        assert (whole[:, 0] == 9 * num_ranks()).all()
        assert (out[:, :, 1] == 9).all()
        assert (out[:, :, 0] == 9 * num_ranks()).all()


def test_copies_of_any_layout() -> None:
    for layout in LAYOUTS:
        every = each_laid_out(layout)
        tensor = laid_out(layout, me())
        dist.broadcast(tensor, 1)
        assert_same(tensor, every[1], f"broadcast, {layout}")
        outs = [LAYOUTS[layout]() for _ in every]
        dist.all_gather(outs, laid_out(layout, me()))
        for got, want in zip(outs, every, strict=True):
            assert_same(got, want, f"all_gather, {layout}")
        gathered = [LAYOUTS[layout]() for _ in every] if me() == 0 else None
        dist.gather(laid_out(layout, me()), gathered, 0)
        for got, want in zip(gathered or [], every, strict=False):
            assert_same(got, want, f"gather, {layout}")
        out = LAYOUTS[layout]()
        dist.scatter(out, [laid_out(layout, rank) for rank in range(num_ranks())] if me() == 0 else None, 0)
        assert_same(out, every[me()], f"scatter, {layout}")


def test_messages_of_any_layout() -> None:
    for layout in LAYOUTS:
        if me() == 0:
            dist.send(laid_out(layout, 0), 1)
        elif me() == 1:
            tensor = LAYOUTS[layout]()
            dist.recv(tensor, 0)
            assert_same(tensor, sample(0, tensor.shape), f"recv, {layout}")
        other_layout = LAYOUTS[layout]().contiguous()
        if me() == 1:
            dist.send(laid_out(layout, 1), 0)
        elif me() == 0:
            dist.recv(other_layout, 1)
            assert_same(other_layout, sample(1, other_layout.shape), f"recv into contiguous, {layout}")


def test_ranks_may_lay_out_a_shape_in_different_ways() -> None:
    for shape in ((6, 4), (300, 200)):
        rows, columns = shape
        own = sample(me(), shape)
        tensor = torch.empty(columns, rows).t().copy_(own) if me() % 2 else own
        dist.all_reduce(tensor)
        assert_same(tensor, reduced(samples(shape)), "all_reduce, one layout a rank")


def test_whole_tensors_of_any_layout() -> None:
    """all_gather_into_tensor, reduce_scatter_tensor and all_to_all_single, transposed in and out."""
    for rows, columns in ((4, 3), (300, 200)):
        every = samples((rows, columns))
        out = torch.empty(columns, num_ranks() * rows).t()
        all_gather_single(out, torch.empty(columns, rows).t().copy_(every[me()]))
        assert_same(out, torch.cat(every), "all_gather_into_tensor, transposed")

        wholes = samples((num_ranks() * rows, columns))
        out = torch.empty(columns, rows).t()
        reduce_scatter_single(out, torch.empty(columns, num_ranks() * rows).t().copy_(wholes[me()]))
        assert_same(out, reduced(wholes).chunk(num_ranks())[me()], "reduce_scatter_tensor, transposed")


def test_inputs_may_be_expanded() -> None:
    """Those that only are read: their elements share memory."""
    given = torch.tensor([float(me())]).expand(300)
    outs = [torch.empty(300) for _ in range(num_ranks())]
    dist.all_gather(outs, given)
    for rank, out in enumerate(outs):
        assert_same(out, torch.full((300,), float(rank)), "all_gather of an expanded tensor")
    part = torch.empty(100)
    reduce_scatter_single(part, torch.ones(1).expand(100 * num_ranks()))
    assert_same(part, torch.full((100,), float(num_ranks())), "reduce_scatter_tensor of an expanded tensor")


def test_conjugated_and_negated_views() -> None:
    """torch.distributed's own functions refuse conjugated views; functional collectives pass them on."""
    for numel in (50, 50_000):
        plain = samples(numel, torch.complex64)
        got = funcol.all_reduce(plain[me()].conj(), "sum", dist.group.WORLD)
        want = reduced(plain).conj().resolve_conj()
        assert_same(got.resolve_conj(), want, "functional all_reduce of a conjugated view")
        got = functional_all_gather(plain[me()].conj(), 0, dist.group.WORLD)
        want = torch.cat(plain).conj().resolve_conj()
        assert_same(got.resolve_conj(), want, "functional all_gather of a conjugated view")
    for numel in (50, 50_000):
        negated = torch._neg_view(sample(me(), numel))
        dist.all_reduce(negated)
        assert_same(negated.resolve_neg(), -reduced(samples(numel)), "all_reduce of a negated view")
        negated = torch._neg_view(sample(me(), numel))
        dist.broadcast(negated, 0)
        assert_same(negated.resolve_neg(), -sample(0, numel), "broadcast of a negated view")


def test_outputs_may_be_views_of_one_buffer_in_any_order() -> None:
    for numel in (3, 20000):
        whole = torch.full((num_ranks() * numel,), 9.0)
        parts = list(whole.chunk(num_ranks()))
        dist.all_gather(parts[::-1], sample(me(), numel))
        want = torch.cat(samples(numel)[::-1])
        assert torch.equal(as_bytes(whole), as_bytes(want))

"""Calls that don't fit together: an error on every rank, and nothing changed. The last rank's differs."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import weft
from tests.local.inputs import (
    all_gather_single,
    assert_same,
    assert_still_usable,
    me,
    num_ranks,
    reduce_scatter_single,
    sample,
)
from tests.ranks import run_on

pytestmark = [run_on(threads=(2, 4)), run_on(weft=4, full=True)]

Tensors = list[torch.Tensor]


def differs() -> bool:
    return me() == num_ranks() - 1


def another_shape() -> tuple[Callable[[], object], Tensors]:
    tensor = sample(me(), 8 if differs() else 7)
    return lambda: dist.all_reduce(tensor), [tensor]


def another_shape_when_large() -> tuple[Callable[[], object], Tensors]:
    tensor = sample(me(), 200_001 if differs() else 200_000)
    return lambda: dist.all_reduce(tensor), [tensor]


def small_here_and_large_there() -> tuple[Callable[[], object], Tensors]:
    tensor = sample(me(), 3 if differs() else 300_000)
    return lambda: dist.all_reduce(tensor), [tensor]


def another_dtype() -> tuple[Callable[[], object], Tensors]:
    tensor = sample(me(), 7, torch.int32 if differs() else torch.float32)
    return lambda: dist.all_reduce(tensor), [tensor]


def another_reduction() -> tuple[Callable[[], object], Tensors]:
    tensor = sample(me(), 7)
    op = dist.ReduceOp.MAX if differs() else dist.ReduceOp.SUM
    return lambda: dist.all_reduce(tensor, op), [tensor]


def another_root_of_broadcast() -> tuple[Callable[[], object], Tensors]:
    tensor = sample(me(), 7)
    return lambda: dist.broadcast(tensor, 1 if differs() else 0), [tensor]


def another_root_of_reduce() -> tuple[Callable[[], object], Tensors]:
    tensor = sample(me(), 7)
    return lambda: dist.reduce(tensor, 1 if differs() else 0), [tensor]


def another_root_of_gather() -> tuple[Callable[[], object], Tensors]:
    root = 1 if differs() else 0
    tensor = sample(me(), 7)
    outs = [torch.zeros(7) for _ in range(num_ranks())] if me() == root else None
    return lambda: dist.gather(tensor, outs, root), [tensor, *(outs or [])]


def another_root_of_scatter() -> tuple[Callable[[], object], Tensors]:
    root = 1 if differs() else 0
    tensor = sample(me(), 7)
    parts = [torch.zeros(7) for _ in range(num_ranks())] if me() == root else None
    return lambda: dist.scatter(tensor, parts, root), [tensor]


def another_collective() -> tuple[Callable[[], object], Tensors]:
    tensor = sample(me(), 7)
    return (lambda: dist.broadcast(tensor, 0)) if differs() else (lambda: dist.all_reduce(tensor)), [tensor]


def a_barrier_here() -> tuple[Callable[[], object], Tensors]:
    tensor = sample(me(), 7)
    return dist.barrier if differs() else (lambda: dist.all_reduce(tensor)), [tensor]


def another_broadcast_shape() -> tuple[Callable[[], object], Tensors]:
    tensor = sample(me(), 8 if differs() else 7)
    return lambda: dist.broadcast(tensor, 0), [tensor]


def another_all_gather_shape() -> tuple[Callable[[], object], Tensors]:
    numel = 8 if differs() else 7
    tensor, outs = sample(me(), numel), [torch.zeros(numel) for _ in range(num_ranks())]
    return lambda: dist.all_gather(outs, tensor), [tensor, *outs]


def another_all_gather_into_tensor_shape() -> tuple[Callable[[], object], Tensors]:
    numel = 8 if differs() else 7
    tensor, out = sample(me(), numel), torch.zeros(num_ranks() * numel)
    return lambda: all_gather_single(out, tensor), [tensor, out]


def another_reduce_scatter_shape() -> tuple[Callable[[], object], Tensors]:
    numel = 8 if differs() else 7
    whole, out = sample(me(), num_ranks() * numel), torch.zeros(numel)
    return lambda: reduce_scatter_single(out, whole), [whole, out]


def another_async_shape() -> tuple[Callable[[], object], Tensors]:
    tensor = sample(me(), 8 if differs() else 7)
    return lambda: dist.all_reduce(tensor, async_op=True).wait(), [tensor]


def splits_that_do_not_meet() -> tuple[Callable[[], object], Tensors]:
    """The last rank gives rank 0 two elements, which expects one."""
    gives = [1] * num_ranks()
    gives[0] = 2 if differs() else 1
    tensor, out = sample(me(), sum(gives)), torch.zeros(num_ranks())
    return lambda: dist.all_to_all_single(out, tensor, [1] * num_ranks(), gives), [tensor, out]


def another_number_of_coalesced_tensors() -> tuple[Callable[[], object], Tensors]:
    tensors = [sample(me(), 7) for _ in range(2 if differs() else 3)]

    def call() -> None:
        with dist._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)

    return call, tensors


def another_sparse_shape() -> tuple[Callable[[], object], Tensors]:
    tensor = torch.eye(4 if differs() else 3).to_sparse()
    dense = torch.zeros(1)
    return lambda: dist.all_reduce(tensor), [dense]


MISMATCHES = [
    another_shape,
    another_shape_when_large,
    small_here_and_large_there,
    another_dtype,
    another_reduction,
    another_root_of_broadcast,
    another_root_of_reduce,
    another_root_of_gather,
    another_root_of_scatter,
    another_collective,
    a_barrier_here,
    another_broadcast_shape,
    another_all_gather_shape,
    another_all_gather_into_tensor_shape,
    another_reduce_scatter_shape,
    another_async_shape,
    splits_that_do_not_meet,
    another_number_of_coalesced_tensors,
    another_sparse_shape,
]


@pytest.mark.parametrize("mismatch", MISMATCHES)
def test_every_rank_gets_the_error(mismatch: Callable[[], tuple[Callable[[], object], Tensors]]) -> None:
    """The call raises DesyncError, leaves its tensors alone, and the group goes on.

    Of splits that don't meet, the two ranks are named; of anything else, every rank's call.
    """
    call, tensors = mismatch()
    before = [tensor.clone() for tensor in tensors]
    try:
        call()
    except weft.DesyncError as error:
        message, blamed = str(error), error.ranks
    else:
        raise AssertionError("no error")
    last = num_ranks() - 1
    for rank in (0, last) if mismatch is splits_that_do_not_meet else range(num_ranks()):
        assert re.search(rf"\brank {rank}\b", message), f"rank {rank} is not named in: {message}"
    assert last in blamed, f"rank {last} is not among the blamed {blamed}: {message}"
    for tensor, was in zip(tensors, before, strict=True):
        assert_same(tensor, was, f"a tensor of a refused call ({message})")
    assert_still_usable()

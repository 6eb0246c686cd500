"""Flat layouts and tensors in containers."""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

from weft.tensors import (
    batch_by_dtype,
    contiguous_strides,
    dense_strides,
    find_tensors,
    has_gaps,
    map_tensors,
    view_in,
)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 1, 3), (4, 0, 2), (1, 1)])
def test_contiguous_strides_are_torchs(shape: tuple[int, ...]) -> None:
    assert contiguous_strides(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize(
    ("tensor", "is_kept"),
    [
        (torch.empty(2, 3), True),
        (torch.empty(2, 3).t(), True),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.empty(4, 4)[:, :2], False),
        (torch.empty(1).expand(3), False),
        (torch.empty(3, 1).expand(3, 2), False),
    ],
)
def test_strides_without_gaps_are_kept(tensor: torch.Tensor, is_kept: bool) -> None:
    found = dense_strides(tuple(tensor.shape), tensor.stride())
    assert found == (tensor.stride() if is_kept else contiguous_strides(tensor.shape))


@pytest.mark.parametrize(
    ("tensor", "are_there"),
    [
        (torch.zeros(3, 4), False),
        (torch.zeros(3, 4).t(), False),
        (torch.zeros(2, 3, 4, 5).permute(2, 0, 3, 1), False),
        (torch.zeros(1).expand(5), False),
        (torch.zeros(3, 1, 2).expand(3, 4, 2), False),
        (torch.zeros(()), False),
        (torch.zeros(0, 3)[:, ::2], False),
        (torch.zeros(4, 1)[::3], True),
        (torch.zeros(3, 4)[:, :3], True),
        (torch.zeros(8)[::2], True),
        (torch.zeros(8)[::2].expand(3, 4), True),
        (torch.zeros(9).as_strided((3, 2), (2, 2)), True),
        (torch.zeros(9).as_strided((3, 2), (1, 1)), True),  # it can't tell
    ],
)
def test_gaps_are_seen(tensor: torch.Tensor, are_there: bool) -> None:
    assert has_gaps(tensor.shape, tensor.stride()) == are_there


def test_a_view_lies_in_the_buffer_and_can_be_detached_in_place() -> None:
    flat = torch.arange(12.0)
    view = view_in(flat[2:], 1, (2, 3), (1, 2))
    assert view.tolist() == [[3, 5, 7], [4, 6, 8]]
    view.zero_()
    assert flat[3:9].tolist() == [0] * 6
    view.detach_()  # which torch refuses for what autograd knows as a view


def test_batches_have_one_dtype_and_a_limit() -> None:
    tensors = [torch.empty(4), torch.empty(4, dtype=torch.int64), torch.empty(4), torch.empty(4)]
    batches = [[id(one) for one in batch] for batch in batch_by_dtype(tensors, 32)]
    assert sorted(map(len, batches)) == [1, 1, 2]
    assert sorted(itertools.chain.from_iterable(batches)) == sorted(map(id, tensors))
    assert [id(tensors[0]), id(tensors[2])] in batches


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    value: Any
    note: str = "a note"
    made: Any = dataclasses.field(init=False, default=None)


ONE, TWO, THREE = torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)
CONTAINERS: list[Any] = [
    [ONE, TWO, THREE],
    (ONE, [TWO, {"x": THREE}]),
    {"a": ONE, "b": (TWO, THREE)},
    OrderedDict(a=ONE, b=Pair(TWO, THREE)),
    Pair(ONE, Record(Pair(TWO, THREE))),
    Record([ONE, None, "text", 5, {"x": TWO, "y": [THREE]}]),
]


@pytest.mark.parametrize("value", CONTAINERS)
def test_tensors_are_found_in_containers(value: Any) -> None:
    assert [tensor.item() for tensor in find_tensors(value)] == [1, 2, 3]


@pytest.mark.parametrize("value", CONTAINERS)
def test_tensors_are_mapped_in_containers(value: Any) -> None:
    mapped = map_tensors(lambda tensor: tensor + 10, value)
    assert [tensor.item() for tensor in find_tensors(mapped)] == [11, 12, 13]
    assert type(mapped) is type(value)
    assert [tensor.item() for tensor in find_tensors(value)] == [1, 2, 3]


def test_what_holds_no_tensor_stays_itself() -> None:
    record = Record("nothing")
    assert map_tensors(lambda tensor: tensor + 1, record) is record
    assert list(find_tensors(Record)) == []

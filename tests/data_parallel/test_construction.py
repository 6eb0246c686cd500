"""Construction: ranks that disagree are told; parameters and buffers come from rank 0; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.data_parallel.cases import FULL
from tests.data_parallel.libraries import ON_TORCH, DistributedDataParallel, weft_only
from tests.data_parallel.twins import (
    WIDTH,
    Twin,
    all_ranks,
    assert_same_gradients,
    filled,
    make_rows,
    mean_square,
    net,
    rows_of,
)
from tests.ranks import run_on

pytestmark = run_on(threads=2)


def another_shape(odd: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if odd else 4))


def another_order(odd: bool) -> nn.Module:
    layers = [nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)]
    return nn.Sequential(*reversed(layers)) if odd else nn.Sequential(*layers)


def another_dtype(odd: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if odd:
        model[1].double()
    return model


def one_more(odd: bool) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3 if odd else 2)))


def one_frozen(odd: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.requires_grad_(not odd)
    return model


# What each says: what differs, of which parameter.
DIFFERENCES: list[tuple[Callable[[bool], nn.Module], list[str]]] = [
    (another_shape, ["1.weight", "4", "5"]),
    (another_order, ["0.weight", "2", "4"]),
    (another_dtype, ["1.weight", "float32", "float64"]),
    (one_more, ["2", "3"]),
    (one_frozen, ["1.weight"]),
]


@weft_only("names a number of the parameter, not the parameter, and does not compare dtypes")
@pytest.mark.parametrize("odd_rank", [2, pytest.param(0, marks=FULL)])
@pytest.mark.parametrize(("make", "words"), DIFFERENCES, ids=lambda value: getattr(value, "__name__", ""))
@run_on(threads=3)
def test_models_that_differ_are_an_error_on_every_rank(
    make: Callable[[bool], nn.Module], words: list[str], odd_rank: int
) -> None:
    with pytest.raises(RuntimeError) as caught:
        DistributedDataParallel(make(dist.get_rank() == odd_rank))
    message = str(caught.value)
    for word in words:
        assert word in message, message
    assert f"rank {odd_rank}" in message.lower(), message
    # The group goes on: an error of construction is none of communication.
    assert all_ranks(dist.get_rank()) == [0, 1, 2]
    twin = Twin(net())
    twin.step(make_rows())


def test_models_with_other_numbers_of_parameters_are_an_error() -> None:
    """The words are torch's."""
    with pytest.raises(RuntimeError, match="DDP expects same model across all ranks"):
        DistributedDataParallel(one_more(dist.get_rank() == 1))


@pytest.mark.parametrize("bucket_cap", [0.0001, pytest.param(25, marks=FULL)])
@run_on(threads=4)
def test_parameters_and_buffers_are_broadcast_from_the_first_rank(bucket_cap: float) -> None:
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).double()
    filled(model, seed=dist.get_rank())
    model[1].running_mean.fill_(dist.get_rank() + 1)
    model[1].num_batches_tracked.fill_(dist.get_rank() + 1)
    parallel = DistributedDataParallel(model, bucket_cap_mb=bucket_cap)
    right = filled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), seed=0)
    for param, first in zip(parallel.parameters(), right.parameters(), strict=True):
        assert torch.equal(param, first)
    assert (model[1].running_mean == 1).all()
    assert model[1].num_batches_tracked == 1


def test_without_init_sync_nothing_is_broadcast() -> None:
    model = filled(nn.Linear(WIDTH, WIDTH), seed=dist.get_rank())
    before = model.weight.detach().clone()
    with weft.record() as events:
        DistributedDataParallel(model, init_sync=False)
    assert events == []
    assert torch.equal(model.weight, before)


def test_without_init_sync_gradients_are_reduced_all_the_same() -> None:
    twin = Twin(net(), init_sync=False)
    for step in range(2):
        twin.step(make_rows(step))


def test_what_is_ignored_is_neither_broadcast_nor_reduced() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = filled(nn.Linear(WIDTH, WIDTH))
            self.ignored = filled(nn.Linear(WIDTH, WIDTH), seed=dist.get_rank())
            self.register_buffer("count", torch.tensor(float(dist.get_rank())))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.ignored(torch.tanh(self.kept(rows)))

    model, bare = Parts(), Parts()
    names = [name for name, _ in model.ignored.named_parameters(prefix="ignored")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*names, "count"])
    parallel = DistributedDataParallel(model)
    for step in range(2):
        rows = rows_of(make_rows(step), dist.get_rank())
        parallel.zero_grad()
        bare.zero_grad()
        mean_square(parallel, rows, 0).backward()
        mean_square(bare, rows, 0).backward()
        assert model.count == dist.get_rank()
        assert_same_gradients(model.ignored, bare.ignored)  # this rank's own
        kept = all_ranks(model.kept.weight.grad)
        assert torch.equal(kept[0], kept[1])
        mean = torch.stack(all_ranks(bare.kept.weight.grad)).mean(0)
        torch.testing.assert_close(kept[0], mean, rtol=1e-12, atol=1e-14)


def test_a_group_other_than_the_world() -> None:
    groups = [dist.new_group([rank]) for rank in range(2)]
    mine = groups[dist.get_rank()]
    parallel = DistributedDataParallel(net(), process_group=mine)
    bare = net()
    rows = rows_of(make_rows(), dist.get_rank())
    mean_square(parallel, rows, 0).backward()
    mean_square(bare, rows, 0).backward()
    assert_same_gradients(parallel, bare)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"device_ids": [0, 1]}, ValueError),
        ({"device_ids": [0]}, ValueError),
        ({"output_device": 1}, ValueError),
    ],
    ids=str,
)
def test_devices_make_no_sense_for_a_module_on_the_cpu(options: dict, error: type[Exception]) -> None:
    with pytest.raises(error):
        DistributedDataParallel(net(), **options)


@weft_only("takes anything until it breaks")
@pytest.mark.parametrize("cap", [-1, "big"])
def test_a_bucket_size_that_makes_no_sense_is_refused(cap: object) -> None:
    with pytest.raises((ValueError, TypeError), match="bucket_cap_mb"):
        DistributedDataParallel(net(), bucket_cap_mb=cap)


def test_what_is_not_initialized_lazily_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"[Uu]ninitialized|lazy|dry forward"):
        DistributedDataParallel(nn.LazyLinear(3))


@run_on()
def test_without_a_process_group_is_refused() -> None:
    with pytest.raises(
        ValueError if ON_TORCH else (ValueError, RuntimeError), match=r"init_process_group|process group"
    ):
        DistributedDataParallel(net())

"""Copies, files and state dicts of a DDP module; training goes on right from each of them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.data_parallel.cases import cases
from tests.data_parallel.libraries import DistributedDataParallel, weft_only
from tests.data_parallel.models import Branches, loss_by_rank
from tests.data_parallel.twins import WIDTH, Twin, filled, gradients_of, make_rows, net
from tests.ranks import run_on

pytestmark = run_on(threads=2)


def saved_and_loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


DUPLICATES = [copy.deepcopy, pickled, saved_and_loaded]


@pytest.mark.parametrize(
    ("duplicate", "view", "steps_before"),
    cases(
        DUPLICATES, [False, True], [0, 2], everyday=lambda how, view, num: num == 2 or how is copy.deepcopy
    ),
)
def test_a_copy_trains_on(duplicate: Callable[[Any], Any], view: bool, steps_before: int) -> None:
    twin = Twin(net(), gradient_as_bucket_view=view, bucket_cap_mb=0.0001)
    for step in range(steps_before):
        twin.step(make_rows(step))
    twin.parallel = duplicate(twin.parallel)
    assert type(twin.parallel) is DistributedDataParallel
    for step in range(2):
        twin.step(make_rows(step + 10))


@pytest.mark.parametrize("duplicate", DUPLICATES)
def test_a_copy_and_its_original_have_nothing_in_common(duplicate: Callable[[Any], Any]) -> None:
    twin = Twin(net())
    twin.step(make_rows(0))
    other = Twin(net())
    other.parallel, other.single = duplicate(twin.parallel), copy.deepcopy(twin.single)
    other.backward(make_rows(1))
    assert all(grad is None for grad in gradients_of(twin.parallel).values())
    twin.backward(make_rows(2))
    twin.check()
    other.check()


def test_a_copy_of_one_with_gradients() -> None:
    """A copied parameter has no gradient; the copy of a bucket's view must not bring it back."""
    twin = Twin(net(), gradient_as_bucket_view=True)
    for step in range(2):
        twin.backward(make_rows(step))
    other = Twin(net())
    other.parallel, other.single = copy.deepcopy(twin.parallel), copy.deepcopy(twin.single)
    twin.backward(make_rows(5))
    twin.check()
    other.check()
    other.step(make_rows(6))


def test_a_copy_keeps_its_options() -> None:
    model = DistributedDataParallel(
        net(), find_unused_parameters=True, gradient_as_bucket_view=True, forward_sync_buffers=False
    )
    other = copy.deepcopy(model)
    assert other.find_unused_parameters
    assert other.gradient_as_bucket_view
    assert other.broadcast_buffers is False
    assert dist.get_process_group_ranks(other.process_group) == [0, 1]


def test_state_dict_names_begin_with_module() -> None:
    twin = Twin(filled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))))
    right = {f"module.{name}": value for name, value in twin.single.state_dict().items()}
    seen = twin.parallel.state_dict()
    assert list(seen) == list(right)
    assert all(torch.equal(seen[name], right[name]) for name in right)
    assert next(name for name, _ in twin.parallel.named_parameters()) == "module.0.weight"


def test_a_loaded_state_dict_is_trained_on() -> None:
    twin = Twin(net())
    twin.step(make_rows(0))
    other = net()
    nn.init.constant_(other[0].weight, 0.25)
    twin.single.load_state_dict(other.state_dict())
    twin.parallel.load_state_dict({f"module.{name}": value for name, value in other.state_dict().items()})
    for step in range(2):
        twin.step(make_rows(step + 1))
    twin.parallel.module.load_state_dict(other.state_dict(), assign=False)
    twin.single.load_state_dict(other.state_dict())
    twin.step(make_rows(5))


def test_a_model_wrapped_again_after_training() -> None:
    """The old wrapper is dropped, as after an evaluation with other options."""
    twin = Twin(net())
    twin.step(make_rows(0))
    model = twin.parallel.module
    twin.parallel = None
    twin.parallel = DistributedDataParallel(model)
    for step in range(2):
        twin.step(make_rows(step + 1))


@weft_only("makes calls that are not recorded")
def test_a_wrapper_that_is_dropped_reduces_no_more() -> None:
    """At once, not when the garbage is collected: ranks do that at different times, and would disagree."""
    gc.disable()
    try:
        twin = Twin(net())
        twin.step(make_rows(0))
        model = twin.parallel.module
        twin.parallel = None
        twin.parallel = DistributedDataParallel(model)
        twin.step(make_rows(1))
        with weft.record() as events:
            twin.step(make_rows(2))
    finally:
        gc.enable()
    sent = sum(event.bytes_in for event in events if event.op.startswith("all_reduce"))
    assert sent < 1.5 * sum(param.numel() * param.element_size() for param in model.parameters())


@weft_only("raises without the flag")
def test_a_copy_handles_unused_parameters() -> None:
    twin = Twin(Branches("ab"))
    twin.step(make_rows(0), loss_by_rank("ab"))
    twin.parallel = copy.deepcopy(twin.parallel)
    twin.step(make_rows(1), loss_by_rank("a", "b"))
    twin.step(make_rows(2), loss_by_rank("b"))


def test_the_wrapper_looks_like_its_module() -> None:
    model = net()
    parallel = DistributedDataParallel(model)
    assert parallel.module is model
    parallel.eval()
    assert not model.training
    parallel.train()
    assert model.training
    assert parallel.device_ids is None
    assert parallel.process_group is dist.group.WORLD

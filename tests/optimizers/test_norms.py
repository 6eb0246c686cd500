"""Which norms are summed over which axes: each over all of its own, in one order, none twice."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weft.optimizers.clip import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from weft.optimizers.norms import AxisPlan, Slots, plan_axes

axes = st.lists(st.sampled_from("abcd"), unique=True, max_size=3).map(tuple)
tensors = st.lists(axes, max_size=20)


def plan_norm(sharded: list[tuple[str, ...]], *, is_each_apart: bool = False) -> tuple[list[int], Slots[str]]:
    plan: Slots[str] = Slots(is_each_apart=is_each_apart)
    return [plan.take(own) for own in sharded], plan


@given(tensors)
def test_each_is_summed_over_its_axes(sharded: list[tuple[str, ...]]) -> None:
    slots, plan = plan_norm(sharded)
    for own, slot in zip(sharded, slots, strict=True):
        assert {step.axis for step in plan.sums() if slot in step.indices} == {*own}


@given(tensors)
def test_an_axis_comes_once(sharded: list[tuple[str, ...]]) -> None:
    _, plan = plan_norm(sharded)
    seen = [step.axis for step in plan.sums()]
    assert len(seen) == len({*seen})
    assert all(step.indices for step in plan.sums())


@given(tensors)
def test_those_alike_share_a_slot(sharded: list[tuple[str, ...]]) -> None:
    slots, plan = plan_norm(sharded)
    assert len(plan.axes) == len({*sharded})
    assert {*slots} == {*range(len(plan.axes))}
    apart, plan_apart = plan_norm(sharded, is_each_apart=True)
    assert apart == list(range(len(sharded)))
    assert [step.axis for step in plan_apart.sums()] == [step.axis for step in plan.sums()]


@given(tensors, st.permutations("wxyz"))
def test_names_of_axes_play_no_part(sharded: list[tuple[str, ...]], names: list[str]) -> None:
    """A rank's groups have other names than its neighbour's: the order is that of the tensors."""
    renamed = dict(zip("abcd", names, strict=True))
    slots, plan = plan_norm(sharded)
    other_slots, other = plan_norm([tuple(renamed[axis] for axis in own) for own in sharded])
    assert other_slots == slots
    assert [(step.axis, step.indices) for step in other.sums()] == [
        (renamed[step.axis], step.indices) for step in plan.sums()
    ]


def test_a_plan() -> None:
    slots, plan = plan_norm([(), ("tp",), ("dp", "tp"), ("tp",), ()])
    assert slots == [0, 1, 2, 1, 0]
    assert plan.sums() == (AxisPlan("tp", (1, 2)), AxisPlan("dp", (2,)))
    assert plan_axes([(), ("tp",)]) == (AxisPlan("tp", (1,)),)


# -- plain tensors: no world is needed -------------------------------------------------


def make_params(dtypes: list[torch.dtype]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params: list[nn.Parameter] = []
    for index, dtype in enumerate(dtypes):
        param = nn.Parameter(torch.zeros(index + 1, 3, dtype=dtype))
        param.grad = torch.randn(index + 1, 3, generator=generator).to(dtype)
        params.append(param)
    return params


@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@pytest.mark.parametrize("order", [2, 1.0, 0.5, 7.0, math.inf, -math.inf, 0.0, -2.0, "inf"])
@pytest.mark.parametrize("dtypes", [[torch.float32] * 3, [torch.float64, torch.float32], [torch.complex128]])
def test_plain_as_torchs(dtypes: list[torch.dtype], order: float, max_norm: float) -> None:
    ours, theirs = make_params(dtypes), make_params(dtypes)
    seen = clip_grad_norm_(ours, max_norm, order)
    right = nn.utils.clip_grad_norm_(theirs, max_norm, order)
    torch.testing.assert_close(seen, right)
    for param, twin in zip(ours, theirs, strict=True):
        torch.testing.assert_close(param.grad, twin.grad)


def test_in_two_steps() -> None:
    ours, theirs = make_params([torch.float32] * 3), make_params([torch.float32] * 3)
    norm = get_total_norm([param.grad for param in ours if param.grad is not None])
    clip_grads_with_norm_(ours, 0.1, norm)
    clip_grad_norm_(theirs, 0.1)
    for param, twin in zip(ours, theirs, strict=True):
        torch.testing.assert_close(param.grad, twin.grad, rtol=1e-6, atol=0)
    assert torch.equal(get_total_norm([]), torch.tensor(0.0))
    clip_grads_with_norm_([nn.Parameter(torch.ones(1))], 0.1, norm)


def test_an_empty_generator_warns() -> None:
    with pytest.warns(UserWarning, match="`parameters` is an empty generator, no gradient clipping") as seen:
        norm = clip_grad_norm_((param for param in ()), 1.0)
    assert norm.item() == 0.0
    assert seen[0].filename == __file__


def test_nothing_is_recorded_by_autograd() -> None:
    (param,) = make_params([torch.float32])
    param.grad = param.grad.requires_grad_()  # type: ignore[union-attr]
    norm = clip_grad_norm_(param, 0.1)
    assert not norm.requires_grad

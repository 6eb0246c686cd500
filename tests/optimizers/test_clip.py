"""Gradients of any placements clipped as one vector, beside the same as plain tensors in one process."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils import clip_grad_norm_ as torch_clip_grad_norm_

import weft
from tests.optimizers.clip_cases import EXACT, Case, cut, make_mesh, numbered
from tests.ranks import run_on
from weft.optimizers.clip import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from weft.tensors import make_dtensor, make_parameter, make_spec
from weft.testing import Expect, assert_calls

pytestmark = run_on(threads=4)

ORDERS = (2.0, 1.0, 3.0, 0.5, math.inf, 0.0, -1.0, -math.inf)


def mixed_case() -> Case:
    """Plain ones, three meshes with shared axes, every placement, uneven shards and empty ones."""
    mesh, other = make_mesh(2, 2), make_mesh(4)
    case = Case()
    case.add_plain(numbered(3, 2, seed=1))
    case.add(numbered(5, 4, seed=2), mesh["tp"], [Shard(0)])
    case.add(numbered(3, seed=3), mesh["tp"], [Replicate()])
    case.add(numbered(6, 4, seed=4), mesh["tp"], [Shard(1)])
    case.add(numbered(9, 4, seed=5), mesh, [_StridedShard(0, split_factor=2), Shard(0)])
    case.add(numbered(4, 6, seed=6), mesh, [Replicate(), Shard(1)])
    case.add(numbered(4, 6, seed=7), mesh, [Shard(0), Replicate()])
    case.add(numbered(5, 3, seed=8), mesh, [Shard(0), Shard(1)])
    case.add(numbered(2, 3, seed=9), other, [Shard(0)])
    case.add(numbered(7, seed=10), mesh["dp"], [Shard(0)])
    case.add(numbered(seed=11), mesh["dp"], [Replicate()])
    return case


def test_mixtures() -> None:
    for order in ORDERS:
        mixed_case().clip(0.1, order)


def test_partial_gradients_become_sums() -> None:
    mesh = make_mesh(2, 2)
    case = Case()
    case.add(numbered(5, 4, seed=2), mesh["tp"], [Shard(0)])
    case.add(numbered(3, seed=3), mesh["tp"], [Partial()])
    case.add(numbered(4, seed=4, dtype=torch.float32), mesh["tp"], [Partial()])
    case.add(numbered(2, 2, seed=5), mesh["tp"], [Partial("avg")])
    case.add(numbered(4, 3, seed=6), mesh, [Shard(0), Partial()])
    case.add(numbered(6, seed=7), mesh, [Partial(), Partial("avg")])
    with weft.record() as events:
        case.clip(0.1, tolerance=1e-6)
    # One sum a dtype and axis, then one of norms an axis.
    flats = [
        Expect("all_reduce", feature="clip", bytes_in=size) for size in (8 * (3 + 4 + 6 + 6), 4 * 4, 8 * 6)
    ]
    assert_calls(events, [*flats, Expect("all_reduce", bytes_in=8), Expect("all_reduce", bytes_in=8)])
    for param in case.params:
        assert isinstance(param.grad, DTensor)
        assert param.grad.placements == param.placements
        assert (param.grad.shape, param.grad.stride()) == (param.shape, param.stride())


def test_norms_stay_aside() -> None:
    mesh = make_mesh(2, 2)
    case = Case()
    case.add(numbered(3, seed=3), mesh["tp"], [Partial()])
    case.add(numbered(5, 4, seed=2), mesh["tp"], [Shard(0)])
    grads = [param.grad for param in case.params]
    before = [grad.to_local().clone() for grad in grads]
    norm = get_total_norm(iter(grads))
    right = torch.nn.utils.get_total_norm([whole.grad for whole in case.whole])
    assert norm.item() == pytest.approx(right.item(), rel=EXACT)
    for param, grad, was in zip(case.params, grads, before, strict=True):
        assert param.grad is grad
        assert torch.equal(grad.to_local(), was)
    # Terms of a sum may be scaled one by one.
    with weft.record() as events:
        clip_grads_with_norm_(case.params, 0.5, norm)
    assert not events
    assert grads[0].placements == (Partial(),)
    for grad, was in zip(grads, before, strict=True):
        torch.testing.assert_close(grad.to_local(), was * (0.5 / (right.item() + 1e-6)), rtol=EXACT, atol=0)


def test_one_small_sum_an_axis() -> None:
    mesh = make_mesh(2, 2)
    for placements, num_sums in [
        ([[Replicate(), Replicate()]], 0),
        ([[Replicate(), Shard(0)]] * 5, 1),
        ([[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()]], 2),
    ]:
        case = Case()
        for seed, places in enumerate(placements):
            case.add(numbered(4, 4, seed=seed), mesh, places)
        case.add_plain(numbered(2))
        case.add(numbered(4, 4), mesh["tp"], [Replicate()])
        with weft.record() as events:
            case.clip(0.1)
        assert_calls(events, [Expect("all_reduce", feature="clip")] * num_sums)
    single = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    case = Case()
    case.add(numbered(4, 4), single["tp"], [Shard(0)])
    case.add(numbered(4, 4), single["tp"], [Partial()])
    with weft.record() as events:
        case.clip(0.1)
    assert not events


def test_missing_on_some_ranks() -> None:
    """A shard that a rank has no gradient of is zero in the whole; what is summed stays in line."""
    mesh = make_mesh(2, 2)
    rank = dist.get_rank()
    case = Case()
    case.add(numbered(2, 3, seed=1), mesh["tp"], [Shard(0)])
    case.add(numbered(4, 3, seed=2), mesh, [Shard(0), Shard(1)])
    case.add(numbered(4, 3, seed=3), mesh["dp"], [Shard(0)])
    first, second, third = case.params
    if mesh["tp"].get_local_rank() == 0:
        first.grad = None
    if rank != 3:
        second.grad = None
    third.grad = None
    # What is left: row 1 of the first, one block of the second.
    left = torch.cat([numbered(2, 3, seed=1)[1], numbered(4, 3, seed=2)[2:, 2:].flatten()])
    norm = clip_grad_norm_(case.params, 0.1)
    assert norm.item() == pytest.approx(left.norm().item(), rel=EXACT)
    assert norm.dtype == torch.float64
    assert third.grad is None


def test_none_anywhere() -> None:
    mesh = make_mesh(4)
    case = Case()
    case.add(numbered(8), mesh, [Shard(0)])
    case.params[0].grad = None
    assert clip_grad_norm_(case.params, 1.0).item() == 0.0
    for nothing in ([], [nn.Parameter(torch.ones(2))], case.params[0].detach()):
        with weft.record() as events:
            norm = clip_grad_norm_(nothing, 1.0)
        assert torch.equal(norm, torch.tensor(0.0))
        assert norm.dtype == torch.float32
        assert not events


def test_not_finite() -> None:
    mesh = make_mesh(4)
    rank = dist.get_rank()
    text = (
        r"The total norm of order \S+ for gradients from `parameters` is non-finite, so it cannot be "
        "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
        "`error_if_nonfinite=False`"
    )
    for order in (2.0, 1.0, math.inf, -math.inf):
        for bad in (math.nan, math.inf):
            if order == -math.inf and bad == math.inf:
                continue  # the smallest is finite
            for where in (0, 2):
                grad = numbered(8)
                grad[2 * where] = bad
                case = Case()
                case.add(grad, mesh, [Shard(0)])
                before = case.params[0].grad.to_local().clone()
                with pytest.raises(RuntimeError, match=text):
                    clip_grad_norm_(case.params, 1.0, order, error_if_nonfinite=True)
                assert torch.equal(before.nan_to_num(7.0), case.params[0].grad.to_local().nan_to_num(7.0))
                with pytest.raises(RuntimeError, match=text):
                    get_total_norm([case.params[0].grad], order, error_if_nonfinite=True)
                norm = clip_grad_norm_(case.params, 1.0, order)
                assert math.isnan(norm.item()) if math.isnan(bad) else math.isinf(norm.item()), (rank, order)


def test_dtypes() -> None:
    """The norm has torch's dtype; what is in 16 bits is added up in 32."""
    mesh = make_mesh(4)
    for kinds in (
        [torch.float32],
        [torch.bfloat16],
        [torch.float16, torch.float32],
        [torch.bfloat16, torch.float64],
        [torch.complex64],
    ):
        case = Case()
        for seed, dtype in enumerate(kinds):
            case.add(numbered(5, 2, seed=seed, dtype=dtype), mesh, [Shard(0)])
            case.add_plain(numbered(3, seed=seed, dtype=dtype))
        is_rough = bool({torch.bfloat16, torch.float16} & {*kinds})
        case.clip(0.1, tolerance=2**-7 if is_rough else 1e-6)
    case = Case()
    for _ in range(3):
        case.add(torch.ones(4 * 129, dtype=torch.bfloat16), mesh, [Shard(0)])
    right = math.sqrt(3 * 4 * 129)
    assert clip_grad_norm_(case.params, 1.0).item() == torch.tensor(right).bfloat16().item()
    seen = case.params[0].grad.to_local()
    assert torch.equal(seen, torch.full_like(seen, 1.0 / right))
    case.add_plain(torch.zeros(1))
    assert clip_grad_norm_(case.params, 1.0).item() == pytest.approx(right * seen[0].item(), rel=1e-6)


def test_one_by_one() -> None:
    """foreach=False, foreach=True and a lone tensor give the same."""
    for foreach in (False, True, None):
        case = mixed_case()
        norm = clip_grad_norm_((param for param in case.params), 0.1, foreach=foreach)
        case.check(norm, torch_clip_grad_norm_(case.whole, 0.1))
    mesh = make_mesh(4)
    case = Case()
    case.add(numbered(9), mesh, [Shard(0)])
    norm = clip_grad_norm_(case.params[0], 0.1)
    case.check(norm, torch_clip_grad_norm_(case.whole[0], 0.1))


def test_below_the_limit() -> None:
    case = mixed_case()
    before = [
        param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad for param in case.params
    ]
    before = [grad.clone() for grad in before]
    clip_grad_norm_(case.params, 1e6)
    for param, was in zip(case.params, before, strict=True):
        seen = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        assert torch.equal(seen, was)


def test_ranks_agree() -> None:
    """To the bit: else parameters would drift apart."""
    for order in ORDERS:
        norm = clip_grad_norm_(mixed_case().params, 0.1, order)
        norms = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
        dist.all_gather(norms, norm)
        assert all(torch.equal(other, norm) for other in norms)


def test_lying_otherwise_than_the_parameter() -> None:
    """As a Shard parameter whose gradient is whole, or sharded over another dim, or a sum in terms."""
    mesh = make_mesh(4)
    for placement in (Replicate(), Shard(1), Partial()):
        case = Case()
        case.add(numbered(8, 4, seed=2), mesh, [placement])
        param = make_parameter(
            torch.zeros(2, 4).double(), make_spec(mesh, [Shard(0)], case.whole[0]), requires_grad=True
        )
        param.grad = case.params[0].grad
        case.params[0] = param
        case.add(numbered(4, seed=3), mesh, [Shard(0)])
        case.clip(0.1)


def test_refusals() -> None:
    mesh = make_mesh(4)
    case = Case()
    case.add(numbered(4), mesh, [Replicate()])
    case.params[0].grad = make_dtensor(numbered(4), make_spec(mesh, [Partial("max")], numbered(4)))
    with pytest.raises(weft.ConfigError, match=r"Partial\('sum'\) and Partial\('avg'\)"):
        clip_grad_norm_(case.params, 1.0)
    half = DeviceMesh("cpu", [0, 1])
    outside = numbered(2) if dist.get_rank() < 2 else torch.empty(0).double()
    tensor = make_dtensor(outside, make_spec(half, [Shard(0)], numbered(4)))
    if dist.get_rank() < 2:
        get_total_norm([tensor])
    else:
        with pytest.raises(weft.ConfigError, match=f"rank {dist.get_rank()} is not on the mesh"):
            get_total_norm([tensor])


def test_torchs_norms() -> None:
    """The same DTensors under torch's function, where it can: one mesh, no Partial, no plain ones."""
    mesh = make_mesh(2, 2)
    for order in (2.0, 1.0, math.inf):
        case = Case()
        for seed, places in enumerate(
            [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Replicate()]]
        ):
            case.add(numbered(4, 4, seed=seed), mesh, places)
        theirs: list[Any] = [nn.Parameter(torch.zeros_like(param)) for param in case.params]
        for param, twin in zip(case.params, theirs, strict=True):
            twin.grad = param.grad.clone()
        norm = clip_grad_norm_(case.params, 0.1, order)
        right: Any = torch_clip_grad_norm_(theirs, 0.1, order)
        assert norm.item() == pytest.approx(right.full_tensor().item(), rel=EXACT)
        for param, twin in zip(case.params, theirs, strict=True):
            torch.testing.assert_close(param.grad.to_local(), twin.grad.to_local(), rtol=EXACT, atol=0)


def test_sharded_over_tensor_parallel() -> None:
    """A model split over one axis of a mesh and sharded over the other, with a part outside of both."""
    mesh = make_mesh(2, 2)
    single = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 6), nn.Linear(6, 1)).double()
    for seed, param in enumerate(single.parameters()):
        param.data = numbered(*param.shape, seed=seed)
    model = copy.deepcopy(single)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for part in (model[0], model[2]):
        weft.fully_shard(part, mesh=mesh["dp"])
    case = Case(list(model.parameters()), list(single.parameters()))
    for seed, (param, whole) in enumerate(zip(case.params, case.whole, strict=True)):
        whole.grad = numbered(*whole.shape, seed=seed)
        is_plain = not isinstance(param, DTensor)
        place = () if is_plain else (param.device_mesh, param.placements)
        case.cuts.append(functools.partial(cut_or_whole, place))
        local = case.cuts[-1](whole.grad).clone()
        param.grad = local if not place else make_dtensor(local, make_spec(*place, whole))
    kinds = {type(place) for param in case.params if isinstance(param, DTensor) for place in param.placements}
    assert _StridedShard in kinds
    with weft.record() as events:
        case.clip(0.1)
    assert_calls(events, ["all_reduce", "all_reduce"])


def cut_or_whole(place: tuple[Any, ...], whole: torch.Tensor) -> torch.Tensor:
    return cut(whole, *place) if place else whole


@run_on(weft=4, gloo=4, timeout=90, full=True)
def test_all_of_these_in_one_job() -> None:
    for test in (
        test_mixtures,
        test_partial_gradients_become_sums,
        test_norms_stay_aside,
        test_one_small_sum_an_axis,
        test_missing_on_some_ranks,
        test_none_anywhere,
        test_not_finite,
        test_dtypes,
        test_one_by_one,
        test_below_the_limit,
        test_ranks_agree,
        test_lying_otherwise_than_the_parameter,
        test_refusals,
        test_torchs_norms,
        test_sharded_over_tensor_parallel,
    ):
        test()


# -- random ones ------------------------------------------------------------------------------

PLACEMENTS = st.sampled_from([Shard(0), Shard(1), Replicate(), Partial(), Partial("avg")])
SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 6))


def on_mesh(name: str, num_axes: int) -> st.SearchStrategy[Any]:
    return st.tuples(st.just(name), st.lists(PLACEMENTS, min_size=num_axes, max_size=num_axes), SHAPES)


DRAWN = st.one_of(
    st.tuples(st.just("plain"), st.just(()), SHAPES),
    on_mesh("dp", 1),
    on_mesh("tp", 1),
    on_mesh("all", 1),
    on_mesh("dp tp", 2),
)


def random_mixture(drawn: Sequence[tuple[str, Sequence[Any], tuple[int, ...]]], order: float) -> None:
    """Gradients as drawn: the mesh's name, placements and the shape of each."""
    mesh = make_mesh(2, 2)
    meshes = {"dp tp": mesh, "dp": mesh["dp"], "tp": mesh["tp"], "all": make_mesh(4)}
    case = Case()
    for seed, (name, placements, shape) in enumerate(drawn):
        grad = numbered(*shape, seed=seed)
        if name == "plain":
            case.add_plain(grad)
        else:
            case.add(grad, meshes[name], placements)
    case.clip(0.1, order)


@run_on()
@pytest.mark.threads
@pytest.mark.parametrize("num_examples", [5, pytest.param(25, marks=pytest.mark.full)])
def test_random_mixtures(num_examples: int) -> None:
    def check(drawn: list[Any], order: float) -> None:
        weft.launch(
            random_mixture, args=(drawn, order), ranks=4, kind="thread", timeout=30, collective_timeout=10
        )

    drawn = st.lists(DRAWN, min_size=1, max_size=8)
    settings(max_examples=num_examples, deadline=None)(given(drawn, st.sampled_from(ORDERS))(check))()

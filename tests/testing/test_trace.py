"""Traces compared: each kind of difference is found, named, and measured; what may differ passes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from weft.errors import ConfigError, StateError
from weft.testing import (
    EXACT,
    Tolerance,
    Trace,
    Tracer,
    assert_ranks_agree,
    assert_same,
    bare,
    compare,
    train,
)
from weft.testing.models import (
    MLP,
    Batch,
    BranchingMLP,
    KitModel,
    NormedMLP,
    SparseBag,
    TiedMLP,
    TinyTransformer,
    make_batches,
)
from weft.testing.trace import plan_names

MODELS = [MLP, NormedMLP, TiedMLP, BranchingMLP, SparseBag, TinyTransformer]


def trace_of(model: KitModel, num_steps: int = 2) -> Trace:
    return train(model, make_batches(model, num_steps))


@pytest.fixture
def trace() -> Trace:
    return trace_of(NormedMLP())


@pytest.mark.parametrize("model", MODELS)
def test_a_run_can_be_repeated_to_the_bit(model: type[KitModel]) -> None:
    torch.manual_seed(0)
    first = trace_of(model())
    torch.manual_seed(1)
    assert_same(first, trace_of(model()), tolerance=EXACT)
    assert first.losses[0] != first.losses[1]


@pytest.mark.parametrize("model", MODELS)
def test_another_seed_is_another_run(model: type[KitModel]) -> None:
    with pytest.raises(AssertionError, match="the start, initial parameter of"):
        assert_same(trace_of(model(seed=0)), trace_of(model(seed=1)))


def test_a_gradient_that_is_off_is_named_with_place_and_values(trace: Trace) -> None:
    other = copy.deepcopy(trace)
    gradient = other.steps[1].gradients["first.weight"]
    assert gradient is not None
    right = gradient[2, 3].item()
    gradient[2, 3] += 0.5
    seen = gradient[2, 3].item()
    gradient[0, 0] += 0.25
    with pytest.raises(AssertionError) as caught:
        assert_same(trace, other, names=("torch", "weft"))
    message = str(caught.value)
    assert message.startswith(
        "torch and weft differ at step 1, gradient of 'first.weight', rank 0: 2 of 64 elements differ, "
        f"most of all at [2, 3]: torch {right}, weft {seen} "
    )
    assert "0.5 apart" in message


def test_the_first_difference_is_the_one_that_is_named(trace: Trace) -> None:
    other = copy.deepcopy(trace)
    other.steps[1].parameters["last.bias"].add_(1)
    other.steps[0].buffers["norm.running_mean"].add_(1)
    with pytest.raises(AssertionError, match=r"step 0, buffer of 'norm\.running_mean'"):
        assert_same(trace, other)
    with pytest.raises(AssertionError, match=r"step 1, parameter of 'last\.bias'"):
        assert_same(trace, other, kinds=("parameter",))
    assert_same(trace, other, kinds=("loss", "gradient"))


def test_a_loss_that_is_off_is_found(trace: Trace) -> None:
    steps = (replace(trace.steps[0], loss=trace.steps[0].loss * 1.0001), trace.steps[1])
    with pytest.raises(AssertionError, match="step 0, loss, rank 0"):
        assert_same(trace, replace(trace, steps=steps))


def test_no_gradient_is_not_a_gradient_of_zeros() -> None:
    first, second = BranchingMLP(), BranchingMLP()
    trace = trace_of(first, 1)
    assert trace.steps[0].gradients["right.weight"] is None
    zeros = copy.deepcopy(trace.steps[0].gradients)
    filled = {name: torch.zeros(8, 8) if grad is None else grad for name, grad in zeros.items()}
    other = replace(trace, steps=(replace(trace.steps[0], gradients=filled),))
    with pytest.raises(
        AssertionError, match=r"'right\.weight'.*has none \(None\), second has one of \[8, 8\]"
    ):
        assert_same(trace, other)
    assert_same(trace, trace_of(second, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: tensor.double(), "dtype: first torch.float32, second torch.float64"),
        (lambda tensor: tensor[:4], r"shape: first torch.Size\(\[8, 8\]\), second torch.Size\(\[4, 8\]\)"),
        (lambda tensor: tensor.to_sparse(), "layout: first torch.strided, second torch.sparse_coo"),
        (lambda tensor: tensor * torch.nan, "64 of 64 elements differ"),
        (lambda tensor: tensor / 0, "64 of 64 elements differ"),
    ],
)
def test_another_form_is_a_difference(trace: Trace, change: object, message: str) -> None:
    parameters = dict(trace.initial)
    parameters["first.weight"] = change(parameters["first.weight"])  # type: ignore[operator]
    with pytest.raises(AssertionError, match=message):
        assert_same(trace, replace(trace, initial=parameters))


def test_names_and_steps_must_be_the_same(trace: Trace) -> None:
    missing = {name: value for name, value in trace.initial.items() if name != "last.bias"}
    with pytest.raises(AssertionError, match=r"'last\.bias', rank 0: only first has it"):
        assert_same(trace, replace(trace, initial=missing))
    with pytest.raises(AssertionError, match=r"'last\.bias', rank 0: only second has it"):
        assert_same(replace(trace, initial=missing), trace)
    with pytest.raises(AssertionError, match="2 steps and 1 steps"):
        assert_same(trace, replace(trace, steps=trace.steps[:1]))


def test_nan_differs_from_nan_unless_said_otherwise(trace: Trace) -> None:
    trace.initial["first.weight"].fill_(torch.nan)
    with pytest.raises(AssertionError, match="first nan, second nan"):
        assert_same(trace, copy.deepcopy(trace))
    assert_same(trace, copy.deepcopy(trace), tolerance=Tolerance(equal_nan=True))


def test_the_tolerance_lets_roundings_pass_and_nothing_else(trace: Trace) -> None:
    def moved(by: float) -> Trace:
        other = copy.deepcopy(trace)
        weight = other.initial["first.weight"]
        weight += by * weight.abs().max() * torch.finfo(weight.dtype).eps
        return other

    assert_same(trace, moved(16))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same(trace, moved(128))
    with pytest.raises(AssertionError, match="0 allowed"):
        assert_same(trace, moved(16), tolerance=EXACT)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same(trace, moved(16), tolerance=Tolerance(rtol=1e-7, atol=0.0))
    assert_same(trace, moved(128), tolerance=Tolerance(atol=1e-3))


def test_a_gradient_that_is_only_rounding_may_be_another_rounding(trace: Trace) -> None:
    # BatchNorm takes away whatever the bias in front of it adds.
    other = copy.deepcopy(trace)
    gradient = other.steps[0].gradients["first.bias"]
    assert gradient is not None
    assert gradient.abs().max() < 1e-7
    gradient.neg_()
    assert_same(trace, other)
    gradient.add_(1e-5)
    with pytest.raises(AssertionError, match=r"gradient of 'first\.bias'"):
        assert_same(trace, other)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]
)
def test_no_dtype_hides_a_difference_of_a_twentieth(dtype: torch.dtype) -> None:
    assert 0 < Tolerance().allowed(dtype, 1.0, 1.0) < 0.05


def test_integers_are_exact(trace: Trace) -> None:
    other = copy.deepcopy(trace)
    other.steps[0].buffers["norm.num_batches_tracked"].add_(1)
    with pytest.raises(AssertionError, match="first 1, second 2 "):
        assert_same(trace, other, tolerance=Tolerance(atol=10.0))


def test_ranks_must_agree_to_the_bit(trace: Trace) -> None:
    other = replace(copy.deepcopy(trace), rank=1)
    assert_ranks_agree([trace, other])
    other.steps[0].buffers["norm.running_mean"].add_(1)
    assert_ranks_agree([trace, other])
    weight = other.steps[0].parameters["first.weight"]
    weight.copy_(torch.nextafter(weight, torch.tensor(torch.inf)))
    with pytest.raises(AssertionError, match="rank 0 and rank 1 differ at step 0, parameter"):
        assert_ranks_agree([trace, other])


@pytest.mark.parametrize(
    ("names", "bare_names"),
    [
        (["a.b", "c"], ["a.b", "c"]),
        (["module.a.b", "module.c"], ["a.b", "c"]),
        (["module.module.a"], ["a"]),
        (["module.a", "b"], ["module.a", "b"]),
        (["_orig_mod.module.a", "_orig_mod.module.b._checkpoint_wrapped_module.c"], ["a", "b.c"]),
        ([], []),
    ],
)
def test_names_are_the_bare_models(names: list[str], bare_names: list[str]) -> None:
    assert list(plan_names(names).values()) == bare_names


def test_shared_parameters_are_recorded_under_each_name() -> None:
    assert {"embedding.weight", "head.weight"} <= trace_of(TinyTransformer(), 1).initial.keys()


def test_sparse_gradients_stay_sparse_and_equal_dense_ones() -> None:
    sparse, dense = trace_of(SparseBag(sparse=True)), trace_of(SparseBag(sparse=False))
    gradient = sparse.steps[0].gradients["bag.weight"]
    assert gradient is not None
    assert gradient.layout is torch.sparse_coo
    assert_same(sparse, dense, kinds=("loss", "parameter"))


def test_train_without_an_optimizer_updates_nothing() -> None:
    model = MLP()
    trace = train(model, make_batches(model, 2), optimizer=None)
    assert torch.equal(trace.parameters["layers.0.weight"], trace.initial["layers.0.weight"])
    assert trace.steps[0].gradients["layers.0.weight"] is not None


def test_a_tracer_wants_its_calls_in_order() -> None:
    with pytest.raises(StateError, match="note_backward first"):
        Tracer(nn.Linear(1, 1)).note_update()


def test_batches_are_dealt_in_equal_parts() -> None:
    batch = next(make_batches(MLP(), 1, rows=6))
    parts = [batch.shard(rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat([part.inputs for part in parts]), batch.inputs)
    assert torch.equal(torch.cat([part.targets for part in parts]), batch.targets)
    assert torch.equal(batch.shard().inputs, batch.inputs)
    with pytest.raises(ConfigError, match="6 rows can't be dealt evenly to 4 ranks"):
        batch.shard(0, 4)
    assert isinstance(parts[0], Batch)


def test_bare_is_a_library_that_does_nothing() -> None:
    model = MLP()
    assert bare.DistributedDataParallel(model, bucket_cap_mb=1) is model


def test_compare_wants_something_to_compare_with() -> None:
    with pytest.raises(ConfigError, match="nothing to compare with"):
        compare(lambda lib: trace_of(MLP()), None, bare, single=None)

"""Modules that are not quite nn.Linear: subclasses, users' own, tied ones; and styles of users."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.nn import functional
from torch.nn.utils import parametrizations

import weft
from tests.ranks import run_on
from tests.tensor_parallel.models import MLP, Language, language_plan, mlp_plan, sequence_plan
from tests.tensor_parallel.twins import (
    Twin,
    assert_close,
    assert_same_gradients,
    filled,
    full_of,
    local_of,
    make_mesh,
    numbers,
    part_of,
    sgd_of,
    tokens,
    unchanged,
)

pytest_plugins = ["tests.tensor_parallel.libraries"]
pytestmark = [
    run_on(threads=2, library=["weft"]),
    run_on(gloo=2, library=["weft"], full=True),
]
TORCH_TOO = run_on(threads=2, library=["torch"], full=True, also=True)
ON_FOUR = run_on(threads=4, library=["weft"], full=True, also=True)
ON_GPU = run_on(gpu=2, library=["weft"], timeout=90, collective_timeout=20, also=True)


class Scaled(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.linear(input, self.weight, self.bias) * 0.5


class Multiplied(nn.Linear):
    """Another, without functional.linear."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input @ self.weight.t()


class Same(nn.Linear):
    """A subclass that changes nothing."""


class ScaledEmbedding(nn.Embedding):
    """As transformers have it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.embedding(input, self.weight) * math.sqrt(self.embedding_dim)


@TORCH_TOO
@ON_GPU
def test_subclasses_of_linear(tp: Any) -> None:
    for make in (Scaled, Same, lambda *sizes: Multiplied(*sizes, bias=False)):
        twin = Twin(tp, filled(make(8, 12)), make_mesh(), tp.ColwiseParallel())
        twin.run(numbers(4, 8), Replicate(), Shard(-1))
        twin = Twin(tp, filled(make(8, 12)), make_mesh(), tp.ColwiseParallel(output_layouts=Replicate()))
        twin.run(numbers(4, 8), Replicate(), Replicate())
        for output in (Replicate(), Shard(0)):
            twin = Twin(tp, filled(make(8, 12)), make_mesh(), tp.RowwiseParallel(output_layouts=output))
            twin.run(numbers(4, 8), Shard(-1), output)


@TORCH_TOO
@ON_GPU
def test_subclasses_of_embedding(tp: Any) -> None:
    words = tokens(2, 6, vocabulary=16)
    twin = Twin(tp, filled(ScaledEmbedding(16, 8)), make_mesh(), tp.ColwiseParallel())
    twin.run(words, Replicate(), Shard(-1))
    style = tp.RowwiseParallel(input_layouts=Replicate())
    twin = Twin(tp, filled(ScaledEmbedding(16, 8)), make_mesh(), style)
    twin.run(words, Replicate(), Replicate())


class Gain(nn.Module):
    """Parameters of its own, used in its own way."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.ones(width))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(rows) * self.gain + self.shift


@TORCH_TOO
@ON_GPU
def test_a_users_module_on_cut_sequences(tp: Any) -> None:
    for is_local in (True, False):
        twin = Twin(tp, filled(Gain()), make_mesh(), tp.SequenceParallel(use_local_output=is_local))
        twin.run(numbers(2, 8, 8), Shard(1), Shard(1), is_local)
        assert twin.parallel.gain.grad.placements == (Partial(),)


@TORCH_TOO
@ON_GPU
def test_a_users_style(tp: Any) -> None:
    """Through torch's distribute_module, called with the module and the mesh."""

    class Copies(tp.ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            return distribute_module(
                module,
                device_mesh,
                input_fn=lambda _, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()]),
                output_fn=lambda _, outputs, mesh: outputs.to_local(),
            )

    twin = Twin(tp, filled(MLP()), make_mesh(), {"net1": Copies(), "net2": Copies()})
    assert twin.parallel.net1.weight.placements == (Replicate(),)
    twin.run(numbers(4, 8), Replicate(), Replicate())
    assert Copies.src_data_rank == 0
    style = Copies()
    tp.parallelize_module(filled(nn.Linear(4, 4)), make_mesh(), style, src_data_rank=1)
    assert style.src_data_rank == 1


@TORCH_TOO
def test_abstract_styles(tp: Any) -> None:
    with pytest.raises(TypeError, match="abstract"):
        tp.ParallelStyle()


@TORCH_TOO
def test_parameters_as_before(tp: Any) -> None:
    """Names, order, types, requires_grad and buffers; forward and backward of a wrapped module as before."""
    model = filled(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)))
    names = [name for name, _ in model.named_parameters()]
    buffers = dict(model.named_buffers())
    tp.parallelize_module(model, make_mesh(), {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()})
    assert [name for name, _ in model.named_parameters()] == names
    assert all(isinstance(param, nn.Parameter) and param.is_leaf for param in model.parameters())
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert isinstance(model[0], nn.Linear)
    assert (model[0].in_features, model[0].out_features) == (8, 8)


@TORCH_TOO
@ON_GPU
def test_changed_afterwards(tp: Any) -> None:
    """Freezing, thawing, other values and another dtype are seen by the next forward."""
    twin = Twin(tp, filled(MLP()), make_mesh(), mlp_plan(tp))
    for each in (twin.parallel, twin.single):
        each.net1.weight.requires_grad_(False)
    twin.run(numbers(4, 8), Replicate(), Replicate())
    twin.zero()
    for each in (twin.parallel, twin.single):
        each.net1.weight.requires_grad_(True)
        with torch.no_grad():
            for param in each.parameters():
                param.mul_(2.0)
    twin.run(numbers(4, 8), Replicate(), Replicate())
    twin.zero()
    for each in (twin.parallel, twin.single):
        each.float()
    twin.run(numbers(4, 8, dtype=torch.float32), Replicate(), Replicate())


@TORCH_TOO
@ON_GPU
def test_hooks_of_modules(tp: Any) -> None:
    """A user's hooks run once a call, in front of and behind the layouts."""
    model = filled(MLP())
    calls: list[str] = []
    model.net1.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.net1.register_forward_hook(lambda *_: calls.append("behind"))
    twin_single = filled(MLP())
    tp.parallelize_module(model, make_mesh(), mlp_plan(tp))
    model.net1.register_forward_hook(lambda module, args, output: output * 2)
    twin_single.net1.register_forward_hook(lambda module, args, output: output * 2)
    seen, right = model(numbers(4, 8)), twin_single(numbers(4, 8))
    assert_close(seen.detach(), right.detach(), "output")
    assert calls == ["before", "behind"]
    seen.sum().backward()
    right.sum().backward()
    assert_same_gradients(model, twin_single)


@TORCH_TOO
@ON_GPU
def test_in_containers(tp: Any) -> None:
    """ModuleDict and ModuleList, and a module that is used twice in one forward."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"a": MLP(), "b": MLP()})

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.parts["a"](self.parts["b"](self.parts["a"](rows)))

    twin = Twin(tp, filled(Twice()), make_mesh(), mlp_plan(tp, "parts.[ab]."))
    twin.run(numbers(4, 8), Replicate(), Replicate())


# Where torch does otherwise, or nothing.


@ON_FOUR
@ON_GPU
def test_nested_modules_on_cut_sequences(tp: Any) -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6), nn.GELU(), Gain(6))
    twin = Twin(tp, filled(model), make_mesh(), tp.SequenceParallel(use_local_output=True))
    twin.run(numbers(2, 8, 8), Shard(1), Shard(1))
    assert all(param.placements == (Replicate(),) for param in twin.parallel.parameters())


class Sum(nn.Module):
    """Takes more than one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, rows: torch.Tensor, more: Any = None, *, scale: float = 1.0) -> torch.Tensor:
        rows = rows * self.gain * scale
        return rows if more is None else rows + more


class Both(nn.Linear):
    """A Linear whose forward takes more than one thing."""

    def forward(self, input: torch.Tensor, shift: float = 0.0, *, scale: float = 1.0) -> torch.Tensor:
        return super().forward(input) * scale + shift


@ON_FOUR
@ON_GPU
def test_more_arguments(tp: Any) -> None:
    """What comes beside the first argument is handed on as it is."""
    mesh = make_mesh()
    full = numbers(2, 8, 8)
    mine = part_of(full, Shard(1), mesh)
    model, single = filled(Sum()), filled(Sum())
    tp.parallelize_module(model, mesh, tp.SequenceParallel(use_local_output=True))
    right = part_of(single(full, 1.5, scale=3.0), Shard(1), mesh)
    assert_close(model(mine, 1.5, scale=3.0).detach(), right.detach(), "output")
    linear, single_linear = filled(Both(8, 12)), filled(Both(8, 12))
    tp.parallelize_module(linear, mesh, tp.ColwiseParallel())
    right = part_of(single_linear(full, 2.0, scale=3.0), Shard(-1), mesh)
    assert_close(linear(full, 2.0, scale=3.0).detach(), right.detach(), "output")


@ON_FOUR
def test_input_by_name(tp: Any) -> None:
    """`linear(input=x)`, as some models call it."""
    mesh = make_mesh()
    model, single = filled(nn.Linear(8, 12)), filled(nn.Linear(8, 12))
    tp.parallelize_module(model, mesh, tp.ColwiseParallel())
    right = part_of(single(numbers(4, 8)), Shard(-1), mesh)
    assert_close(model(input=numbers(4, 8)).detach(), right.detach(), "output")


@ON_FOUR
@ON_GPU
def test_tied_weights(tp: Any) -> None:
    """One DTensor in both places, and one gradient that has both parts."""
    for plan in (language_plan(tp), sequence_plan(tp)):
        twin = Twin(tp, Language(is_tied=True), make_mesh(), plan)
        model = twin.parallel
        assert model.head.weight is model.embedding.weight
        assert isinstance(model.head.weight, DTensor)
        for step in range(2):
            twin.zero()
            twin.run(tokens(2, 8, vocabulary=12, seed=step), Replicate(), Replicate())
            for each in (twin.parallel, twin.single):
                sgd_of(each, lr=0.1).step()
        assert model.head.weight is model.embedding.weight


@ON_FOUR
def test_a_tie_that_needs_two_placements(tp: Any) -> None:
    """Refused before anything changed; the error names both places."""
    model = Language(is_tied=True)
    plan = {**language_plan(tp), "head": tp.RowwiseParallel(input_layouts=Replicate())}
    with unchanged(model), pytest.raises(weft.ConfigError) as caught:
        tp.parallelize_module(model, make_mesh(), plan)
    assert "embedding" in str(caught.value)
    assert "head" in str(caught.value)
    assert model.head.weight is model.embedding.weight


@ON_FOUR
def test_a_tie_of_which_one_end_is_in_the_plan(tp: Any) -> None:
    """Refused, or still one parameter: never two that drift apart."""
    model = Language(is_tied=True)
    refusal = refusal_of(partial(tp.parallelize_module, model, make_mesh(), {"embedding": row(tp)}))
    if refusal is not None:
        assert "head" in str(refusal)
        assert type(model.embedding.weight.data) is torch.Tensor
    assert model.head.weight is model.embedding.weight


@ON_FOUR
@ON_GPU
def test_tied_biases(tp: Any) -> None:
    model = filled(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    model[1].bias = model[0].bias
    plan = {"?": tp.ColwiseParallel(output_layouts=Replicate())}
    twin = Twin(tp, model, make_mesh(), plan)
    assert twin.parallel[0].bias is twin.parallel[1].bias
    twin.run(numbers(4, 8), Replicate(), Replicate())


@ON_FOUR
def test_options_of_embeddings(tp: Any) -> None:
    """Right, or refused with the option's name; never something else."""
    options: list[dict[str, Any]] = [{"max_norm": 0.5}, {"scale_grad_by_freq": True}, {"sparse": True}]
    words = torch.tensor([[1, 1, 5, 15], [0, 5, 7, 1]])
    for option in options:
        for style in (tp.ColwiseParallel(output_layouts=Replicate()), row(tp)):
            model, single = filled(nn.Embedding(16, 8, **option)), filled(nn.Embedding(16, 8, **option))
            refusal = refusal_of(partial(tp.parallelize_module, model, make_mesh(), style))
            if refusal is not None:
                assert next(iter(option)) in str(refusal)
                continue
            seen, right = model(words), single(words)
            assert_close(seen.detach(), right.detach(), "output")
            assert_close(full_of(model.weight), single.weight.detach(), "weight")
            for each in (seen, right):
                each.square().sum().backward()
            grad = model.weight.grad
            wanted = single.weight.grad.to_dense()
            assert_close(grad.full_tensor().to_dense(), wanted, "gradient")


def row(tp: Any) -> Any:
    return tp.RowwiseParallel(input_layouts=Replicate())


def refusal_of(action: Callable[[], object]) -> weft.ConfigError | None:
    """What an action that is either right or refused says, if it is refused."""
    try:
        action()
    except weft.ConfigError as error:
        return error
    return None


@ON_FOUR
def test_parametrized_modules(tp: Any) -> None:
    """A weight that is computed from others: refused, and nothing was changed; or right."""
    models = [parametrizations.weight_norm(filled(nn.Linear(8, 8))) for _ in range(2)]
    before = dict(models[0].named_parameters())
    try:
        tp.parallelize_module(models[0], make_mesh(), tp.ColwiseParallel(output_layouts=Replicate()))
    except weft.ConfigError:
        assert all(param is before[name] for name, param in models[0].named_parameters())
        return
    seen, right = (model(numbers(4, 8)) for model in models)
    assert_close(seen.detach(), right.detach(), "output")
    for output in (seen, right):
        output.square().sum().backward()
    assert_same_gradients(*models)


@ON_FOUR
def test_lazy_modules(tp: Any) -> None:
    """Nothing to place yet: refused."""
    with pytest.raises(weft.ConfigError):
        tp.parallelize_module(nn.LazyLinear(8), make_mesh(), tp.ColwiseParallel())


@ON_FOUR
def test_words_outside_of_the_vocabulary(tp: Any) -> None:
    """An error as in a single process, not zeros, whichever rank would hold the word."""
    for style in (row(tp), tp.ColwiseParallel()):
        model = tp.parallelize_module(filled(nn.Embedding(16, 8)), make_mesh(), style)
        for word in (16, -1, 100):
            with pytest.raises(IndexError):
                model(torch.tensor([[0, word]]))


@ON_FOUR
@ON_GPU
def test_what_is_held(tp: Any) -> None:
    """A rank keeps its part only: nothing refers to the full tensors any more."""
    for source in (0, None):
        model = tp.parallelize_module(filled(MLP(8, 64)), make_mesh(), mlp_plan(tp), src_data_rank=source)
        held = sum(local_of(param).untyped_storage().nbytes() for param in model.parameters())
        whole = sum(param.numel() for param in model.parameters()) * 8
        assert held <= whole / make_mesh().size() + 2 * 64 * 8

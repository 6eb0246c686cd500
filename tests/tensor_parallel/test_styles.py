"""Each style with each layout of input and output: forward and backward are a single process's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tests.ranks import run_on
from tests.tensor_parallel.twins import (
    LAYOUTS,
    Twin,
    assert_close,
    assert_same_gradients,
    filled,
    full_of,
    local_of,
    make_mesh,
    numbers,
    part_of,
    tokens,
)

pytest_plugins = ["tests.tensor_parallel.libraries"]
pytestmark = [
    run_on(threads=2, library=["weft"]),
    run_on(threads=2, library=["torch"], full=True),
    run_on(gloo=2, library=["weft"], full=True),
    run_on(gpu=2, library=["weft"], timeout=90, collective_timeout=20),
]
ON_FOUR = run_on(threads=4, library=["weft", "torch"], full=True, also=True)
ALONE = run_on(threads=1, library=["weft", "torch"], full=True, also=True)
MORE_ON_GPU = run_on(
    gpu_threads=(2, 4), nccl=1, library=["weft"], timeout=60, collective_timeout=20, also=True
)

BATCH, LENGTH, WIDTH, HEIGHT, VOCABULARY = 4, 8, 8, 12, 16


@dataclass(frozen=True)
class Case:
    """How one module is called."""

    given: str
    output: str
    is_local: bool
    has_dtensor_input: bool = False
    has_bias: bool = True  # of an embedding: a padding

    def layouts(self) -> tuple[Placement, Placement]:
        return LAYOUTS[self.given], LAYOUTS[self.output]


def cases(given: str, output: str) -> Iterator[Case]:
    """Every pair of layouts twice, so that each kind of input and output comes with each layout."""
    for row, one in enumerate(given.split()):
        for column, other in enumerate(output.split()):
            is_local = (row + column) % 2 == 0
            yield Case(one, other, is_local, has_dtensor_input=False, has_bias=row % 2 == 0)
            yield Case(one, other, not is_local, has_dtensor_input=row % 2 == 0, has_bias=column % 2 == 0)


def run_linear(tp: Any, style: Any, case: Case) -> None:
    given, output = case.layouts()
    module = filled(nn.Linear(WIDTH, HEIGHT, bias=case.has_bias))
    plan = style(input_layouts=given, output_layouts=output, use_local_output=case.is_local)
    twin = Twin(tp, module, make_mesh(), plan)
    twin.run(numbers(BATCH, LENGTH, WIDTH), given, output, case.is_local, case.has_dtensor_input)


@ALONE
@MORE_ON_GPU
def test_colwise_linear(tp: Any) -> None:
    for case in cases("R S0 S1 S-1 P", "S-1 S0 S1 R"):
        run_linear(tp, tp.ColwiseParallel, case)


@MORE_ON_GPU
def test_rowwise_linear(tp: Any) -> None:
    for case in cases("S-1 S0 S1 R P", "R S0 S1 S-1"):
        run_linear(tp, tp.RowwiseParallel, case)


def test_rowwise_linear_left_partial(tp: Any) -> None:
    """Nothing is communicated in forward: the sum of the ranks' outputs is the output, bias once."""
    for is_local, has_bias in itertools.product((True, False), (True, False)):
        run_linear(tp, tp.RowwiseParallel, Case("S-1", "P", is_local, has_bias=has_bias))


def run_embedding(tp: Any, style: Any, case: Case) -> None:
    given, output = case.layouts()
    plan = style(input_layouts=given, output_layouts=output, use_local_output=case.is_local)
    module = filled(nn.Embedding(VOCABULARY, HEIGHT, padding_idx=3 if case.has_bias else None))
    twin = Twin(tp, module, make_mesh(), plan)
    words = tokens(BATCH, LENGTH, vocabulary=VOCABULARY)
    words[0, :3] = 3
    twin.run(words, given, output, case.is_local, case.has_dtensor_input)


def test_colwise_embedding(tp: Any) -> None:
    for case in cases("R S0 S1 S-1", "S-1 S0 S1 R"):
        run_embedding(tp, tp.ColwiseParallel, case)


@ALONE
@MORE_ON_GPU
def test_rowwise_embedding(tp: Any) -> None:
    for case in cases("R S0 S1 S-1", "R S0 S1 S-1"):
        run_embedding(tp, tp.RowwiseParallel, case)


@run_on(threads=2, library=["weft"])
@run_on(threads=2, library=["torch"], full=True)
@run_on(gloo=2, library=["weft"], full=True)
def test_rowwise_embedding_of_one_row(tp: Any) -> None:
    """Tokens without a batch, and the output cut along the embedding's dim."""
    for output in ("S1", "S0", "R"):
        plan = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=LAYOUTS[output])
        twin = Twin(tp, filled(nn.Embedding(VOCABULARY, HEIGHT)), make_mesh(), plan)
        twin.run(torch.arange(8), Replicate(), LAYOUTS[output])


@ON_FOUR
def test_defaults(tp: Any) -> None:
    """Without arguments: column-wise out of copies, row-wise out of columns."""
    twin = Twin(tp, filled(nn.Linear(WIDTH, HEIGHT)), make_mesh(), tp.ColwiseParallel())
    twin.run(numbers(3, WIDTH), Replicate(), Shard(-1))
    assert twin.parallel.weight.placements == (Shard(0),)
    assert twin.parallel.bias.placements == (Shard(0),)
    twin = Twin(tp, filled(nn.Linear(WIDTH, HEIGHT)), make_mesh(), tp.RowwiseParallel())
    twin.run(numbers(3, WIDTH), Shard(-1), Replicate())
    assert twin.parallel.weight.placements == (Shard(1),)
    assert twin.parallel.bias.placements == (Replicate(),)
    twin = Twin(tp, filled(nn.Embedding(VOCABULARY, HEIGHT)), make_mesh(), tp.ColwiseParallel())
    twin.run(tokens(3, 5, vocabulary=VOCABULARY), Replicate(), Shard(-1))
    assert twin.parallel.weight.placements == (Shard(1),)
    plan = tp.RowwiseParallel(input_layouts=Replicate())
    twin = Twin(tp, filled(nn.Embedding(VOCABULARY, HEIGHT)), make_mesh(), plan)
    twin.run(tokens(3, 5, vocabulary=VOCABULARY), Replicate(), Replicate())
    assert twin.parallel.weight.placements == (Shard(0),)


def test_vectors_and_more_dims(tp: Any) -> None:
    """A Linear takes any number of dims in front, none included."""
    for shape in ((WIDTH,), (4, WIDTH), (4, 2, 3, WIDTH)):
        twin = Twin(tp, filled(nn.Linear(WIDTH, HEIGHT)), make_mesh(), tp.ColwiseParallel())
        twin.run(numbers(*shape), Replicate(), Shard(-1))
        twin = Twin(tp, filled(nn.Linear(WIDTH, HEIGHT)), make_mesh(), tp.RowwiseParallel())
        twin.run(numbers(*shape), Shard(-1), Replicate())


def test_a_batch_of_nothing(tp: Any) -> None:
    for style, given, output in (
        (tp.ColwiseParallel(), Replicate(), Shard(-1)),
        (tp.RowwiseParallel(), Shard(-1), Replicate()),
    ):
        twin = Twin(tp, filled(nn.Linear(WIDTH, HEIGHT)), make_mesh(), style)
        twin.run(numbers(0, WIDTH), given, output)
        assert not local_of(twin.parallel.weight.grad).any()


def test_dtensor_inputs_that_lie_otherwise(tp: Any) -> None:
    """A DTensor is taken as it lies, whatever the style was told of plain tensors."""
    mesh = make_mesh()
    for style, output in ((tp.ColwiseParallel(), Shard(-1)), (tp.RowwiseParallel(), Replicate())):
        for given in LAYOUTS.values():
            twin = Twin(tp, filled(nn.Linear(WIDTH, HEIGHT)), mesh, style)
            twin.run(numbers(BATCH, LENGTH, WIDTH), given, output, has_dtensor_input=True)


class RootMeanSquare(nn.Module):
    """As LLaMA has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


NORMS: dict[str, Any] = {
    "layer": lambda: nn.LayerNorm(WIDTH),
    "layer without bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "layer without affine": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "root mean square": lambda: nn.RMSNorm(WIDTH),
    "python": lambda: RootMeanSquare(WIDTH),
}


@ON_FOUR
@ALONE
@MORE_ON_GPU
def test_sequence_parallel(tp: Any) -> None:
    """Every norm, along either dim, with local tensors and DTensors that lie so or otherwise."""
    for make, dim, is_local in itertools.product(NORMS.values(), (1, 0), (True, False)):
        style = tp.SequenceParallel(sequence_dim=dim, use_local_output=is_local)
        twin = Twin(tp, filled(make()), make_mesh(), style)
        full = numbers(BATCH, LENGTH, WIDTH)
        twin.run(full, Shard(dim), Shard(dim), is_local)
        for param in twin.parallel.parameters():
            assert param.placements == (Replicate(),)
            assert param.grad.placements == (Partial(),)
        for given in (Shard(0), Shard(1), Replicate()):
            twin.run(full, given, Shard(dim), is_local, has_dtensor_input=True)


def split_across_rows(tp: Any, make: Any) -> None:
    """A norm whose input is split along the dim that it normalizes: gathered, and whole on every rank."""
    for is_local in (True, False):
        style = tp.SequenceParallel(sequence_dim=1, use_local_output=is_local)
        twin = Twin(tp, filled(make()), make_mesh(), style)
        twin.run(numbers(BATCH, WIDTH), Shard(1), Replicate(), is_local)
        for param in twin.parallel.parameters():
            assert param.grad.placements == (Replicate(),)
        twin.zero()
        twin.run(numbers(BATCH, LENGTH, WIDTH), Shard(1), Shard(1), is_local)  # whole rows again


def test_layer_norms_split_across_rows(tp: Any) -> None:
    for name in ("layer", "layer without bias", "layer without affine"):
        split_across_rows(tp, NORMS[name])


@run_on(threads=2)
def test_root_mean_square_split_across_rows(tp: Any) -> None:
    """torch's DTensor refuses this one."""
    split_across_rows(tp, NORMS["root mean square"])


def test_sequence_parallel_gradients_are_sums_for_optimizers(tp: Any) -> None:
    """A Partial gradient makes the same step as its sum, in several optimizers."""
    for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        twin = Twin(tp, filled(nn.LayerNorm(WIDTH)), make_mesh(), tp.SequenceParallel())
        optimizers = [make(each.parameters(), lr=0.1) for each in (twin.parallel, twin.single)]
        for step in range(3):
            twin.zero()
            twin.run(numbers(BATCH, LENGTH, WIDTH, seed=step), Shard(1), Shard(1), is_local=False)
            for optimizer in optimizers:
                optimizer.step()
        for name, right in twin.single.named_parameters():
            assert_close(full_of(twin.parallel.get_parameter(name)), right.detach(), name)


@ON_FOUR
@run_on(gpu_threads=(2, 4), library=["weft"], timeout=60, collective_timeout=20, also=True)
def test_accumulated_gradients(tp: Any) -> None:
    """Two backwards without zeroing, in each style; placements of gradients stay."""
    mesh = make_mesh()
    plans = {
        "0": tp.ColwiseParallel(),
        "1": tp.RowwiseParallel(output_layouts=Shard(0)),
        "2": tp.SequenceParallel(sequence_dim=0, use_local_output=True),
    }
    model = nn.Sequential(nn.Linear(WIDTH, HEIGHT), nn.Linear(HEIGHT, WIDTH), nn.LayerNorm(WIDTH))
    twin = Twin(tp, filled(model), mesh, plans)
    for step in range(3):
        twin.run(numbers(8, WIDTH, seed=step), Replicate(), Shard(0))
    assert twin.parallel[2].weight.grad.placements == (Partial(),)
    assert twin.parallel[0].weight.grad.placements == (Shard(0),)
    assert twin.parallel[1].weight.grad.placements == (Shard(1),)


def test_frozen_parameters(tp: Any) -> None:
    """requires_grad stays as it was, of each parameter; frozen ones get no gradient."""
    mesh = make_mesh()
    for style, given, output in (
        (tp.ColwiseParallel(), Replicate(), Shard(-1)),
        (tp.RowwiseParallel(), Shard(-1), Replicate()),
    ):
        for frozen in (["weight"], ["bias"], ["weight", "bias"]):
            module = filled(nn.Linear(WIDTH, HEIGHT))
            for name in frozen:
                module.get_parameter(name).requires_grad_(False)
            twin = Twin(tp, module, mesh, style)
            twin.run(numbers(3, WIDTH), given, output)
            for name in frozen:
                assert twin.parallel.get_parameter(name).grad is None


def test_inputs_without_gradient(tp: Any) -> None:
    """Tokens and data need none; parameters get theirs."""
    mesh = make_mesh()
    for style, given, output in (
        (tp.ColwiseParallel(), Replicate(), Shard(-1)),
        (tp.RowwiseParallel(output_layouts=Shard(0)), Shard(-1), Shard(0)),
    ):
        twin = Twin(tp, filled(nn.Linear(WIDTH, HEIGHT)), mesh, style)
        full = numbers(4, WIDTH)
        right = twin.single(full)
        cotangent = numbers(*right.shape, seed=7)
        right.backward(cotangent)
        seen = twin.parallel(part_of(full, given, mesh))
        seen.backward(part_of(cotangent, output, mesh))
        assert_same_gradients(twin.parallel, twin.single)


def test_outputs_that_lie_as_asked(tp: Any) -> None:
    """DTensor outputs know their whole shape, and go on as DTensors."""
    mesh = make_mesh()
    twin = Twin(tp, filled(nn.Linear(WIDTH, HEIGHT)), mesh, tp.ColwiseParallel(use_local_output=False))
    seen = twin.parallel(numbers(4, WIDTH))
    assert isinstance(seen, DTensor)
    assert seen.requires_grad
    assert seen.device_mesh == mesh
    loss = seen.square().sum()
    right = twin.single(numbers(4, WIDTH)).square().sum()
    assert_close(full_of(loss), right.detach(), "loss")
    loss.backward()
    right.backward()
    twin.check()


@run_on(threads=2, library=["weft"])
@run_on(threads=2, library=["torch"], full=True)
@run_on(gloo=2, library=["weft"], full=True)
def test_other_modules_are_refused(tp: Any) -> None:
    for style in (tp.ColwiseParallel(), tp.RowwiseParallel()):
        name = type(style).__name__
        text = f"{name} currently only support nn.Linear and nn.Embedding!"
        for module in (nn.LayerNorm(4), nn.Bilinear(2, 2, 2), nn.Sequential(nn.Linear(2, 2))):
            before = list(module.parameters())
            with pytest.raises(NotImplementedError, match=text):
                tp.parallelize_module(module, make_mesh(), style)
            assert all(a is b for a, b in zip(before, module.parameters(), strict=True))


@run_on()
@pytest.mark.parametrize("library", ["weft", "torch"])
def test_reprs(tp: Any) -> None:
    """As torch writes them."""
    assert repr(tp.ColwiseParallel()) == (
        "ColwiseParallel(input_layouts=(Replicate(),), "
        "output_layouts=(Shard(dim=-1),), use_local_output=True)"
    )
    assert repr(tp.RowwiseParallel(output_layouts=Shard(0))) == (
        "RowwiseParallel(input_layouts=(Shard(dim=-1),), "
        "output_layouts=(Shard(dim=0),), use_local_output=True)"
    )
    assert repr(tp.SequenceParallel()) == "SequenceParallel(sequence_dim=1, use_local_output=False)"

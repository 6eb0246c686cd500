"""Tensor parallel compiled, where ranks have pieces of different sizes: gradients are the eager model's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import weft.tensor_parallel as tp
from tests.compiler.pairs import filled, make_rows
from tests.ranks import run_on
from tests.tensor_parallel.models import MLP, Language, mlp_plan, sequence_plan

pytestmark = [
    run_on(gloo=2, timeout=150, collective_timeout=60, full=True),
    pytest.mark.filterwarnings("default"),  # of Dynamo come some, other ones with each release
]

WIDTH, HIDDEN = 7, 9


class Words(nn.Module):
    """Embedded by number; and a layer whose output nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, WIDTH)
        self.mlp = MLP(WIDTH, HIDDEN)
        self.unused = nn.Linear(WIDTH, HIDDEN)

    def forward(self, numbers: Tensor) -> Tensor:
        rows = self.embedding(numbers)
        self.unused(rows)
        return self.mlp(rows)


def _words_plan() -> dict[str, tp.ParallelStyle]:
    whole = tp.ColwiseParallel(output_layouts=Replicate())
    return {"embedding": whole, "unused": tp.ColwiseParallel(), **mlp_plan(tp, "mlp.")}


@run_on(gloo=2, backend=["aot_eager"], timeout=150, collective_timeout=60)
@run_on(gloo=2, backend=["eager"], timeout=150, collective_timeout=60, full=True)
def test_pieces_of_different_sizes(backend: str) -> None:
    """Gradients that are added up over two steps, of rows and of numbers."""
    rows = make_rows(0, 0, width=WIDTH)
    _compare(filled(MLP(WIDTH, HIDDEN)), mlp_plan(tp), rows, backend)
    _compare(filled(Words()), _words_plan(), torch.tensor([0, 3, 3, 4]), backend)


def test_cut_sequences() -> None:
    """Plain tensors cut along the sequence don't say how long it is: ranks tell each other between graphs."""
    words = torch.randint(12, (2, 5), generator=torch.Generator().manual_seed(1))
    _compare(Language(), sequence_plan(tp), words, "aot_eager", has_breaks=True)


def test_cut_rows() -> None:
    """Layers that are compiled one by one, as the graph breaks in each: what differs becomes symbolic."""
    rows = make_rows(0, 0, num_rows=5, width=WIDTH).chunk(2)[dist.get_rank()]
    first, second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
    bare = filled(nn.Sequential(first, nn.Tanh(), second, nn.LayerNorm(WIDTH), copy.deepcopy(first)))
    for is_local in (True, False):
        given = tp.ColwiseParallel(input_layouts=Shard(0))
        plan = {
            "0": given,
            "2": tp.RowwiseParallel(output_layouts=Shard(0), use_local_output=is_local),
            "3": tp.SequenceParallel(sequence_dim=0, use_local_output=is_local),
            "4": given,
        }
        _compare(bare, plan, rows, "aot_eager", has_breaks=True)


def _compare(
    bare: nn.Module, plan: dict[str, Any], x: Tensor, backend: str, *, has_breaks: bool = False
) -> None:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2,))
    plain, split = (tp.parallelize_module(copy.deepcopy(bare), mesh, plan) for _ in range(2))
    for run in (plain, torch.compile(split, backend=backend, fullgraph=not has_breaks)):
        for _ in range(2):
            run(x).square().mean().backward()
    for (name, one), other in zip(plain.named_parameters(), split.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None) == name.startswith("unused"), name
        if one.grad is None:
            continue
        assert isinstance(one.grad, DTensor)
        assert isinstance(other.grad, DTensor), name
        assert other.grad.placements == one.grad.placements, f"{name}: {other.grad.placements}"
        assert (other.grad.shape, other.grad.stride()) == (one.grad.shape, one.grad.stride()), name
        torch.testing.assert_close(other.grad.to_local(), one.grad.to_local(), msg=name)

"""Tensor parallel compiled, where ranks have pieces of different sizes: gradients are the eager model's."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import weft.tensor_parallel as tp
from tests.compile_bodies.pairs import filled, make_rows
from tests.tp_bodies.models import MLP, mlp_plan

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


def steps(backend: str) -> None:
    """Gradients that are added up over two steps, of rows and of numbers."""
    rows = make_rows(0, 0, width=WIDTH)
    _compare(filled(MLP(WIDTH, HIDDEN)), mlp_plan(tp), rows, backend)
    _compare(filled(Words()), _words_plan(), torch.tensor([0, 3, 3, 4]), backend)


def _compare(bare: nn.Module, plan: dict[str, Any], x: Tensor, backend: str) -> None:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2,))
    plain, split = (tp.parallelize_module(copy.deepcopy(bare), mesh, plan) for _ in range(2))
    for run in (plain, torch.compile(split, backend=backend, fullgraph=True)):
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

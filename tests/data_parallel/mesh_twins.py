"""Models that are split along one axis of a mesh and wrapped along another, each beside a bare copy.

The copy sees the rows of all data-parallel ranks. Ranks of one tensor-parallel group see the same rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.data_parallel.twins import ROUNDINGS, WIDTH, assert_same_gradient, filled
from weft import DistributedDataParallel, replicate
from weft.tensor_parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

LENGTH, HIDDEN, WORDS = 5, 7, 11  # which no number of ranks here divides
Plan = dict[str, ParallelStyle]


def mesh_of(dp: int = 2, tp: int = 2, order: str = "dp tp") -> DeviceMesh:
    sizes = {"dp": dp, "tp": tp}
    names = tuple(order.split())
    return init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=names)


# Models, and how each is split. Some parameters stay plain.


class MLP(nn.Module):
    """Two layers that are split, one that isn't."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.down(torch.tanh(self.up(rows)))))

    def plan(self) -> Plan:
        return {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Normed(MLP):
    """With a norm on parts of the sequence: its gradients come as addends (Partial)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.down(torch.tanh(self.up(rows))))
        return self.head(torch.tanh(self.out(hidden)))

    def plan(self) -> Plan:
        return {
            "up": ColwiseParallel(),
            "down": RowwiseParallel(output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }


class Words(Normed):
    """With an embedding in front."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(self.words((rows[..., 0] * 100).long() % WORDS))

    def plan(self) -> Plan:
        return {**super().plan(), "words": RowwiseParallel(input_layouts=Replicate())}


class Branching(Normed):
    """Uses its branches when the rows say so: parameters without gradients, split ones and others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 3)
        self.extra = nn.LayerNorm(WIDTH)

    def forward(self, rows: torch.Tensor, *, branches: bool = True) -> torch.Tensor:
        output = super().forward(rows)
        if not branches:
            return output
        normed = self.extra(self.down(torch.tanh(self.up(rows))))
        normed = normed if not isinstance(normed, DTensor) else normed.redistribute(placements=[Replicate()])
        local = normed.to_local() if isinstance(normed, DTensor) else normed
        return output + self.b(torch.tanh(self.a(local)))

    def plan(self) -> Plan:
        return {**super().plan(), "a": ColwiseParallel(), "b": RowwiseParallel(), "extra": SequenceParallel()}


class Block(nn.Module):
    """A norm between layers that are so narrow that ranks have very different parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH), nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.out(self.norm(self.down(torch.tanh(self.up(rows)))))


class Deep(nn.Module):
    """Sums of addends between the collectives of other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.blocks(rows)

    def plan(self) -> Plan:
        return {f"blocks.*.{name}": style for name, style in Normed().plan().items()}


MODELS: list[type[MLP]] = [MLP, Normed, Words]


def make_rows(step: int, dp: int = 2) -> torch.Tensor:
    """Sequences of all data-parallel ranks, the same everywhere."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(3 * dp, LENGTH, WIDTH, generator=generator, dtype=torch.float64)


def full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


Wrap = Callable[..., Any]


def wrapper(kind: str | Wrap) -> Wrap:
    if not isinstance(kind, str):
        return kind
    return DistributedDataParallel if kind == "ddp" else replicate


class MeshTwin:
    """`parallel` is on the mesh and gets its data-parallel rank's rows; `single` is bare and gets all."""

    def __init__(
        self,
        model: Any,
        kind: str | Wrap = "ddp",
        mesh: DeviceMesh | None = None,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> None:
        self.mesh = mesh_of() if mesh is None else mesh
        self.model = filled(model, dtype=dtype)
        self.single = copy.deepcopy(self.model)
        parallelize_module(self.model, self.mesh["tp"], self.model.plan())
        self.params = dict(self.model.named_parameters())
        self.parallel: Any = wrapper(kind)(self.model, device_mesh=self.mesh["dp"], **options)
        self.dp_size = self.mesh["dp"].size()
        self.dp_rank = self.mesh["dp"].get_local_rank()

    def run(self, model: Any, rows: torch.Tensor, dp_rank: int, **kwargs: Any) -> torch.Tensor:
        own = rows.chunk(self.dp_size)[dp_rank]
        return model(own, **kwargs).square().mean()

    def backward(
        self, rows: torch.Tensor, by_rank: Callable[[int], dict[str, Any]] = lambda dp_rank: {}
    ) -> None:
        losses = [self.run(self.single, rows, rank, **by_rank(rank)) for rank in range(self.dp_size)]
        torch.stack(losses).mean().backward()
        self.run(self.parallel, rows, self.dp_rank, **by_rank(self.dp_rank)).backward()

    def check(self, tolerance: float = ROUNDINGS) -> None:
        """Every gradient is the single process's, and lies as its parameter, which is the one it was."""
        assert dict(self.model.named_parameters()).keys() == self.params.keys()
        for name, param in self.model.named_parameters():
            assert param is self.params[name]
            if isinstance(param, DTensor) and param.grad is not None:
                assert_lies_as(param.grad, param)
            right = self.single.get_parameter(name).grad
            assert_same_gradient(full(param.grad), right, name, tolerance)

    def zero(self, *, to_none: bool = True) -> None:
        for model in (self.model, self.single):
            model.zero_grad(set_to_none=to_none)

    def step(self, step: int, by_rank: Callable[[int], dict[str, Any]] = lambda dp_rank: {}) -> None:
        """Backward, check, plain SGD."""
        self.backward(make_rows(step, self.dp_size), by_rank)
        self.check()
        for model in (self.model, self.single):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        self.zero()

    def check_parameters(self, tolerance: float = ROUNDINGS) -> None:
        for name, param in self.model.named_parameters():
            assert_same_gradient(
                full(param.detach()), self.single.get_parameter(name).detach(), name, tolerance
            )


def assert_lies_as(grad: torch.Tensor, param: DTensor) -> None:
    assert isinstance(grad, DTensor)
    assert grad.placements == param.placements
    assert grad.device_mesh == param.device_mesh
    assert (grad.shape, grad.stride(), grad.dtype) == (param.shape, param.stride(), param.dtype)
    assert grad.to_local().shape == param.to_local().shape


def local_grads(model: Any) -> list[torch.Tensor]:
    """In memory: what the gradients are made of."""
    with torch.no_grad():
        return [
            param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            for param in model.parameters()
        ]


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def cut(model: nn.Module, mesh: DeviceMesh) -> None:
    """Rows of every matrix over the ranks; the rest on each of them."""
    for owner in model.modules():
        for name, param in list(owner.named_parameters(recurse=False)):
            placement = Shard(0) if param.ndim == 2 else Replicate()
            placed = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=None)
            owner.register_parameter(name, nn.Parameter(placed))

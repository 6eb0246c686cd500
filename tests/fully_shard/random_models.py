"""Models, ways to shard them and training runs that hypothesis draws.

A run says which layers each rank uses in each step and in which order, so that it holds
repeated layers, ranks that part, and parameters that some ranks or all leave unused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from weft.testing.models import fill_parameters

KINDS = ["linear", "bare linear", "scale", "deep", "narrow", "empty", "single"]
ON_TORCH_TOO = {"linear", "bare linear", "scale", "deep", "narrow"}


class Layer(nn.Module):
    """One of several small layers, all of them from `width` to `width`."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        wide = torch.float64
        match kind:
            case "linear" | "bare linear":
                self.linear = nn.Linear(width, width, bias=kind == "linear").double()
            case "scale":
                self.scale = nn.Parameter(torch.ones(width, dtype=wide))
            case "deep":
                self.cube = nn.Parameter(torch.ones(3, width, 2, dtype=wide))
                self.inner = Layer("linear", width)
            case "narrow":
                self.down = nn.Parameter(torch.ones(width, 1, dtype=wide))
                self.up = nn.Parameter(torch.ones(1, width, dtype=wide))
            case "empty":
                self.down = nn.Parameter(torch.ones(width, 0, dtype=wide))
                self.up = nn.Parameter(torch.ones(0, width, dtype=wide))
                self.scale = nn.Parameter(torch.ones(1, dtype=wide))
            case "single":
                self.scale = nn.Parameter(torch.ones(width, dtype=torch.float32))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        match self.kind:
            case "linear" | "bare linear":
                return self.linear(hidden)
            case "deep":
                return self.inner(hidden * self.cube.sum((0, 2)))
            case "narrow":
                return hidden + hidden @ self.down @ self.up
            case "empty":
                return hidden * self.scale + hidden @ self.down @ self.up
            case "single":
                return hidden * self.scale.double()
            case _:
                return hidden * self.scale


class Drawn(nn.Module):
    """Layers of which `forward(rows, program)` runs those in the program, in its order."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.is_checkpointed = run.is_checkpointed
        self.layers = nn.ModuleList(Layer(kind, run.width) for kind in run.kinds)
        for place, other in enumerate(run.shared):
            if other < place:  # a layer under a second name
                self.layers[place] = self.layers[other]
        self.bias = nn.Parameter(torch.zeros(run.width, dtype=torch.float64))
        fill_parameters(self, seed=0)
        for place in run.frozen:
            self.layers[place].requires_grad_(False)

    def forward(self, rows: torch.Tensor, program: tuple[int, ...]) -> torch.Tensor:
        hidden = rows * 2
        for place in program:
            layer = self.layers[place]
            if self.is_checkpointed:
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            else:
                hidden = layer(hidden)
            hidden = torch.tanh(hidden)
        return hidden + self.bias


@dataclass(frozen=True)
class Step:
    """One backward: what each rank runs, whether it is reduced, what becomes of gradients before it."""

    programs: tuple[tuple[int, ...], ...]  # by rank
    is_synced: bool
    zero: str  # "none", "zeros" or "keep"
    forwards: int


@dataclass(frozen=True)
class Run:
    """A model, how it is sharded, and the steps."""

    ranks: int
    width: int
    kinds: tuple[str, ...]
    shared: tuple[int, ...]  # a layer with a smaller number here is that layer
    frozen: frozenset[int]
    is_checkpointed: bool
    groups: tuple[int, ...]  # layers of one number are one group; those of 0 are left to the root
    reshards: tuple[bool | int | None, ...]  # of the root, then of each group
    is_last_dim: bool
    is_hybrid: bool  # two copies of the shards
    has_hook: bool
    steps: tuple[Step, ...]

    @property
    def fits_torch(self) -> bool:
        """Whether torch's fully_shard can do it: ranks in step, one dtype, even shards off dim 0."""
        alike = all(len(set(step.programs)) == 1 for step in self.steps)
        return alike and set(self.kinds) <= ON_TORCH_TOO and not self.is_last_dim

    def shard(self, model: Drawn, fully_shard: Callable[..., Any]) -> None:
        """Apply fully_shard bottom-up."""
        options: dict[str, Any] = {}
        if self.is_hybrid:
            sizes = (2, self.ranks // 2)
            options["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        if self.is_last_dim:
            options["shard_placement_fn"] = lambda param: Shard(param.ndim - 1)
        for number, reshard in enumerate(self.reshards[1:], start=1):
            members = dict.fromkeys(
                layer
                for layer, group in zip(model.layers, self.group_of_layers(), strict=True)
                if group == number
            )
            if members:
                target = list(members) if len(members) > 1 else next(iter(members))
                fully_shard(target, reshard_after_forward=reshard, **options)
        fully_shard(model, reshard_after_forward=self.reshards[0], **options)

    def group_of_layers(self) -> list[int]:
        """A layer under a second name is in the group of the first."""
        groups: list[int] = []
        for place, other in enumerate(self.shared):
            groups.append(groups[other] if other < place else self.groups[place])
        return groups


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Any run that fully_shard must get right."""
    ranks = draw(st.sampled_from([2, 2, 3, 4]))
    is_hybrid = ranks % 2 == 0 and draw(st.sampled_from([False, False, True]))
    kinds = tuple(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5)))
    num_layers = len(kinds)
    reshard = st.sampled_from([True, False, None, 2] if ranks == 4 and not is_hybrid else [True, False, None])
    program = st.lists(st.integers(0, num_layers - 1), max_size=4).map(tuple)
    is_alike = draw(st.booleans())
    steps = []
    for _ in range(draw(st.integers(2, 4))):
        programs = (draw(program),) * ranks if is_alike else tuple(draw(program) for _ in range(ranks))
        steps.append(
            Step(
                programs,
                is_synced=draw(st.sampled_from([True, True, False])),
                zero=draw(st.sampled_from(["none", "zeros", "keep"])),
                forwards=draw(st.sampled_from([1, 1, 2])),
            )
        )
    return Run(
        ranks=ranks,
        width=draw(st.integers(1, 5)),
        kinds=kinds,
        shared=tuple(draw(st.integers(0, num_layers)) for _ in kinds),
        frozen=draw(st.frozensets(st.integers(0, num_layers - 1), max_size=max(0, num_layers - 2))),
        is_checkpointed=draw(st.booleans()),
        groups=tuple(draw(st.integers(0, num_layers)) for _ in kinds),
        reshards=tuple(draw(reshard) for _ in range(num_layers + 1)),
        is_last_dim=draw(st.sampled_from([False, False, True])),
        is_hybrid=is_hybrid,
        has_hook=draw(st.sampled_from([False, False, True])),
        steps=tuple(steps),
    )

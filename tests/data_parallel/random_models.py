"""Models and training runs that hypothesis draws.

A run says which layers each rank uses in each step and in which order, so that it
holds control flow, repeated layers, and parameters that some ranks or all leave unused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.data_parallel.libraries import ON_TORCH
from weft.testing.models import fill_parameters

KINDS = ["linear", "bare linear", "scale", "number", "narrow", "empty", "complex", "single"]


class Layer(nn.Module):
    """One of several small layers, all of them from `width` to `width`."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        match kind:
            case "linear" | "bare linear":
                self.linear = nn.Linear(width, width, bias=kind == "linear").double()
            case "scale":
                self.scale = nn.Parameter(torch.ones(width, dtype=torch.float64))
            case "number":
                self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
            case "narrow":
                self.down = nn.Parameter(torch.ones(width, 1, dtype=torch.float64))
                self.up = nn.Parameter(torch.ones(width, 1, dtype=torch.float64).t())
            case "empty":
                self.down = nn.Parameter(torch.ones(width, 0, dtype=torch.float64))
                self.up = nn.Parameter(torch.ones(0, width, dtype=torch.float64))
            case "complex":
                self.scale = nn.Parameter(torch.ones(width, dtype=torch.complex128))
            case "single":
                self.scale = nn.Parameter(torch.ones(width, dtype=torch.float32))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        match self.kind:
            case "linear" | "bare linear":
                return self.linear(hidden)
            case "narrow" | "empty":
                return hidden + hidden @ self.down @ self.up
            case "complex":
                return (hidden * self.scale * (1 + 2j)).real
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
        return hidden


@dataclass(frozen=True)
class Step:
    """One backward: what each rank runs, whether it is synced, what becomes of gradients before it."""

    programs: tuple[tuple[int, ...], ...]  # by rank
    is_synced: bool
    zero: str  # "none", "zeros" or "keep"


@dataclass(frozen=True)
class Run:
    """A model, how it is wrapped, and the steps."""

    ranks: int
    width: int
    kinds: tuple[str, ...]
    shared: tuple[int, ...]  # a layer with a smaller number here is that layer
    frozen: frozenset[int]
    is_checkpointed: bool
    has_hook: bool
    options: dict[str, Any]
    steps: tuple[Step, ...]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Any run that DDP must get right."""
    ranks = draw(st.integers(2, 3))
    kinds = tuple(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5)))
    num_layers = len(kinds)
    shared = tuple(draw(st.integers(0, num_layers)) for _ in kinds)
    frozen = draw(st.frozensets(st.integers(0, num_layers - 1), max_size=max(0, num_layers - 2)))
    frozen = frozenset(f for f in frozen if f != num_layers - 1)
    is_static = draw(st.booleans())
    program = st.lists(st.integers(0, num_layers - 1), min_size=int(ON_TORCH), max_size=4).map(tuple)
    num_steps = draw(st.integers(2, 4))
    if is_static:
        fixed = (draw(program),) * ranks
        programs = [fixed] * num_steps
    else:
        programs = [tuple(draw(program) for _ in range(ranks)) for _ in range(num_steps)]
    steps = tuple(
        Step(
            ranks_programs,
            is_synced=(is_static and ON_TORCH) or draw(st.booleans()),
            zero=draw(st.sampled_from(["none", "zeros", "keep"])),
        )
        for ranks_programs in programs
    )
    options = {
        "bucket_cap_mb": draw(st.sampled_from([1e-6, 1e-4, 4e-4, 25])),
        "gradient_as_bucket_view": draw(st.booleans()),
        "static_graph": is_static,
        "find_unused_parameters": not is_static and (ON_TORCH or draw(st.booleans())),
    }
    return Run(
        ranks=ranks,
        width=draw(st.integers(1, 4)),
        kinds=kinds,
        shared=shared,
        frozen=frozen,
        is_checkpointed=draw(st.booleans()),
        has_hook=draw(st.booleans()),
        options=options,
        steps=steps,
    )

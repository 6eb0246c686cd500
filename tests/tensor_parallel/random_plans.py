"""Chains of layers and plans for them that hypothesis draws.

A chain goes through activations of three dims: rows, places of a sequence, features. Each layer says how
its input lies where that is a plain tensor, and how its output shall lie; what one gives the next can take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.tensor_parallel.twins import LAYOUTS, filled

KINDS = ["colwise", "colwise", "rowwise", "rowwise", "norm", "input", "output", "bare", "tanh"]


@dataclass(frozen=True)
class Layer:
    """One layer, its style and its layouts by name."""

    kind: str
    width: int
    height: int
    given: str  # how the input lies, or what the style is told of plain inputs
    output: str
    is_local: bool
    has_bias: bool
    is_frozen: bool

    def module(self, is_first: bool, vocabulary: int | None) -> nn.Module:
        match self.kind:
            case "colwise" | "rowwise" | "bare" if is_first and vocabulary is not None:
                padding = 0 if self.has_bias else None
                return nn.Embedding(vocabulary, self.height, padding_idx=padding)
            case "colwise" | "rowwise" | "bare":
                return nn.Linear(self.width, self.height, bias=self.has_bias)
            case "norm":
                return nn.LayerNorm(self.width) if self.has_bias else nn.RMSNorm(self.width)
            case "tanh":
                return nn.Tanh()
            case _:
                return nn.Identity()

    def style(self, tp: Any) -> Any:
        given, output = LAYOUTS[self.given], LAYOUTS[self.output]
        match self.kind:
            case "colwise" | "rowwise":
                make = tp.ColwiseParallel if self.kind == "colwise" else tp.RowwiseParallel
                return make(input_layouts=given, output_layouts=output, use_local_output=self.is_local)
            case "norm":
                dim = LAYOUTS[self.output].dim  # type: ignore[attr-defined]
                return tp.SequenceParallel(sequence_dim=dim, use_local_output=self.is_local)
            case "input":
                return tp.PrepareModuleInput(
                    input_layouts=given, desired_input_layouts=output, use_local_output=self.is_local
                )
            case "output":
                return tp.PrepareModuleOutput(
                    output_layouts=given, desired_output_layouts=output, use_local_output=self.is_local
                )
            case _:
                return None


@dataclass(frozen=True)
class Chain:
    """A model, its plan and what it is run on."""

    ranks: int
    rows: int
    length: int
    vocabulary: int | None  # None: the input has features
    dtype: torch.dtype
    start: str
    has_dtensor_input: bool
    layers: tuple[Layer, ...]
    is_checkpointed: bool
    steps: int

    @property
    def fits_torch(self) -> bool:
        """Whether torch can do it: everything divides by the ranks; no norm is frozen, which it thaws."""
        sizes = [self.rows, self.length, *(layer.height for layer in self.layers)]
        sizes += [self.layers[0].width] if self.vocabulary is None else [self.vocabulary]
        thaws = any(layer.kind == "norm" and layer.is_frozen for layer in self.layers)
        return not thaws and all(size % self.ranks == 0 for size in sizes)

    def model(self) -> nn.Module:
        modules = [layer.module(place == 0, self.vocabulary) for place, layer in enumerate(self.layers)]
        model = filled(Drawn(*modules, is_checkpointed=self.is_checkpointed), dtype=self.dtype)
        for layer, module in zip(self.layers, modules, strict=True):
            module.requires_grad_(not layer.is_frozen)
        return model

    def plan(self, tp: Any) -> dict[str, Any]:
        styles = {str(place): layer.style(tp) for place, layer in enumerate(self.layers)}
        return {name: style for name, style in styles.items() if style is not None}

    def inputs(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        if self.vocabulary is not None:
            return torch.randint(self.vocabulary, (self.rows, self.length), generator=generator)
        shape = (self.rows, self.length, self.layers[0].width)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)


class Drawn(nn.Sequential):
    """Layers in a row, each of them checkpointed or not."""

    def __init__(self, *modules: nn.Module, is_checkpointed: bool = False) -> None:
        super().__init__(*modules)
        self.is_checkpointed = is_checkpointed

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for module in self:
            if self.is_checkpointed and not isinstance(input, DTensor):
                input = checkpoint(module, input, use_reentrant=False)
            else:
                input = module(input)
        return input


@dataclass
class State:
    """How the activations lie while a chain is drawn."""

    lies: str
    is_local: bool
    width: int
    dtype: torch.dtype

    def fitting_kinds(self, is_first_of_tokens: bool) -> list[str]:
        if is_first_of_tokens:
            return ["colwise", "rowwise", "bare"] if self.is_bare else ["colwise", "rowwise"]
        kinds = ["colwise", "rowwise", "input", "output"]
        # The norm of very few features takes the difference of numbers that are the same but for rounding.
        is_norm_well_posed = self.dtype == torch.float64 or self.width >= 4
        if is_norm_well_posed and (self.lies in ("S0", "S1") or not self.is_local):
            kinds.append("norm")
        if self.is_bare:
            kinds.append("bare")
        if self.is_local and self.lies != "P":
            kinds.append("tanh")
        return kinds

    @property
    def is_bare(self) -> bool:
        """Whether a module without a plan can take it: every rank has all of it."""
        return self.is_local and self.lies == "R"


def draw_layer(
    draw: st.DrawFn, state: State, size: st.SearchStrategy[int], is_first_of_tokens: bool
) -> Layer:
    kinds = state.fitting_kinds(is_first_of_tokens)
    kind = draw(st.sampled_from([each for each in KINDS if each in kinds]))
    height, output, is_local = state.width, state.lies, state.is_local
    given = state.lies if state.is_local else draw(st.sampled_from(["R", "S0", "S1"]))
    if kind in ("colwise", "rowwise"):
        height, is_local = draw(size), draw(st.booleans())
        layouts = ["R", "S0", "S1", "S-1"]
        output = draw(st.sampled_from([*layouts, "P"] if kind == "rowwise" else layouts))
        if kind == "rowwise" and is_first_of_tokens:
            output = draw(st.sampled_from(layouts))
    elif kind == "norm":
        output = state.lies if state.is_local else draw(st.sampled_from(["S0", "S1"]))
        is_local = draw(st.booleans())
    elif kind in ("input", "output"):
        layouts = ["R", "S0", "S1", "S-1"]
        output = draw(st.sampled_from([*layouts, "P"] if state.lies == "P" else layouts))
        # A DTensor is taken as it lies, but only where the style says that something must change.
        given, is_local = state.lies, draw(st.booleans())
    elif kind == "bare":
        height = draw(size)
    return Layer(
        kind,
        state.width,
        height,
        given,
        output,
        is_local,
        has_bias=draw(st.booleans()),
        is_frozen=not is_first_of_tokens and draw(st.sampled_from([False, False, True])),
    )


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Any chain that tensor parallelism must get right."""
    ranks = draw(st.sampled_from([2, 2, 3, 4]))
    size: st.SearchStrategy[int] = st.integers(1, 7)
    if draw(st.booleans()):
        size = st.sampled_from([ranks, 2 * ranks])  # as torch wants it
    has_tokens = draw(st.sampled_from([False, False, True]))
    start = draw(st.sampled_from(["R", "S0", "S1"] if has_tokens else ["R", "S0", "S1", "S-1", "P"]))
    has_dtensor_input = draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    state = State(start, not has_dtensor_input, draw(size), dtype)
    layers: list[Layer] = []
    for place in range(draw(st.integers(1, 5))):
        layers.append(draw_layer(draw, state, size, has_tokens and place == 0))
        state = State(layers[-1].output, layers[-1].is_local, layers[-1].height, dtype)
    return Chain(
        ranks=ranks,
        rows=draw(size),
        length=draw(size),
        vocabulary=draw(size) if has_tokens else None,
        dtype=dtype,
        start=start,
        has_dtensor_input=has_dtensor_input,
        layers=tuple(layers),
        is_checkpointed=draw(st.sampled_from([False, False, True])),
        steps=draw(st.sampled_from([1, 1, 2])),
    )

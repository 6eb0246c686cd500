"""How a parallelized module runs: its forward goes by what its style has attached to it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from weft import comm
from weft.autograd import traced_inside_only
from weft.errors import ConfigError, ConfigTypeError, StateError, UnfitError
from weft.modules import attach, attached, give_class
from weft.tensor_parallel.axis import Axis
from weft.tensor_parallel.composed import composed_linear, once_in_sum
from weft.tensor_parallel.crossing import Crossing, cross
from weft.tensor_parallel.ids import check_ids
from weft.tensor_parallel.linear import LinearCall, SplitLinear
from weft.tensor_parallel.opening import opened_params
from weft.tensor_parallel.randomness import local_randomness
from weft.tensors import map_tensors

STATE = "tensor_parallel"


class Runner(Protocol):
    """Runs the forward of one module."""

    def run(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's output."""
        ...


class Parallelized:
    """Comes before a parallelized module's own class: the forward is the style's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module as its style says."""
        runner: Runner = attached(self, STATE)  # type: ignore[arg-type]
        return runner.run(self, args, kwargs)


def install_runner(module: nn.Module, runner: Runner) -> None:
    """Let the module run by the runner from now on."""
    attach(module, STATE, runner)
    give_class(module, object, "", first=Parallelized, has_hooks=False)


def own_forward(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward of the module's own class."""
    return super(Parallelized, module).forward(*args, **kwargs)  # type: ignore[misc]


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> tuple[Any, tuple[Any, ...]]:
    """The input that the style is about, and the others."""
    if args and isinstance(args[0], torch.Tensor):
        return args[0], args[1:]
    if args:
        raise ConfigTypeError(
            f"{where}: expecting input to be a torch.Tensor or DTensor, but got {type(args[0]).__name__}. "
            "Give the tensor as the first argument."
        )
    raise ConfigTypeError(
        f"{where}: the style is about the first argument, and there is none beside {sorted(kwargs)}. Give "
        "the input tensor by place, not by name."
    )


@dataclass(frozen=True, eq=False)
class LinearRunner:
    """nn.Linear, fused with its collectives."""

    call: LinearCall

    @traced_inside_only
    def run(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's output."""
        if not args and len(kwargs) == 1 and "input" in kwargs:
            args, kwargs = (kwargs["input"],), {}
        x, rest = first_input(args, kwargs, self.call.where)
        if rest or kwargs:
            raise ConfigTypeError(
                f"{self.call.where}: a linear layer has one input; got {len(rest)} more, and "
                f"{sorted(kwargs)}."
            )
        weight, bias = module.weight, module.bias
        check_split(weight, "weight", self.call.where)
        if bias is not None:
            check_split(bias, "bias", self.call.where)
        if torch.compiler.is_compiling():  # a graph is to see the parts
            return composed_linear(x, weight, bias, self.call)
        return SplitLinear.apply(x, weight, bias, self.call)


@dataclass(frozen=True, eq=False)
class LocalRunner:
    """Any module, run by its own forward on local tensors between two crossings."""

    axis: Axis
    entry: Crossing
    made: Placement  # how its outputs lie
    output: Placement | None  # how they shall lie; None: as they do
    is_local: bool
    grad_layout: Placement | None = None  # in which parameters' gradients come; None: as they lie
    draws: bool = False  # whether it may draw random numbers
    width: int | None = None  # of the whole output along the dim of `made`, where the module tells

    @traced_inside_only
    def run(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's output."""
        x, rest = first_input(args, kwargs, self.entry.where)
        local = cross(x, self.entry)
        rest, kwargs = map_tensors(self._open, (rest, kwargs))
        is_random = self.draws and module.training
        with (
            opened_params(module, self.axis, self.grad_layout, self._change_param),
            local_randomness(self.axis.mesh, local.device) if is_random else nullcontext(),
        ):
            run = _look_up if isinstance(module, nn.Embedding) else own_forward
            outputs = run(module, (local, *rest), kwargs)
        return map_tensors(lambda output: self._leave(output, x, local), outputs)

    def _open(self, other: torch.Tensor) -> torch.Tensor:
        """Another input: a DTensor can't be computed with beside local tensors. A plain one is a part too."""
        if isinstance(other, nn.Parameter) and not isinstance(other, DTensor) and self.axis.size > 1:
            raise ConfigError(
                f"{self.entry.where}: got a plain parameter of shape {tuple(other.shape)} as an input. Each "
                "rank would make a gradient of its own for it, from its part. Give the parameter to the "
                "module, or give a DTensor, which says how it lies."
            )
        if not isinstance(other, DTensor) or other.device_mesh != self.axis.mesh:
            return other
        if other.placements != (Replicate(),):
            return cross(other, self.entry)
        # Whole on each rank, and used by each for its own part: its gradient is a sum.
        way = Crossing(self.axis, Replicate(), None, is_local=True, where=self.entry.where, grad=Partial())
        return cross(other, way)

    def _change_param(self, name: str, local: torch.Tensor) -> torch.Tensor:
        is_in_every_addend = isinstance(self.made, Partial) and name == "bias"
        return once_in_sum(local, self.axis) if is_in_every_addend else local

    def _leave(self, output: torch.Tensor, x: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        if isinstance(self.made, Shard) and not -output.ndim <= self.made.dim < output.ndim:
            raise ConfigError(
                f"{self.entry.where}: an output has shape {tuple(output.shape)}, and must have the dim that "
                f"inputs are split along, {self.made.dim}. Compute such values outside of the module."
            )
        size = self.width
        if size is None:
            size = whole_output_size(output, x, local, self.made)
        way = Crossing(self.axis, self.made, self.output, self.is_local, self.entry.where, whole_size=size)
        return cross(output, way)


@dataclass(frozen=True, eq=False)
class NormRunner:
    """A norm over the last dims: on its shard of the input, or on all of it if the split dim is one of those.

    The statistics need whole rows. As DTensor does in torch, an input that is split across its rows is
    gathered, and the output is whole on every rank.
    """

    sharded: LocalRunner
    full: LocalRunner
    split_dim: int

    @traced_inside_only
    def run(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The normalized input."""
        x, _ = first_input(args, kwargs, self.sharded.entry.where)
        is_across_rows = self.split_dim % x.ndim >= x.ndim - len(module.normalized_shape)
        return (self.full if is_across_rows else self.sharded).run(module, args, kwargs)


def _look_up(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward of an embedding, of which this rank may have no columns."""
    slots = module._parameters
    weight: torch.Tensor = slots["weight"]
    if weight.numel():
        return own_forward(module, args, kwargs)
    # On CUDA the backward of a lookup reads memory that a weight without columns doesn't have. So autograd
    # doesn't see the lookup; a sum of nothing lets the weight have its gradient, and outputs their backward.
    slots["weight"] = weight.detach()
    try:
        outputs = own_forward(module, args, kwargs)
    finally:
        slots["weight"] = weight
    return map_tensors(lambda out: out + weight.sum() if out.is_floating_point() else out, outputs)


def whole_output_size(
    output: torch.Tensor, x: torch.Tensor, local: torch.Tensor, made: Placement
) -> int | None:
    """The size of the whole output along the dim of its cut, where the input tells."""
    if not isinstance(made, Shard):
        return None
    dim = made.dim % output.ndim
    if isinstance(x, DTensor) and x.ndim == output.ndim and output.shape[dim] == local.shape[dim]:
        return x.shape[dim]
    return None


@dataclass(frozen=True, eq=False)
class SplitEmbeddingRunner:
    """An embedding of which each rank has some rows: what others have counts zero, and outputs are summed."""

    axis: Axis
    entry: Crossing
    output: Placement
    is_local: bool

    @traced_inside_only
    def run(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The embeddings."""
        where = self.entry.where
        ids, rest = first_input(args, kwargs, where)
        check_split(module.weight, "weight", where)
        if ids.dtype not in (torch.int32, torch.int64):
            raise UnfitError(
                f"{where}: Expected tensor for argument #1 'indices' to have one of the following scalar "
                f"types: Long, Int; but got {ids.dtype} instead."
            )
        ids = cross(ids, self.entry)
        num_rows = module.weight.shape[0]
        check_ids(
            ids,
            num_rows,
            lambda wrong: f"{where}: index out of range in self: {wrong}, of {num_rows} rows.",
        )
        sizes = comm.chunk_sizes(num_rows, self.axis.size)
        start, size = sum(sizes[: self.axis.rank]), sizes[self.axis.rank]
        is_others = (ids < start) | (ids >= start + size)
        local_ids = (ids - start).masked_fill_(is_others, 0)
        padding: int | None = module.padding_idx
        try:
            module.padding_idx = _own_index(padding, start, size)
            with opened_params(module, self.axis, None, _with_a_row):
                output = own_forward(module, (local_ids, *rest), kwargs)
        finally:
            module.padding_idx = padding
        output = output.masked_fill(is_others.unsqueeze(-1), 0.0)
        return cross(output, Crossing(self.axis, Partial(), self.output, self.is_local, where))


def _own_index(index: int | None, start: int, size: int) -> int | None:
    """Where a row of the whole is among this rank's; None if it isn't."""
    return None if index is None or not start <= index < start + size else index - start


def _with_a_row(name: str, local: torch.Tensor) -> torch.Tensor:
    """A rank without rows looks up one of zeros."""
    return local if local.shape[0] else local.new_zeros(1, *local.shape[1:]) + local.sum()


def check_split(param: Any, name: str, where: str) -> None:
    """Raise for a parameter that was put in the place of a split one."""
    if not isinstance(param, DTensor):
        raise StateError(
            f"{where}: '{name}' is a plain tensor, though it was split when the module was parallelized. "
            "Change values in place, or assign a DTensor with the same placements."
        )


def replicated_entry(axis: Axis, layout: Placement, where: str, *, is_summed: bool) -> Crossing:
    """Into a module that needs its whole input; with `is_summed` ranks make addends of its gradient."""
    return Crossing(axis, layout, Replicate(), True, where, grad=Partial() if is_summed else None)

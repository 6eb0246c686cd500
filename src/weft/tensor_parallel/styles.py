"""The styles that split a module's parameters: by output features, by input features, or not at all.

A style says how parameters and tensors lie (data), and attaches a runner that makes it so (running.py).
Names and meanings are torch's. `check` comes before anything is changed; `_apply` is what torch's
ParallelStyle asks of a style, and what a user's own style writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from weft import comm
from weft.errors import ConfigError, UnsupportedError
from weft.modules import attached
from weft.tensor_parallel.axis import Axis
from weft.tensor_parallel.crossing import Crossing
from weft.tensor_parallel.linear import LinearCall
from weft.tensor_parallel.parameters import check_param, distribute_param, move_buffers, param_at
from weft.tensor_parallel.running import (
    STATE,
    LinearRunner,
    LocalRunner,
    NormRunner,
    Runner,
    SplitEmbeddingRunner,
    install_runner,
    replicated_entry,
)

# Of these forwards it is known that they draw no random numbers.
_DRAWS_NOTHING = (nn.LayerNorm.forward, nn.RMSNorm.forward, nn.GroupNorm.forward, nn.Identity.forward)
_NORMALIZES_LAST_DIMS = (nn.LayerNorm.forward, nn.RMSNorm.forward)


class ParallelStyle(ABC):
    """How one module is parallelized. Subclass it and write `_apply` for a style of your own."""

    src_data_rank: int | None = 0  # set by parallelize_module: whose values parameters get
    where: str = ""  # set by parallelize_module: the module's qualified name, for messages
    label: str = ""  # the same, for records

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Change the module in place, for one axis of a mesh, and return it."""


class SplittingStyle(ParallelStyle):
    """A style of weft's that lays out parameters and runs the module on local tensors."""

    @abstractmethod
    def layouts(self, module: nn.Module) -> dict[str, Placement]:
        """How the module's parameters shall lie, by name. Raises for a module that the style isn't for."""

    @abstractmethod
    def runner(self, module: nn.Module, axis: Axis, where: str) -> Runner:
        """What shall run the module."""

    def check(self, module: nn.Module, axis: Axis, where: str) -> None:
        """Raise if the style can't be applied. Nothing is changed."""
        if attached(module, STATE) is not None:
            raise ConfigError(
                f"{where} was parallelized already, and {type(self).__name__} would be a second style for "
                "it. Give each module one of ColwiseParallel, RowwiseParallel and SequenceParallel."
            )
        if "forward" in module.__dict__:
            raise ConfigError(
                f"{where} has a forward of its own on the instance, which would be run in the style's place. "
                "Parallelize first, and replace forward afterwards; or put it into a class."
            )
        source: Any = self.src_data_rank
        if source is not None and not (isinstance(source, int) and 0 <= source < axis.size):
            raise ConfigError(
                f"src_data_rank is {source!r}; the axis has ranks 0 to {axis.size - 1}. Give one of them, or "
                "None for each rank's own values."
            )
        for name, layout in self.layouts(module).items():
            check_param(name, param_at(module, name), layout, axis, where)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        axis = Axis(device_mesh, self.label)
        where = self.where or type(module).__name__
        self.check(module, axis, where)
        made: dict[int, nn.Parameter] = {}  # a parameter may hang in several places
        for name, layout in self.layouts(module).items():
            param = param_at(module, name)
            if id(param) not in made:
                made[id(param)] = distribute_param(param, layout, axis, self.src_data_rank)
            owner, _, own_name = name.rpartition(".")
            module.get_submodule(owner)._parameters[own_name] = made[id(param)]
        move_buffers(module, axis)
        install_runner(module, self.runner(module, axis, where))
        return module


class _FeatureStyle(SplittingStyle):
    """What colwise and rowwise have in common."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        for layout in (input_layouts, output_layouts):
            if layout is not None:
                check_is_layout(layout)
        self.input_layouts: tuple[Placement, ...] = (input_layouts or self._default_input(),)
        self.output_layouts: tuple[Placement, ...] = (output_layouts or self._default_output(),)
        self.use_local_output = use_local_output

        if isinstance(self.output_layouts[0], Partial) and not self.makes_sums:
            raise UnsupportedError(
                f"{type(self).__name__}(output_layouts=Partial()): redistributing to Partial is for internal "
                "use only! Its outputs are parts, not addends."
            )

    makes_sums = False  # whether each rank makes an addend of the output

    @abstractmethod
    def _default_input(self) -> Placement: ...

    @abstractmethod
    def _default_output(self) -> Placement: ...

    def _check_kind(self, module: nn.Module) -> None:
        name = type(self).__name__
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise UnsupportedError(
                f"{name} currently only support nn.Linear and nn.Embedding! Got {type(module).__name__}: "
                "name the layers in it, or write a ParallelStyle of your own."
            )
        known = {"weight", "bias"} if isinstance(module, nn.Linear) else {"weight"}
        others = sorted({param_name for param_name, _ in module.named_parameters()} - known)
        if others:
            raise UnsupportedError(
                f"{name} knows how to split {' and '.join(sorted(known))}; this {type(module).__name__} has "
                f"{', '.join(others)} too. Write a ParallelStyle of your own that says how they lie."
            )
        if isinstance(module, nn.Embedding):
            for option in ("max_norm", "scale_grad_by_freq", "sparse"):
                if getattr(module, option):
                    raise UnsupportedError(
                        f"{name}: an embedding with {option}={getattr(module, option)} can't be split: it "
                        "would need all rows, or all indices, on every rank. Leave the option out."
                    )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, "
            f"output_layouts={self.output_layouts}, use_local_output={self.use_local_output})"
        )


class ColwiseParallel(_FeatureStyle):
    """Split nn.Linear or nn.Embedding by output features.

    The input must be whole on every rank and is gathered if `input_layouts` says it isn't; outputs are split
    along the last dim unless `output_layouts` says otherwise. `use_local_output=False` gives DTensors.
    """

    def _default_input(self) -> Placement:
        return Replicate()

    def _default_output(self) -> Placement:
        return Shard(-1)

    def layouts(self, module: nn.Module) -> dict[str, Placement]:
        """Rows of a linear layer's weight and bias; columns of an embedding."""
        self._check_kind(module)
        dim = 0 if isinstance(module, nn.Linear) else 1
        return {name: Shard(dim) for name, _ in module.named_parameters()}

    def runner(self, module: nn.Module, axis: Axis, where: str) -> Runner:
        """nn.Linear with its collectives; others on local parameters."""
        have, want = self.input_layouts[0], self.output_layouts[0]
        if is_plain_linear(module):
            return LinearRunner(
                LinearCall(axis, (have, want), where, is_colwise=True, is_local=self.use_local_output)
            )
        entry = replicated_entry(axis, have, where, is_summed=True)
        # Another forward may give another width.
        width = module.embedding_dim if type(module).forward is nn.Embedding.forward else None
        return LocalRunner(axis, entry, Shard(-1), want, self.use_local_output, width=width)  # type: ignore[arg-type]


class RowwiseParallel(_FeatureStyle):
    """Split nn.Linear or nn.Embedding by input features, which are an embedding's rows.

    A linear layer's input is split along the last dim unless `input_layouts` says otherwise, an embedding's
    indices are needed whole; outputs are summed over ranks, and whole unless `output_layouts` says
    otherwise. `use_local_output=False` gives DTensors.
    """

    makes_sums = True

    def _default_input(self) -> Placement:
        return Shard(-1)

    def _default_output(self) -> Placement:
        return Replicate()

    def layouts(self, module: nn.Module) -> dict[str, Placement]:
        """Columns of a linear layer's weight, its bias whole; rows of an embedding."""
        self._check_kind(module)
        if isinstance(module, nn.Embedding):
            return {name: Shard(0) for name, _ in module.named_parameters()}
        return {name: Shard(1) if name == "weight" else Replicate() for name, _ in module.named_parameters()}

    def runner(self, module: nn.Module, axis: Axis, where: str) -> Runner:
        """nn.Linear with its collectives; others on local parameters."""
        have, want = self.input_layouts[0], self.output_layouts[0]
        if isinstance(module, nn.Embedding):
            entry = replicated_entry(axis, have, where, is_summed=False)
            return SplitEmbeddingRunner(axis, entry, want, self.use_local_output)
        if is_plain_linear(module):
            return LinearRunner(
                LinearCall(axis, (have, want), where, is_colwise=False, is_local=self.use_local_output)
            )
        entry = Crossing(axis, have, Shard(-1), True, where)
        return LocalRunner(axis, entry, Partial(), want, self.use_local_output)


class SequenceParallel(SplittingStyle):
    """Keep parameters whole and run the module on tensors that are split along the sequence: norms, dropout.

    A plain input is taken to be split along `sequence_dim` already. Gradients of parameters are partial sums
    (DTensors with Partial placement), which whoever reads them sums. Random numbers are drawn per rank.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding: tuple[Placement, ...] = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def layouts(self, module: nn.Module) -> dict[str, Placement]:
        """All whole."""
        if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()):
            raise UnsupportedError(
                "SequenceParallel: batch norm would take statistics of each rank's part, and ranks would "
                "drift apart. Use a layer norm, or run it on whole tensors (PrepareModuleInput)."
            )
        return {name: Replicate() for name, _ in module.named_parameters(remove_duplicate=False)}

    def runner(self, module: nn.Module, axis: Axis, where: str) -> Runner:
        """The module on its part of the sequence."""
        layout: Shard = self.sequence_sharding[0]  # type: ignore[assignment]
        entry = Crossing(axis, layout, layout, True, where)
        draws = type(module).forward not in _DRAWS_NOTHING
        sharded = LocalRunner(axis, entry, layout, None, self.use_local_output, Partial(), draws)
        if type(module).forward not in _NORMALIZES_LAST_DIMS:
            return sharded
        gather = replicated_entry(axis, layout, where, is_summed=False)
        full = LocalRunner(axis, gather, Replicate(), None, self.use_local_output)
        return NormRunner(sharded, full, layout.dim)

    def __repr__(self) -> str:
        dim = self.sequence_sharding[0].dim  # type: ignore[attr-defined]
        return f"{type(self).__name__}(sequence_dim={dim}, use_local_output={self.use_local_output})"


def is_plain_linear(module: nn.Module) -> bool:
    """Whether the module computes what nn.Linear does."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def check_is_layout(layout: Any) -> None:
    """Raise for something that is no placement, or one that isn't moved between."""
    if not isinstance(layout, Placement):
        raise ConfigError(
            f"a layout is a placement, such as Shard(0), Replicate() or Partial(); got {layout!r}."
        )
    comm.check_layout(layout)

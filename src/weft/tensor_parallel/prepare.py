"""The styles that change how a module's inputs and outputs lie, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement

from weft.autograd import traced_inside_only
from weft.errors import ConfigError, RefusedError, UnsupportedError
from weft.tensor_parallel.axis import Axis
from weft.tensor_parallel.crossing import Crossing, cross
from weft.tensor_parallel.styles import ParallelStyle, check_is_layout

Layouts = tuple[Placement | None, ...]


class PrepareModuleInput(ParallelStyle):
    """Bring a module's inputs into the layouts that it needs.

    `input_layouts` says how plain inputs lie, one for each input by place, `desired_input_layouts` how the
    module gets them; None leaves an input alone. The `kwarg` ones are the same by name. The module gets
    DTensors, or local tensors with `use_local_output=True`.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | Layouts | None = None,
        desired_input_layouts: Placement | Layouts | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _as_tuple(input_layouts)
        self.desired_input_layouts = _as_tuple(desired_input_layouts)
        self.use_local_output = use_local_output
        if self.input_layouts is not None:
            if self.desired_input_layouts is None:
                raise RefusedError("desired module inputs should not be None! Give desired_input_layouts.")
            _check_pairs(self.input_layouts, self.desired_input_layouts, "input_layouts")
        self.with_kwargs = input_kwarg_layouts is not None
        self.input_kwarg_layouts = input_kwarg_layouts or {}
        self.desired_input_kwarg_layouts = desired_input_kwarg_layouts or {}
        if self.with_kwargs and set(self.input_kwarg_layouts) != set(self.desired_input_kwarg_layouts):
            raise RefusedError(
                "input_kwarg_layouts and desired_input_kwarg_layouts should have same length! They name "
                f"{sorted(self.input_kwarg_layouts)} and {sorted(self.desired_input_kwarg_layouts)}: name "
                "the same inputs in both."
            )
        for layout in (*self.input_kwarg_layouts.values(), *self.desired_input_kwarg_layouts.values()):
            check_is_layout(layout)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        hook = _InputHook(self, Axis(device_mesh, self.label), self.where or type(module).__name__)
        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, "
            f"desired_input_layouts={self.desired_input_layouts}, "
            f"input_kwarg_layouts={self.input_kwarg_layouts}, "
            f"desired_input_kwarg_layouts={self.desired_input_kwarg_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class PrepareModuleOutput(ParallelStyle):
    """Bring a module's outputs into the layouts that its users need.

    `output_layouts` says how plain outputs lie, one for each output, `desired_output_layouts` how they are
    handed on; None leaves an output alone. They are local tensors, or DTensors with `use_local_output=False`.
    """

    def __init__(
        self,
        *,
        output_layouts: Placement | Layouts,
        desired_output_layouts: Placement | Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.output_layouts = _as_tuple(output_layouts) or ()
        self.desired_output_layouts = _as_tuple(desired_output_layouts) or ()
        self.use_local_output = use_local_output
        _check_pairs(self.output_layouts, self.desired_output_layouts, "output_layouts")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(
            _OutputHook(self, Axis(device_mesh, self.label), self.where or type(module).__name__)
        )
        return module

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(output_layouts={self.output_layouts}, "
            f"desired_output_layouts={self.desired_output_layouts}, use_local_output={self.use_local_output})"
        )


class PrepareModuleInputOutput(ParallelStyle):
    """PrepareModuleInput and PrepareModuleOutput for one module."""

    def __init__(
        self,
        *,
        input_layouts: Placement | Layouts | None = None,
        desired_input_layouts: Placement | Layouts | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Placement | Layouts,
        desired_output_layouts: Placement | Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for part in (self.prepare_module_input, self.prepare_module_output):
            part.where, part.label = self.where, self.label
            part._apply(module, device_mesh)
        return module

    def __repr__(self) -> str:
        given, made = self.prepare_module_input, self.prepare_module_output
        return (
            f"{type(self).__name__}(input_layouts={given.input_layouts}, "
            f"desired_input_layouts={given.desired_input_layouts}, "
            f"input_kwarg_layouts={given.input_kwarg_layouts}, "
            f"desired_input_kwarg_layouts={given.desired_input_kwarg_layouts}, "
            f"use_local_input={given.use_local_output}, output_layouts={made.output_layouts}, "
            f"desired_output_layouts={made.desired_output_layouts}, "
            f"use_local_output={made.use_local_output})"
        )


class _Hook:
    """Brings tensors over as a style says."""

    kind: str

    def __init__(self, style: Any, axis: Axis, where: str) -> None:
        self.style, self.axis, self.where = style, axis, where

    def bring(self, value: Any, have: Placement | None, want: Placement | None) -> Any:
        """One tensor in the layout that is wanted, or a value that is left alone."""
        if have is None:
            return value
        if not isinstance(value, torch.Tensor):
            raise RefusedError(
                f"{self.where}: expecting {self.kind} to be a torch.Tensor! Got {type(value).__name__}; give "
                "None as its layout."
            )
        return cross(value, Crossing(self.axis, have, want, self.style.use_local_output, self.where))


class _InputHook(_Hook):
    """Brings inputs over before the module runs."""

    kind = "input"

    @traced_inside_only
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        style: PrepareModuleInput = self.style
        if style.input_layouts is not None:
            assert style.desired_input_layouts is not None
            if len(args) != len(style.input_layouts):
                raise ConfigError(
                    f"{self.where}: module inputs and input_layouts should have same length! It got "
                    f"{len(args)} inputs by place for {len(style.input_layouts)} layouts; None is the layout "
                    "of an input to be left alone."
                )
            pairs = zip(style.input_layouts, style.desired_input_layouts, strict=True)
            args = tuple(self.bring(arg, *pair) for arg, pair in zip(args, pairs, strict=True))
        by_name = style.input_kwarg_layouts
        kwargs = {
            name: self.bring(arg, by_name.get(name), style.desired_input_kwarg_layouts.get(name))
            for name, arg in kwargs.items()
        }
        return args, kwargs


class _OutputHook(_Hook):
    """Brings outputs over after the module ran."""

    kind = "output"

    @traced_inside_only
    def __call__(self, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
        style: PrepareModuleOutput = self.style
        given: tuple[Any, ...] = outputs if isinstance(outputs, tuple) else (outputs,)
        if len(given) != len(style.output_layouts):
            raise ConfigError(
                f"{self.where}: module outputs and output_layouts should have same length! It gave "
                f"{len(given)} for {len(style.output_layouts)} layouts; None is the layout of an output to "
                "be left alone."
            )
        pairs = zip(style.output_layouts, style.desired_output_layouts, strict=True)
        brought = tuple(self.bring(output, *pair) for output, pair in zip(given, pairs, strict=True))
        return brought[0] if len(brought) == 1 else brought


def _as_tuple(layouts: Placement | Layouts | None) -> Layouts | None:
    return (layouts,) if isinstance(layouts, Placement) else layouts


def _check_pairs(have: Layouts, want: Layouts, name: str) -> None:
    if len(have) != len(want):
        raise RefusedError(
            f"{name} and desired_{name} should have same length! They have {len(have)} and {len(want)}: give "
            "one of each for every tensor."
        )
    for layout in (*have, *want):
        if layout is not None:
            check_is_layout(layout)
    for given, wanted in zip(have, want, strict=True):
        if isinstance(wanted, Partial) and given is not None and not isinstance(given, Partial):
            raise UnsupportedError(
                f"desired_{name}: redistributing to Partial is for internal use only! Got {given}; a tensor "
                "becomes a sum over ranks only by being computed as one."
            )

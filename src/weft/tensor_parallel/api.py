"""parallelize_module: split a module over an axis of a mesh, as a plan says.

Private names of torch, used here and nowhere else: `device_mesh._mesh_resources` (the mesh that was entered).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed import device_mesh as torch_mesh
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.simulated import check_one_rank
from weft.errors import ConfigError, ConfigTypeError
from weft.tensor_parallel.axis import Axis
from weft.tensor_parallel.parameters import param_at
from weft.tensor_parallel.plan import plan_matches
from weft.tensor_parallel.styles import ParallelStyle, SplittingStyle
from weft.torch_private import check_torch

Step = tuple[str, nn.Module, ParallelStyle]  # a module's name and what is done to it


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
    strict: bool = False,
) -> nn.Module:
    """Parallelize a module in place, over a mesh of one axis, and return it.

    The plan is a style, or styles by the names of submodules, where parts between dots may have wildcards and
    "" is the module itself. Without a mesh the one whose context is entered is meant. Parameters get the
    values of the axis' rank `src_data_rank`, or each rank's own with None. A name that matches nothing is
    warned of, and is an error with `strict`. Every rank of the axis must call.

    Raises before anything is changed.
    """
    if parallelize_plan is None:
        warnings.warn(
            "No parallelize_plan is provided and auto-parallel is not supported at the moment, so this "
            "parallelize_module call will do nothing.",
            stacklevel=2,
        )
        return module
    check_torch()
    axis = Axis(torch_mesh._mesh_resources.get_current_mesh() if device_mesh is None else device_mesh)
    if axis.size > 1:
        check_one_rank("parallelize_module")
    steps = _resolve_steps(module, parallelize_plan, strict=strict)
    for _, _, style in steps:
        style.src_data_rank = src_data_rank
    _check_steps(steps, axis)
    ties = _find_ties(module)
    for name, target, style in steps:
        style.where, style.label = _words(name, target), name or type(target).__name__
        style._apply(target, axis.mesh)
        _tie_again(ties)
    return module


def _resolve_steps(
    module: nn.Module, plan: ParallelStyle | Mapping[str, ParallelStyle], *, strict: bool
) -> list[Step]:
    if isinstance(plan, ParallelStyle):
        return [("", module, plan)]
    if not isinstance(plan, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  (a user's value)
        raise ConfigTypeError(
            f"Expect Union[ParallelStyle, Dict[str, ParallelStyle]] for parallelize_plan, {type(plan)} found!"
        )
    for name, style in plan.items():
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigTypeError(f"names of a parallelize_plan are strings; got {name!r}.")
        if not isinstance(style, ParallelStyle):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigTypeError(
                f"Expect Union[ParallelStyle, Dict[str, ParallelStyle]] for parallelize_plan, {type(style)} "
                f"found! It stands for '{name}'."
            )
    modules = dict(module.named_modules(remove_duplicate=False))
    matches, misses = plan_matches(plan, list(modules))
    if misses and strict:
        raise ConfigError("\n".join(miss.words(is_skipped=False) for miss in misses))
    for miss in misses:
        warnings.warn(miss.words(is_skipped=True), stacklevel=3)
    steps: list[Step] = []
    taken: set[tuple[str, int]] = set()
    for pattern, name, style in matches:
        target = modules[name]
        if (pattern, id(target)) not in taken:  # a module under two names is one
            taken.add((pattern, id(target)))
            steps.append((name, target, style))
    return steps


def _check_steps(steps: Sequence[Step], axis: Axis) -> None:
    """Raise for a plan that can't be carried out whole."""
    split: dict[int, str] = {}
    layouts: dict[int, tuple[Any, str]] = {}
    for name, target, style in steps:
        if not isinstance(style, SplittingStyle):
            continue
        words = _words(name, target)
        style.check(target, axis, words)
        if id(target) in split:
            raise ConfigError(
                f"{words} gets two styles from the plan: {split[id(target)]} and {style}. Give it one."
            )
        split[id(target)] = repr(style)
        for param_name, layout in style.layouts(target).items():
            param = param_at(target, param_name)
            before, where = layouts.setdefault(id(param), (layout, words))
            if before != layout:
                raise ConfigError(
                    f"{words} and {where} share a parameter, which the plan places {layout} and {before}. "
                    "Give them styles that place it alike, or untie them."
                )


def _words(name: str, module: nn.Module) -> str:
    return f"'{name}' ({type(module).__name__})" if name else type(module).__name__


def _find_ties(module: nn.Module) -> list[list[tuple[dict[str, Any], str]]]:
    """Where each parameter hangs that hangs in several places."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None:
                places.setdefault(id(param), []).append((owner._parameters, name))
    return [found for found in places.values() if len(found) > 1]


def _tie_again(ties: list[list[tuple[dict[str, Any], str]]]) -> None:
    """Put a parameter that was replaced in one of its places into all of them."""
    for places in ties:
        values = [slots[name] for slots, name in places]
        changed = [value for value in values if hasattr(value, "placements")]
        if changed and any(value is not changed[0] for value in values):
            for slots, name in places:
                slots[name] = changed[0]

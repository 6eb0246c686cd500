"""Which modules, parameters and buffers one call of `fully_shard` is about, and bringing them to its device.

Invariant: modules come children first, parameters in the order of their modules, each once; every rank that
has the same model gets the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # private: named here only

from weft.errors import ConfigError, RefusedError


@dataclass(frozen=True, eq=False)
class Site:
    """A place where a parameter is registered: `module._parameters[name]`."""

    module: nn.Module
    name: str


def check_module(module: nn.Module, what: str) -> None:
    """Raise ConfigError for a container without a forward; `what` is the function that was called with it."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        raise ConfigError(
            f"{what} does not support containers that do not implement forward: {module}. Its hooks would "
            "never run. Call it on the modules inside, on a list of them, or on the module that calls them."
        )


def root_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of the modules that are inside no other one, each once, in the order given."""
    unique = list(dict.fromkeys(modules))
    inside = {part for module in unique for part in module.modules() if part is not module}
    return [module for module in unique if module not in inside]


def managed_modules(
    roots: Sequence[nn.Module],
    ignored: set[nn.Parameter] | None,
    is_taken: Callable[[nn.Module], bool],
) -> list[nn.Module]:
    """The topmost of `roots` and all that is inside them, children first.

    Left out: modules that another call holds (`is_taken`; never asked of a root) with all that is inside
    them, and modules that have no buffer and only ignored parameters, all inside included.
    """
    found: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        seen.add(module)
        for child in module.children():
            if child not in seen and not is_taken(child):
                visit(child)
        found.append(module)

    for root in root_modules(roots):
        visit(root)
    if not ignored:
        return found
    return [module for module in found if not _is_ignored(module, ignored)]


def managed_parameters(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter] | None
) -> list[tuple[str, nn.Parameter, list[Site]]]:
    """The parameters of managed modules, tied ones once, with a name and every site within those modules.

    The name is the path from the topmost managed module. Raises ConfigError for a parameter without dims.
    """
    prefixes = _prefixes(modules)
    found: dict[nn.Parameter, tuple[str, list[Site]]] = {}
    for module in modules:
        for name, param in module._parameters.items():
            if param is None or (ignored is not None and param in ignored):
                continue
            if param.ndim == 0:
                raise ConfigError(
                    f"fully_shard doesn't support scalar parameters. Change {prefixes[module]}{name} to a 1D "
                    "tensor with numel equal to 1."
                )
            _, sites = found.setdefault(param, (prefixes[module] + name, []))
            sites.append(Site(module, name))
    return [(name, param, sites) for param, (name, sites) in found.items()]


def managed_buffers(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    """The buffers of managed modules, each once."""
    return list(dict.fromkeys(buffer for module in modules for buffer in module.buffers(recurse=False)))


def move_to_device(
    params: Iterable[nn.Parameter], buffers: Iterable[torch.Tensor], device: torch.device
) -> None:
    """Bring parameters and buffers to the device, in place. Those on the meta device stay there.

    Raises ConfigError for a DTensor of another kind of device, before anything has moved.
    """
    elsewhere = [
        tensor
        for tensor in itertools.chain(params, buffers)
        if tensor.device != device and tensor.device.type != "meta"
    ]
    for tensor in elsewhere:
        if isinstance(tensor, DTensor):
            _refuse_to_move(tensor, device)
    for tensor in elsewhere:
        moved = tensor.detach().to(device)
        if is_traceable_wrapper_subclass(tensor):
            # Its data are inner tensors, which assigning to .data would not replace.
            if isinstance(tensor, nn.Parameter):
                moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, moved)
        else:
            tensor.data = moved


def _refuse_to_move(tensor: DTensor, device: torch.device) -> None:
    kind = tensor.device_mesh.device_type
    if kind != device.type:
        raise ConfigError(
            "Requires DTensor to have mesh of the same type as the FSDP mesh "
            f"but got {kind} for DTensor and {device.type} for FSDP. Make both meshes with "
            f"init_device_mesh('{device.type}', ...)."
        )
    raise RefusedError(
        f"Expects DTensor to be moved to {kind} but got {tensor.device}: this rank's device is {device}. "
        "Select the device before the DTensor is made, or move it."
    )


def _is_ignored(module: nn.Module, ignored: set[nn.Parameter]) -> bool:
    return next(module.buffers(), None) is None and all(param in ignored for param in module.parameters())


def _prefixes(modules: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """The path to each managed module from the topmost one that has it, with its last dot."""
    managed = set(modules)
    inside = {child for module in modules for child in module.children()}
    prefixes: dict[nn.Module, str] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        if module in managed and module not in prefixes:
            prefixes[module] = prefix
            for name, child in module.named_children():
                visit(child, f"{prefix}{name}.")

    for module in modules:
        if module not in inside:
            visit(module, "")
    return prefixes

"""What a RemoteModule asks of the worker that has its module. Every function here runs on that worker.

They are functions of a module, so that they travel by name; `allow` has to name this module where it is set.
A module itself never travels back: callers get values, or RRefs to what stays here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ConfigError, ConfigTypeError, RefusedError
from weft.rpc import api
from weft.tensors.tree import map_tensors

# Methods that change a module in place. A caller names one of these, never any attribute it likes.
CHANGES = frozenset(
    {
        "apply",
        "bfloat16",
        "compile",
        "double",
        "float",
        "half",
        "requires_grad_",
        "to",
        "to_empty",
        "train",
        "zero_grad",
    }
)

# A module of any other device gets its inputs moved there, and its outputs moved back to the CPU.
_STATIONARY = ("cpu", "meta")


def create_module(
    module_cls: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any], device: str
) -> nn.Module:
    """Build the module and move it to its device."""
    module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}. Give RemoteModule a module's class, or "
            "a function that makes a module."
        )
    return module.to(device)


def run_forward(
    module_rref: api.RRef[nn.Module],
    device: str,
    is_device_map_set: bool,
    is_grad_enabled: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call the module, its hooks included, in the caller's grad mode and with the inputs on its device.

    Without a device map only CPU tensors can be sent, so that is what the output becomes.
    """
    module = _module_of(module_rref)
    with torch.set_grad_enabled(is_grad_enabled):
        if torch.device(device).type in _STATIONARY:
            return module(*args, **kwargs)
        args, kwargs = map_tensors(lambda tensor: tensor.to(device), (args, kwargs))
        return _ready_to_send(module(*args, **kwargs), is_device_map_set)


def run_plain_forward(
    module_rref: api.RRef[nn.Module],
    device: str,
    is_device_map_set: bool,
    is_grad_enabled: bool,
    *args: Any,
) -> Any:
    """The same without arguments that have names."""
    return run_forward(module_rref, device, is_device_map_set, is_grad_enabled, args, {})


def change_module(
    module_rref: api.RRef[nn.Module], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Call one of the methods that change the module in place."""
    if method not in CHANGES:
        raise RefusedError(
            f"RemoteModule: '{method}' is not among what a caller may change: {sorted(CHANGES)}."
        )
    getattr(_module_of(module_rref), method)(*args, **kwargs)


def list_parameters(
    module_rref: api.RRef[nn.Module], prefix: str, recurse: bool, remove_duplicate: bool
) -> list[tuple[str, api.RRef[nn.Parameter]]]:
    """RRefs to the parameters, and their names."""
    found = _module_of(module_rref).named_parameters(prefix, recurse, remove_duplicate)
    return [(name, api.RRef(param)) for name, param in found]


def list_buffers(
    module_rref: api.RRef[nn.Module], prefix: str, recurse: bool, remove_duplicate: bool
) -> list[tuple[str, api.RRef[Tensor]]]:
    """RRefs to the buffers, and their names."""
    found = _module_of(module_rref).named_buffers(prefix, recurse, remove_duplicate)
    return [(name, api.RRef(buffer)) for name, buffer in found]


def find_parameter(module_rref: api.RRef[nn.Module], target: str) -> api.RRef[nn.Parameter]:
    """An RRef to one parameter."""
    return api.RRef(_module_of(module_rref).get_parameter(target))


def find_buffer(module_rref: api.RRef[nn.Module], target: str) -> api.RRef[Tensor]:
    """An RRef to one buffer."""
    return api.RRef(_module_of(module_rref).get_buffer(target))


def find_submodule(module_rref: api.RRef[nn.Module], target: str) -> api.RRef[nn.Module]:
    """An RRef to a module within the module."""
    return api.RRef(_module_of(module_rref).get_submodule(target))


def read_gradients(
    module_rref: api.RRef[nn.Module], recurse: bool, is_device_map_set: bool
) -> dict[str, Tensor | None]:
    """What `grad` of each parameter holds; None where there is none."""
    params = _module_of(module_rref).named_parameters(recurse=recurse)
    return {name: _ready_to_send(param.grad, is_device_map_set) for name, param in params}


def read_state(module_rref: api.RRef[nn.Module], prefix: str, is_device_map_set: bool) -> dict[str, Any]:
    """The module's state_dict, its metadata included."""
    state = _module_of(module_rref).state_dict(prefix=prefix)
    for key, value in state.items():
        state[key] = _ready_to_send(value, is_device_map_set)
    return state


def load_state(
    module_rref: api.RRef[nn.Module], state: dict[str, Any], strict: bool, assign: bool, device: str
) -> tuple[list[str], list[str]]:
    """Load a state_dict into the module; the keys that were missing, and those that were too many."""
    if assign and device != "meta":
        # These become the parameters. They came to the CPU, or to where the device map says.
        for key, value in state.items():
            state[key] = map_tensors(lambda tensor: tensor.to(device), value)
    # As plain data: a caller that restricts what peers may name can't be sent torch's own class.
    missing, unexpected = _module_of(module_rref).load_state_dict(state, strict=strict, assign=assign)
    return missing, unexpected


def _module_of(module_rref: api.RRef[nn.Module]) -> nn.Module:
    """The module; its constructor's error, where that failed."""
    module = module_rref.local_value()
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigTypeError(
            f"RemoteModule: module_rref is an RRef to a {type(module).__name__}; it must be one to a module."
        )
    return module


def _ready_to_send(value: Any, is_device_map_set: bool) -> Any:
    return value if is_device_map_set else map_tensors(lambda tensor: tensor.cpu(), value)

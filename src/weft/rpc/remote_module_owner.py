"""What a RemoteModule asks of the worker that has its module. Every function here runs on that worker.

They are functions of a module, so that they travel by name; `allow` has to name this module where it is set.
A module itself never travels back: callers get values, or RRefs to what stays here.

Callers are peers: an argument of any other type than annotated, or of a subclass, is a RefusedError. Where
`allow` is set, it also limits what a caller has this worker call (a module's class, the function of `apply`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.errors import ConfigError, ConfigTypeError, RefusedError
from weft.rpc import api, registry
from weft.rpc.message_forms import is_named, need
from weft.rpc.rref import local_value_of
from weft.rpc.tensor_memory import shares_elements
from weft.tensors.tree import map_tensors

_NONE = type(None)
# Methods that change a module in place, and the types of their arguments: those in order, and those by name.
# A caller may name these only, not any attribute. `apply` takes a function, `compile` anything.
CHANGES: Mapping[str, tuple[tuple[tuple[type, ...], ...], Mapping[str, tuple[type, ...]]]] = {
    "apply": (((object,),), {}),
    "bfloat16": ((), {}),
    "compile": ((), {}),
    "double": ((), {}),
    "float": ((), {}),
    "half": ((), {}),
    "requires_grad_": (((bool,),), {}),
    "to": (
        ((str, _NONE), (torch.dtype, _NONE), (bool,)),
        {"memory_format": (torch.memory_format, _NONE)},
    ),
    "to_empty": ((), {"device": (str,), "recurse": (bool,)}),
    "train": (((bool,),), {}),
    "zero_grad": (((bool,),), {}),
}

# A module of any other device gets its inputs moved there, and its outputs moved back to the CPU.
_STATIONARY = ("cpu", "meta")


def create_module(
    module_cls: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str
) -> nn.Module:
    """Build the module and move it to its device."""
    need(
        type(args) is tuple and is_named(kwargs) and type(device) is str, "the arguments of a module's class"
    )
    _check_call(module_cls)
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
    are_flags = type(is_device_map_set) is bool and type(is_grad_enabled) is bool
    need(type(device) is str and are_flags and type(args) is tuple and is_named(kwargs), "a forward")
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
    if type(method) is not str or method not in CHANGES:
        raise RefusedError(
            f"RemoteModule: {method!r} is not among what a caller may change: {sorted(CHANGES)}."
        )
    need(type(args) is tuple and is_named(kwargs), "a change of a module")
    if method == "apply" and len(args) == 1:
        _check_call(args[0])
    is_limited = registry.current_agent().packer.fence is not None
    if method == "compile" and is_limited and (args or kwargs):
        raise RefusedError(
            "RemoteModule: compile takes no options on a worker with `allow`: they name compilers and files."
        )
    if method not in ("apply", "compile"):
        kinds, named = CHANGES[method]
        need(len(args) == len(kinds) and kwargs.keys() <= named.keys(), f"the arguments of {method}")
        pairs = [*zip(args, kinds, strict=True), *((kwargs[name], named[name]) for name in kwargs)]
        need(all(type(value) in types for value, types in pairs), f"the arguments of {method}")
    module = _module_of(module_rref)
    getattr(module, method)(*args, **kwargs)
    if method == "to_empty" and is_limited:
        # Memory that is not written to still has what this process had in it: tensors, or keys.
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.zero_()


def list_parameters(
    module_rref: api.RRef[nn.Module], prefix: str, recurse: bool, remove_duplicate: bool
) -> list[tuple[str, api.RRef[nn.Parameter]]]:
    """RRefs to the parameters, and their names."""
    _check_listing(prefix, recurse, remove_duplicate)
    found = _module_of(module_rref).named_parameters(prefix, recurse, remove_duplicate)
    return [(name, api.RRef(param)) for name, param in found]


def list_buffers(
    module_rref: api.RRef[nn.Module], prefix: str, recurse: bool, remove_duplicate: bool
) -> list[tuple[str, api.RRef[Tensor]]]:
    """RRefs to the buffers, and their names."""
    _check_listing(prefix, recurse, remove_duplicate)
    found = _module_of(module_rref).named_buffers(prefix, recurse, remove_duplicate)
    return [(name, api.RRef(buffer)) for name, buffer in found]


def find_parameter(module_rref: api.RRef[nn.Module], target: str) -> api.RRef[nn.Parameter]:
    """An RRef to one parameter."""
    module = _module_of(module_rref)
    return api.RRef(module.get_parameter(_check_path(module, target)))


def find_buffer(module_rref: api.RRef[nn.Module], target: str) -> api.RRef[Tensor]:
    """An RRef to one buffer."""
    module = _module_of(module_rref)
    return api.RRef(module.get_buffer(_check_path(module, target)))


def find_submodule(module_rref: api.RRef[nn.Module], target: str) -> api.RRef[nn.Module]:
    """An RRef to a module within the module."""
    module = _module_of(module_rref)
    return api.RRef(module.get_submodule(_check_path(module, target)))


def read_gradients(
    module_rref: api.RRef[nn.Module], recurse: bool, is_device_map_set: bool
) -> dict[str, Tensor | None]:
    """What `grad` of each parameter holds; None where there is none."""
    need(type(recurse) is bool and type(is_device_map_set) is bool, "a request for gradients")
    params = _module_of(module_rref).named_parameters(recurse=recurse)
    return {name: _ready_to_send(param.grad, is_device_map_set) for name, param in params}


def read_state(module_rref: api.RRef[nn.Module], prefix: str, is_device_map_set: bool) -> dict[str, Any]:
    """The module's state_dict, its metadata included."""
    need(type(prefix) is str and type(is_device_map_set) is bool, "a request for a state")
    state = _module_of(module_rref).state_dict(prefix=prefix)
    for key, value in state.items():
        state[key] = _ready_to_send(value, is_device_map_set)
    return state


def load_state(
    module_rref: api.RRef[nn.Module], state: dict[str, Any], strict: bool, assign: bool, device: str
) -> tuple[list[str], list[str]]:
    """Load a state_dict into the module; the keys that were missing, and those that were too many."""
    are_flags = type(strict) is bool and type(assign) is bool
    is_state = type(state) in (dict, OrderedDict) and all(type(key) is str for key in state)
    need(is_state and are_flags and type(device) is str, "a state to load")
    if assign and registry.current_agent().packer.fence is not None:
        # They become parameters: each element needs memory of its own.
        for key, value in state.items():
            state[key] = map_tensors(_written_out, value)
    if assign and device != "meta":
        # These become the parameters. They came to the CPU, or to where the device map says.
        for key, value in state.items():
            state[key] = map_tensors(lambda tensor: tensor.to(device), value)
    # As plain data: a caller that restricts what peers may name can't be sent torch's own class.
    missing, unexpected = _module_of(module_rref).load_state_dict(state, strict=strict, assign=assign)
    return missing, unexpected


def _module_of(module_rref: api.RRef[nn.Module]) -> nn.Module:
    """The module; its constructor's error, where that failed."""
    module = local_value_of(module_rref)
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigTypeError(
            f"RemoteModule: module_rref is an RRef to a {type(module).__name__}; it must be one to a module."
        )
    return module


def _check_call(function: object) -> None:
    """Refuse a function, given as an argument to be called here, that `allow` does not list."""
    registry.current_agent().packer.check_call(function)


def _check_listing(prefix: object, recurse: object, remove_duplicate: object) -> None:
    are_flags = type(recurse) is bool and type(remove_duplicate) is bool
    need(type(prefix) is str and are_flags, "a request for parameters or buffers")


def _check_path(module: nn.Module, target: object) -> str:
    """The path of a parameter, a buffer or a module in a module, as `named_parameters` gives it.

    torch follows it by attributes: where `allow` is set, only to what is registered, past properties.
    """
    parts = target.split(".") if type(target) is str else ["__"]
    need(not any(part.startswith("__") for part in parts), "the path of a part of a module")
    if registry.current_agent().packer.fence is not None and target:
        *path, name = parts
        for part in path:
            if part not in module._modules:
                raise AttributeError(f"{type(module).__name__} has no module '{part}'")
            module = cast(nn.Module, module._modules[part])
        if not any(name in held for held in (module._modules, module._parameters, module._buffers)):
            raise AttributeError(f"{type(module).__name__} has no part '{name}'")
    return cast(str, target)


def _written_out(tensor: Tensor) -> Tensor:
    return tensor.contiguous() if shares_elements(tensor) else tensor


def _ready_to_send(value: Any, is_device_map_set: bool) -> Any:
    return value if is_device_map_set else map_tensors(lambda tensor: tensor.cpu(), value)

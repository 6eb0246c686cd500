"""The methods of nn.Module that a RemoteModule can't have, and what to use in their place.

All of them would look at the stand-in, or change it, where the module was meant: the stand-in has no
parameters, no submodules and no hooks of its own. What would do nothing, or half of the work, raises.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from weft.errors import UnsupportedError

_PARTS = (
    "Use get_submodule(name), which gives a RemoteModule. A module that holds a RemoteModule can't go "
    "through all of its parts, since their tensors are on two workers. Take the parameters of the local "
    "parts, and remote_parameters() of this one."
)
_ADDING = (
    "Send a function that adds it on the worker that has the module: weft.rpc.rpc_sync(remote.on, function, "
    "args=(remote.get_module_rref(), ...)), which finds the module as rref.local_value()."
)
_HOOKS = (
    "Send a function that registers the hook on the worker that has the module: weft.rpc.rpc_sync(remote.on, "
    "function, args=(remote.get_module_rref(),)). Hooks that are registered there run in every forward."
)
_CONVERTING = (
    "A module that holds a RemoteModule can't be moved or cast as one, since its tensors are on two "
    "workers. Call to, half and the like of the local parts, and of this one."
)
_DEVICES = "Use to(device)."


def refuse(method: str, remedy: str) -> NoReturn:
    """Raise torch's error for a method that is not there, and say what is."""
    raise UnsupportedError(f"Method ``{method}`` not supported for RemoteModule. {remedy}")


def _refused(method: str, remedy: str) -> Any:
    def refused(self: nn.Module, *args: object, **kwargs: object) -> NoReturn:
        refuse(method, remedy)

    refused.__name__ = method
    refused.__doc__ = f"Raises UnsupportedError. {remedy}"
    return refused


class Refusals(nn.Module):
    """A module that refuses what makes no sense for one that stands for another worker's module."""

    register_buffer: Any = _refused("register_buffer", _ADDING)
    register_parameter: Any = _refused("register_parameter", _ADDING)
    add_module: Any = _refused("add_module", _ADDING)
    register_module: Any = _refused("register_module", _ADDING)

    children: Any = _refused("children", _PARTS)
    named_children: Any = _refused("named_children", _PARTS)
    modules: Any = _refused("modules", _PARTS)
    named_modules: Any = _refused("named_modules", _PARTS)

    _apply: Any = _refused("_apply", _CONVERTING)
    type: Any = _refused("type", "Use to(dtype), or float, double, half, bfloat16.")
    ipu: Any = _refused("ipu", _DEVICES)
    mtia: Any = _refused("mtia", _DEVICES)
    xpu: Any = _refused("xpu", _DEVICES)
    share_memory: Any = _refused("share_memory", "Processes share it as it is: send them the RemoteModule.")

    register_forward_pre_hook: Any = _refused("register_forward_pre_hook", _HOOKS)
    register_forward_hook: Any = _refused("register_forward_hook", _HOOKS)
    register_backward_hook: Any = _refused("register_backward_hook", _HOOKS)
    register_full_backward_pre_hook: Any = _refused("register_full_backward_pre_hook", _HOOKS)
    register_full_backward_hook: Any = _refused("register_full_backward_hook", _HOOKS)
    register_state_dict_pre_hook: Any = _refused("register_state_dict_pre_hook", _HOOKS)
    register_state_dict_post_hook: Any = _refused("register_state_dict_post_hook", _HOOKS)
    _register_state_dict_hook: Any = _refused("_register_state_dict_hook", _HOOKS)
    register_load_state_dict_pre_hook: Any = _refused("register_load_state_dict_pre_hook", _HOOKS)
    _register_load_state_dict_pre_hook: Any = _refused("_register_load_state_dict_pre_hook", _HOOKS)
    register_load_state_dict_post_hook: Any = _refused("register_load_state_dict_post_hook", _HOOKS)

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module would take these for parts of the stand-in.
        if isinstance(value, nn.Parameter):
            refuse("register_parameter", _ADDING)
        if isinstance(value, nn.Buffer):
            refuse("register_buffer", _ADDING)
        if isinstance(value, nn.Module):
            refuse("add_module", _ADDING)
        super().__setattr__(name, value)

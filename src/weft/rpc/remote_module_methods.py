"""What can be asked of a module on another worker, under the names that nn.Module has for it.

Each method is one call to the worker that has the module. What comes back is a copy, or an RRef to what
stays there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.modules.module import _IncompatibleKeys

from weft.errors import ConfigError, ConfigTypeError
from weft.rpc import api
from weft.rpc import remote_module_owner as owner
from weft.rpc.fenced_unpickler import sealed
from weft.rpc.remote_module_refusals import Refusals, refuse
from weft.tensors.tree import map_tensors


@sealed
class RemoteMethods(Refusals):
    """The methods of a RemoteModule. Making one, and sending it, is remote_module.py's work."""

    on: str | int
    """The worker that has the module: its name, or its id where it was given by rank."""
    device: str
    """The module's device on that worker."""
    is_device_map_set: bool
    """Whether GPU tensors can be sent to that worker and back."""
    module_rref: api.RRef[nn.Module]
    forward_async: Callable[..., Future[Any]]
    """Start forward and return a future of its output."""

    # Parameters and buffers

    def remote_parameters(self, recurse: bool = True) -> list[api.RRef[nn.Parameter]]:
        """RRefs to the module's parameters, for a distributed optimizer, say."""
        return [param for _, param in self._ask(owner.list_parameters, "", recurse, True)]

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """RRefs to the module's parameters. A local optimizer refuses these: it could only change copies."""
        return iter(self.remote_parameters(recurse))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """Names of the module's parameters, and RRefs to them."""
        return iter(self._ask(owner.list_parameters, prefix, recurse, remove_duplicate))

    def buffers(self, recurse: bool = True) -> Iterator[Any]:
        """RRefs to the module's buffers."""
        return (buffer for _, buffer in self._ask(owner.list_buffers, "", recurse, True))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """Names of the module's buffers, and RRefs to them."""
        return iter(self._ask(owner.list_buffers, prefix, recurse, remove_duplicate))

    def get_parameter(self, target: str) -> Any:
        """An RRef to one of the module's parameters."""
        return self._ask(owner.find_parameter, target)

    def get_buffer(self, target: str) -> Any:
        """An RRef to one of the module's buffers."""
        return self._ask(owner.find_buffer, target)

    def remote_gradients(self, recurse: bool = True) -> dict[str, Tensor | None]:
        """Copies of the parameters' gradients (what `grad` holds) by name; None where there is none."""
        return self._ask(owner.read_gradients, recurse, self.is_device_map_set)

    # State

    # Positional arguments, that nn.Module warns about, are not taken.
    def state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Copies of the module's state: CPU tensors, or where the device map for its worker says."""
        if keep_vars:
            refuse(
                "state_dict(keep_vars=True)", "The variables are on another worker; use remote_parameters()."
            )
        state = self._ask(owner.read_state, prefix, self.is_device_map_set)
        if destination is None:
            return state
        destination.update(state)
        # Absent where the destination is a plain dict.
        getattr(destination, "_metadata", {}).update(getattr(state, "_metadata", {}))
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Send a state to the module. Returns the keys that were missing or too many, as nn.Module does."""
        if not isinstance(state_dict, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigTypeError(f"Expected state_dict to be dict-like, got {type(state_dict)}.")
        state = OrderedDict((key, self._ready_to_send(value)) for key, value in state_dict.items())
        if hasattr(state_dict, "_metadata"):
            state._metadata = state_dict._metadata  # pyright: ignore[reportAttributeAccessIssue]
        missing, unexpected = self._ask(owner.load_state, state, strict, assign, self.device)
        return _IncompatibleKeys(missing, unexpected)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load this module's part of a state: nn.Module's way to load what a module holds."""
        own = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        assign = local_metadata.get("assign_to_params_buffers", False)
        keys = self.load_state_dict(own, strict=False, assign=assign)
        missing_keys.extend(prefix + key for key in keys.missing_keys)
        unexpected_keys.extend(prefix + key for key in keys.unexpected_keys)

    # Changes in place

    def train(self, mode: bool = True) -> Self:
        """Set the module's mode. `training` here is the mode that was set through this RemoteModule last."""
        if not isinstance(mode, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"training mode is expected to be boolean, but it is {mode!r}.")
        self._change("train", mode)
        self.training = mode
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Say whether autograd records operations on the module's parameters."""
        return self._change("requires_grad_", bool(requires_grad))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the module's parameters."""
        self._change("zero_grad", bool(set_to_none))

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call `fn` with each of the module's submodules, on its worker. What `fn` holds is a copy there."""
        if not callable(fn):
            raise ConfigTypeError(
                f"Method ``apply`` not supported for RemoteModule with a {type(fn)}: "
                "fn must be a function of a module."
            )
        return self._change("apply", fn)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module on its worker, as nn.Module.compile does."""
        self._change("compile", *args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the module to another device of its worker, or change its dtype."""
        # The same parser as nn.Module.to, so that all of its forms mean the same here.
        parse: Any = torch._C._nn._parse_to  # pyright: ignore[reportAttributeAccessIssue]
        device, dtype, non_blocking, memory_format = parse(*args, **kwargs)
        device = None if device is None else str(device)
        self._change("to", device, dtype, non_blocking, memory_format=memory_format)
        return self if device is None else self._note_device(device)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """Move the module to another device of its worker, with memory that nothing was written to."""
        place = str(torch.device(device))
        self._change("to_empty", device=place, recurse=bool(recurse))
        return self._note_device(place)

    def cpu(self) -> Self:
        """Move the module to its worker's CPU."""
        return self.to("cpu")

    def cuda(self, device: int | str | torch.device | None = None) -> Self:
        """Move the module to one of its worker's GPUs."""
        place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        if place.type != "cuda":
            raise ConfigError(f"RemoteModule.cuda: {place} is no CUDA device. Use to('{place}').")
        return self.to(place)

    def float(self) -> Self:
        """Cast the module's floating point tensors to float32."""
        return self._change("float")

    def double(self) -> Self:
        """Cast the module's floating point tensors to float64."""
        return self._change("double")

    def half(self) -> Self:
        """Cast the module's floating point tensors to float16."""
        return self._change("half")

    def bfloat16(self) -> Self:
        """Cast the module's floating point tensors to bfloat16."""
        return self._change("bfloat16")

    def extra_repr(self) -> str:
        """Where the module is."""
        return f"on={self.on!r}, device={self.device!r}"

    # How it is done

    def _note_device(self, device: str) -> Self:
        self.device = device
        self._install_forward()
        return self

    def _install_forward(self) -> None:
        """Give this object its forward_async and forward.

        They hold the RRef and not this object. Bound methods would be a cycle, and the module would stay
        on its worker until the garbage collector has come by here.
        """
        target = (self.module_rref, self.device, self.is_device_map_set)
        for name, function in (("forward_async", start_forward), ("forward", wait_forward)):
            # A subclass may have its own.
            if getattr(type(self), name, None) is getattr(nn.Module, name, None):
                setattr(self, name, partial(function, *target))

    def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        return api.rpc_sync(self.module_rref.owner(), function, args=(self.module_rref, *args))

    def _change(self, method: str, *args: Any, **kwargs: Any) -> Self:
        self._ask(owner.change_module, method, args, kwargs)
        return self

    def _ready_to_send(self, value: Any) -> Any:
        if self.is_device_map_set:
            return map_tensors(lambda tensor: tensor.detach(), value)
        return map_tensors(lambda tensor: tensor.detach().cpu(), value)


def start_forward(
    module_rref: api.RRef[nn.Module], device: str, is_device_map_set: bool, /, *args: Any, **kwargs: Any
) -> Future[Any]:
    """Start forward on the module's worker."""
    target = (module_rref, device, is_device_map_set, torch.is_grad_enabled())
    return api.rpc_async(module_rref.owner(), *_ask_forward(target, args, kwargs))


def wait_forward(
    module_rref: api.RRef[nn.Module], device: str, is_device_map_set: bool, /, *args: Any, **kwargs: Any
) -> Any:
    """Run forward on the module's worker."""
    target = (module_rref, device, is_device_map_set, torch.is_grad_enabled())
    return api.rpc_sync(module_rref.owner(), *_ask_forward(target, args, kwargs))


def _ask_forward(
    target: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The call that runs forward. Arguments travel fastest side by side."""
    if kwargs:
        return owner.run_forward, (*target, args, kwargs)
    return owner.run_plain_forward, (*target, *args)

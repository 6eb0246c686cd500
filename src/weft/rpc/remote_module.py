"""RemoteModule: a module that lives on another worker, used like one that is here.

A RemoteModule stands for the module: it holds an RRef to it and no tensors. Whatever is asked of it is one
call to the worker that has the module (remote_module_methods.py), where remote_module_owner.py answers. What
can't be asked is in remote_module_refusals.py. Here one is made, sent and received.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import nn

from weft.errors import ConfigError, RefusedError, StateError, UnsupportedError
from weft.rpc import api, registry
from weft.rpc import remote_module_owner as owner
from weft.rpc.packing import under_way
from weft.rpc.remote_module_methods import RemoteMethods
from weft.rpc.remote_module_place import Place, parse_place

_log = logging.getLogger(__name__)

_REMOTE_MODULE_PICKLED_ATTRIBUTES = (
    "on",
    "device",
    "is_device_map_set",
    "is_scriptable",
    "module_rref",
    "training",
)
# What every nn.Module has, and what is made anew wherever a RemoteModule arrives.
_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING = (*vars(nn.Module()), "forward_async", "forward")


class RemoteModule(RemoteMethods):
    """Make `module_cls(*args, **kwargs)` on another worker, and stand for it here.

    `remote_device` is "worker1", "worker1/cuda:0" or "rank:1/cuda:0"; the device is the CPU unless given, and
    the worker is this one where only a device is given. The module is made in the background: an error of its
    constructor is raised by the first call that needs the module.

    Can be sent to other workers in calls; they then share the module. Raises RefusedError (an AssertionError)
    before init_rpc. Every method that asks the worker raises what the module raised there, PeerError when
    that worker is gone, PeerTimeoutError past the default timeout.
    """

    is_scriptable: bool
    """Always False: weft's remote calls can't be made from TorchScript."""

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        _module_interface_cls: Any = None,
    ) -> None:
        super().__init__()
        _check_interface(_module_interface_cls)
        on, device = _locate(parse_place(remote_device))
        arguments = (module_cls, tuple(args or ()), dict(kwargs or {}), device)
        self._settle(on, device, api.remote(on, owner.create_module, args=arguments))

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: api.RRef[nn.Module], _module_interface_cls: Any = None
    ) -> RemoteModule:
        """Stand for a module that exists: on the RRef's owner, on the device that `remote_device` names."""
        _check_interface(_module_interface_cls)
        _, device = _locate(parse_place(remote_device))
        return _stand_for(module_rref, device)

    def get_module_rref(self) -> api.RRef[nn.Module]:
        """The RRef to the module."""
        return self.module_rref

    def get_submodule(self, target: str) -> RemoteModule:
        """A RemoteModule that stands for a module within the module."""
        return _stand_for(self._ask(owner.find_submodule, target), self.device)

    def _settle(self, on: str | int, device: str, module_rref: api.RRef[nn.Module]) -> None:
        """Note where the module is, and make the forward that fits."""
        self.on = on
        self.device = device
        self.is_device_map_set = _has_device_map(module_rref)
        self.is_scriptable = False
        self.module_rref = module_rref
        self._install_forward()

    def __getattr__(self, name: str) -> Any:
        # One that was received has only what travelled. The rest of a module is made when something asks for
        # it: a call, say.
        if "_modules" not in self.__dict__:
            received = dict(self.__dict__)
            nn.Module.__init__(self)
            self.__dict__.update(received)
            return getattr(self, name)
        return super().__getattr__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        if under_way.cargo is None:
            raise UnsupportedError(
                "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using "
                "RPC. To save what it stands for, save its state_dict()."
            )
        known = {*_REMOTE_MODULE_PICKLED_ATTRIBUTES, *_REMOTE_MODULE_ATTRIBUTES_IGNORE_FOR_PICKLING}
        for name in vars(self).keys() - known:
            _log.error("The new attribute ``%s`` of RemoteModule is ignored during RPC pickling.", name)
        values = (getattr(self, name) for name in _REMOTE_MODULE_PICKLED_ATTRIBUTES)
        return receive_remote_module, (type(self), *values)


def receive_remote_module(cls: type[RemoteModule], *values: Any) -> RemoteModule:
    """Make a RemoteModule of the parts that a message has. Raises RefusedError for parts of other types."""
    is_right = isinstance(cast(object, cls), type) and issubclass(cast(type, cls), RemoteModule)
    is_right = is_right and len(values) == len(_REMOTE_MODULE_PICKLED_ATTRIBUTES)
    on, device, *flags, module_rref, is_training = values if is_right else (None,) * 6
    is_right = is_right and type(on) in (str, int) and type(device) is str
    is_right = is_right and [*map(type, flags), type(is_training)] == [bool] * 3
    if not is_right or type(module_rref) is not api.RRef:
        raise RefusedError(
            "a peer sent a RemoteModule whose parts are not of the types that weft's workers send. All "
            "workers must run the same version of weft."
        )
    remote_module = object.__new__(cls)
    remote_module.__dict__.update(zip(_REMOTE_MODULE_PICKLED_ATTRIBUTES, values, strict=True))
    # Device maps are between two workers, and this is another than the one that sent it.
    remote_module.is_device_map_set = _has_device_map(remote_module.module_rref)
    remote_module._install_forward()
    return remote_module


def _stand_for(module_rref: api.RRef[nn.Module], device: str) -> RemoteModule:
    remote_module = object.__new__(RemoteModule)
    nn.Module.__init__(remote_module)
    remote_module._settle(module_rref.owner_name(), device, module_rref)
    return remote_module


def _locate(place: Place) -> tuple[str | int, str]:
    """The worker and the device, as RemoteModule has them."""
    try:
        here = api.get_worker_info()
    except StateError as error:
        raise RefusedError("RemoteModule only works in RPC. Call weft.rpc.init_rpc first.") from error
    return here.name if place.worker is None else place.worker, str(place.device)


def _has_device_map(module_rref: api.RRef[nn.Module]) -> bool:
    """Whether GPU tensors can be sent to the module's worker, and back from it."""
    return bool(registry.current_agent().directory.find(module_rref.owner()).calling.device_map)


def _check_interface(interface: Any) -> None:
    if interface is None:
        return
    if not getattr(interface, "__torch_script_interface__", False):
        raise ConfigError(
            f"module_interface_cls {interface} must be a type object decorated by @torch.jit.interface"
        )
    raise UnsupportedError(
        f"RemoteModule: _module_interface_cls={interface.__name__} asks for a RemoteModule in TorchScript, "
        "and weft's remote calls can't be made from there. Leave it out: the remote module itself may be a "
        "scripted one."
    )

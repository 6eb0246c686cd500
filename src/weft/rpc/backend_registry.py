"""Backends by name, as torch has them. weft's own stands under the name of torch's, TENSORPIPE."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from weft.errors import ConfigTypeError, UnfitError
from weft.rpc import constants
from weft.rpc.joining import join_group
from weft.rpc.options import TensorPipeRpcBackendOptions, resolve_options


class BackendValue(NamedTuple):
    """How a backend's options and its agent are made."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


def _named(self: enum.Enum) -> str:
    return f"BackendType.{self.name}"


def _make_type(members: dict[str, BackendValue]) -> Any:
    backend_type = enum.Enum("BackendType", members, module=__name__)
    backend_type.__repr__ = _named
    backend_type.__doc__ = "The backends that there are. A new type is made when one is registered."
    return backend_type


def backend_registered(backend_name: str) -> bool:
    """Whether there is a backend of this name."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Add a backend; the new member of BackendType, which is another type from now on."""
    global BackendType
    if backend_registered(backend_name):
        raise UnfitError(f"RPC backend {backend_name}: already registered")
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = _make_type({backend_name: value, **{member.name: member.value for member in BackendType}})
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """The options of a backend."""
    return backend.value.construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """The agent of a backend."""
    return backend.value.init_backend_handler(*args, **kwargs)


def _construct_own_options(
    rpc_timeout: float, init_method: str, **kwargs: Any
) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def is_own_options(options: object) -> bool:
    """Whether options are weft's, or torch's of the same name, which hold the same things."""
    return isinstance(options, TensorPipeRpcBackendOptions) or (
        type(options).__name__ == TensorPipeRpcBackendOptions.__name__
        and hasattr(options, "num_worker_threads")
    )


def _init_own(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: Any, **_: Any
) -> Any:
    if not is_own_options(rpc_backend_options):
        raise ConfigTypeError(
            "`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, not a "
            f"{type(rpc_backend_options).__name__}."
        )
    return join_group(store, name, rank, world_size or None, resolve_options(rpc_backend_options))


BackendType: Any = _make_type({"TENSORPIPE": BackendValue(_construct_own_options, _init_own)})

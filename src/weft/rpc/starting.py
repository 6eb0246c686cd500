"""`init_rpc`: make this process (or this thread, where ranks are threads) a worker."""

from __future__ import annotations

from typing import Any

from weft import rank_thread
from weft.errors import ConfigTypeError, StateError
from weft.rpc import api, backend_registry, registry
from weft.rpc.joining import open_store
from weft.rpc.options import RpcBackendOptions
from weft.rpc.workers import check_name
from weft.torch_private import check_torch


def is_available() -> bool:
    """Whether RPC can be used: always."""
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Make this process a worker, ready to call and to be called.

    `name`: letters, digits, '-', '_' and ':', another one for each worker. `rank`: the worker's id.
    `world_size`: how many workers there are; the call returns when all of them are there. Both may be left
    out inside launch() and under torchrun. Without a world size, workers join and leave at will.
    `rpc_backend_options`: a TensorPipeRpcBackendOptions.

    Raises PeerTimeoutError when workers don't come within the options' rpc_timeout, and ConfigError or
    StateError for arguments that can't work. Nothing is left behind then.
    """
    check_torch()
    backend, options = _resolve_backend(backend, rpc_backend_options)
    _check_free()
    check_name(name)
    store, rank, world_size = open_store(options.init_method, rank, world_size)
    registry.keep(options.init_method, store)
    _init_rpc_backend(backend, store, name, rank, world_size, options)


def _resolve_backend(backend: Any, options: Any) -> tuple[Any, Any]:
    types = backend_registry.BackendType
    if backend is not None and not isinstance(backend, types):
        raise ConfigTypeError(f"Argument backend must be a member of BackendType, not {backend!r}.")
    is_own = backend_registry.is_own_options(options)
    if options is not None and not isinstance(options, RpcBackendOptions) and not is_own:
        raise ConfigTypeError(
            f"Argument rpc_backend_options must be an instance of RpcBackendOptions, not {options!r}."
        )
    if backend is None and options is not None and not is_own:
        fitting = [
            member
            for member in types
            if isinstance(options, type(backend_registry.construct_rpc_backend_options(member)))
        ]
        if not fitting:
            raise ConfigTypeError(f"Could not infer backend for options {options!r}. Give backend=.")
        backend = fitting[0]
    backend = types.TENSORPIPE if backend is None else backend
    return backend, backend_registry.construct_rpc_backend_options(backend) if options is None else options


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: str = "",
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Join the group that meets at a store."""
    _check_free()
    agent = backend_registry.init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    api._set_and_start_rpc_agent(agent)


def _check_free() -> None:
    agent = registry.own_agent() if rank_thread.is_rank() else registry.find_agent()
    if agent is not None:
        raise StateError(
            f"RPC is already initialized: this worker is {agent.info}. Call rpc.shutdown() to begin anew."
        )

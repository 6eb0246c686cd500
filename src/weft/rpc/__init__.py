"""Remote calls, references to remote values, and modules that live elsewhere."""

from weft.rpc import api, backend_registry, constants, functions
from weft.rpc.agent import Agent
from weft.rpc.agent import Agent as RpcAgent
from weft.rpc.agent import Agent as TensorPipeAgent
from weft.rpc.api import (
    _get_current_rpc_agent,
    _is_current_rpc_agent_set,
    _set_rpc_timeout,
    _wait_all,
    get_rpc_timeout,
    get_worker_info,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from weft.rpc.backend_registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from weft.rpc.debugging import _get_debug_info, _rref_context_get_debug_info, enable_gil_profiling
from weft.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from weft.rpc.remote_module import RemoteModule
from weft.rpc.rref import RRef
from weft.rpc.rref import RRef as PyRRef
from weft.rpc.starting import _init_rpc_backend, init_rpc, is_available
from weft.rpc.workers import WorkerInfo

__all__ = [
    "Agent",
    "BackendType",
    "BackendValue",
    "PyRRef",
    "RRef",
    "RemoteModule",
    "RpcAgent",
    "RpcBackendOptions",
    "TensorPipeAgent",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "_get_current_rpc_agent",
    "_get_debug_info",
    "_init_rpc_backend",
    "_is_current_rpc_agent_set",
    "_rref_context_get_debug_info",
    "_set_rpc_timeout",
    "_wait_all",
    "api",
    "backend_registered",
    "backend_registry",
    "constants",
    "construct_rpc_backend_options",
    "enable_gil_profiling",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "is_available",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

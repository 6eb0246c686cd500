"""Loading at first use: public names load their modules, backend "weft" its code with its first group.

A process that trains with DDP alone loads neither RPC nor DTensor, and `import weft` costs little beyond
torch's own import.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

# Module -> its names that weft has at its top; tests/repo compares them with `weft.__all__`.
HOMES = {
    "weft.comm": "Handle desync_check record",
    "weft.comm_hooks": "GradBucket",
    "weft.data_parallel": "DistributedDataParallel replicate",
    "weft.dist_autograd": "DistributedOptimizer",
    "weft.errors": (
        "BackwardError ConfigError ConfigTypeError DesyncError InternalError LaunchError "
        "LaunchTimeoutError PeerError PeerTimeoutError RefusedError StateError TamperedError UnfitError "
        "UnsupportedError WeftError"
    ),
    "weft.fsdp": (
        "CPUOffloadPolicy DataParallelMeshDims FSDPModule MixedPrecisionPolicy OffloadPolicy UnshardHandle "
        "fully_shard register_fsdp_forward_method replicate_with_fsdp share_comm_ctx"
    ),
    "weft.launcher": "World init launch",
    "weft.local": "LocalGroup",
    "weft.optimizers": (
        "PostLocalSGDOptimizer ZeroRedundancyOptimizer clip_grad_norm_ clip_grads_with_norm_ get_total_norm"
    ),
    "weft.rpc": "RemoteModule",
    "weft.training": "Trainer",
}
_HOME_OF = {name: home for home, names in HOMES.items() for name in names.split()}


def load(name: str) -> Any:
    """The value of `weft.name` at its first use: a public name, or a part of weft such as `weft.rpc`."""
    home = _HOME_OF.get(name)
    if home is not None:
        value = getattr(importlib.import_module(home), name)
        setattr(sys.modules["weft"], name, value)  # from now on without this function
        return value
    # Not private names: pickle and inspect ask every module for some.
    if not name.startswith("_") and importlib.util.find_spec(f"weft.{name}") is not None:
        return importlib.import_module(f"weft.{name}")
    raise AttributeError(f"module 'weft' has no attribute '{name}'")


def register_backend(name: str, make_group: Callable[..., Any]) -> None:
    """Let `init_process_group(name)` call `make_group(options, backend_options)`. Harmless when repeated."""
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, make_group, extended_api=True, devices=["cpu", "cuda"])
        # torch 2.15 attaches its flight recorder to the groups of every backend outside this set, and fails
        # with "ProcessGroup name not set" on a group written in Python. weft.comm keeps a record of its own.
        getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set[str]()).add(name)


def _make_local_group(options: Any, backend_options: object = None) -> Any:
    return load("local").create_local_group(options, backend_options)


register_backend("weft", _make_local_group)

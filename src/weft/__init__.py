"""weft: distributed training for PyTorch, in Python that people can read and change."""

from weft import comm, comm_hooks, join, optimizers
from weft.comm import Handle, desync_check, record
from weft.comm_hooks import GradBucket
from weft.data_parallel import DistributedDataParallel, replicate
from weft.errors import (
    ConfigError,
    ConfigTypeError,
    DesyncError,
    InternalError,
    LaunchError,
    LaunchTimeoutError,
    PeerError,
    PeerTimeoutError,
    StateError,
    UnfitError,
    WeftError,
)
from weft.launcher import World, init, launch
from weft.local import LocalGroup
from weft.optimizers import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

__all__ = [
    "ConfigError",
    "ConfigTypeError",
    "DesyncError",
    "DistributedDataParallel",
    "GradBucket",
    "Handle",
    "InternalError",
    "LaunchError",
    "LaunchTimeoutError",
    "LocalGroup",
    "PeerError",
    "PeerTimeoutError",
    "PostLocalSGDOptimizer",
    "StateError",
    "UnfitError",
    "WeftError",
    "World",
    "ZeroRedundancyOptimizer",
    "comm",
    "comm_hooks",
    "desync_check",
    "init",
    "join",
    "launch",
    "optimizers",
    "record",
    "replicate",
]

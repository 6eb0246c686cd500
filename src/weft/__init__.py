"""weft: distributed training for PyTorch, in Python that people can read and change.

`import weft` loads no more than c10d needs to know backend "weft": a public name brings its module when it is
first used (first_use.py), so that a job loads what it uses.
"""

from typing import TYPE_CHECKING

from weft import first_use
from weft.version import __version__

if TYPE_CHECKING:
    from weft import comm, comm_hooks, dist_autograd, fsdp, join, optimizers, rpc, tensor_parallel
    from weft.comm import Handle, desync_check, record
    from weft.comm_hooks import GradBucket
    from weft.data_parallel import DistributedDataParallel, replicate
    from weft.dist_autograd import DistributedOptimizer
    from weft.errors import (
        BackwardError,
        ConfigError,
        ConfigTypeError,
        DesyncError,
        InternalError,
        LaunchError,
        LaunchTimeoutError,
        PeerError,
        PeerTimeoutError,
        RefusedError,
        StateError,
        TamperedError,
        UnfitError,
        UnsupportedError,
        WeftError,
    )
    from weft.fsdp import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        UnshardHandle,
        fully_shard,
        register_fsdp_forward_method,
        replicate_with_fsdp,
        share_comm_ctx,
    )
    from weft.launcher import World, init, launch
    from weft.local import LocalGroup
    from weft.optimizers import (
        PostLocalSGDOptimizer,
        ZeroRedundancyOptimizer,
        clip_grad_norm_,
        clip_grads_with_norm_,
        get_total_norm,
    )
    from weft.rpc import RemoteModule
    from weft.training import Trainer

__all__ = [
    "BackwardError",
    "CPUOffloadPolicy",
    "ConfigError",
    "ConfigTypeError",
    "DataParallelMeshDims",
    "DesyncError",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "FSDPModule",
    "GradBucket",
    "Handle",
    "InternalError",
    "LaunchError",
    "LaunchTimeoutError",
    "LocalGroup",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "PeerError",
    "PeerTimeoutError",
    "PostLocalSGDOptimizer",
    "RefusedError",
    "RemoteModule",
    "StateError",
    "TamperedError",
    "Trainer",
    "UnfitError",
    "UnshardHandle",
    "UnsupportedError",
    "WeftError",
    "World",
    "ZeroRedundancyOptimizer",
    "__version__",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "comm",
    "comm_hooks",
    "desync_check",
    "dist_autograd",
    "fsdp",
    "fully_shard",
    "get_total_norm",
    "init",
    "join",
    "launch",
    "optimizers",
    "record",
    "register_fsdp_forward_method",
    "replicate",
    "replicate_with_fsdp",
    "rpc",
    "share_comm_ctx",
    "tensor_parallel",
]

__getattr__ = first_use.load


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

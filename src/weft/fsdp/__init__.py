"""Sharded data parallel: parameters, gradients and optimizer states in shards, all-gathered when needed."""

from weft.fsdp.api import fully_shard, register_fsdp_forward_method, replicate_with_fsdp, share_comm_ctx
from weft.fsdp.mesh import DataParallelMeshDims
from weft.fsdp.module import FSDPModule, UnshardHandle
from weft.fsdp.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from weft.fsdp.state_dict import full_state_dict, load_full_state_dict

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "full_state_dict",
    "fully_shard",
    "load_full_state_dict",
    "register_fsdp_forward_method",
    "replicate_with_fsdp",
    "share_comm_ctx",
]

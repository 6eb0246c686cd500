"""Gradient hooks: what happens to a bucket of gradients on its way to the mean."""

from weft.comm_hooks import (
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from weft.comm_hooks.bucket import GradBucket
from weft.comm_hooks.chain import Chain, chain
from weft.comm_hooks.registration import DDPCommHookType, register_ddp_comm_hook

__all__ = [
    "Chain",
    "DDPCommHookType",
    "GradBucket",
    "chain",
    "ddp_zero_hook",
    "debugging_hooks",
    "default_hooks",
    "optimizer_overlap_hooks",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_hooks",
    "register_ddp_comm_hook",
]

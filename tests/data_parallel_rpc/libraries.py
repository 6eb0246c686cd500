"""The library that the tests of data parallel under distributed autograd are about: weft.

With WEFT_TEST_LIBRARY=torch in the environment the tests on processes run on torch's own, which shows that
the tests are right. What torch can't do is skipped there. `-W default` goes with it: torch warns of itself.
"""

from __future__ import annotations

from tests.data_parallel.libraries import ON_TORCH, DistributedDataParallel, replicate, weft_only

if ON_TORCH:
    import torch.distributed.autograd as dist_autograd
    import torch.distributed.rpc as rpc
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
    from torch.distributed.algorithms.join import Join
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.nn.api.remote_module import RemoteModule
    from torch.distributed.optim import DistributedOptimizer
else:
    from weft import DistributedOptimizer, RemoteModule, dist_autograd, fully_shard, rpc
    from weft.comm_hooks.default_hooks import fp16_compress_hook
    from weft.comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
    from weft.join import Join

RPC_NAME = "torch.distributed.rpc" if ON_TORCH else "weft.rpc"

__all__ = [
    "ON_TORCH",
    "RPC_NAME",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "Join",
    "PowerSGDState",
    "RemoteModule",
    "dist_autograd",
    "fp16_compress_hook",
    "fully_shard",
    "powerSGD_hook",
    "replicate",
    "rpc",
    "weft_only",
]

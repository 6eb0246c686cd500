"""What gradients and parameters travel in: buckets of a replicated model, groups of a sharded one.

For pictures: `label` is what records call the collectives of that unit.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from weft.data_parallel import DistributedDataParallel
from weft.data_parallel.replicate import find_state
from weft.fsdp import FSDPModule
from weft.fsdp.module import state_of

Unit = dict[str, Any]  # label, num_bytes, parameters


def describe_traffic(module: nn.Module) -> list[Unit]:
    """The units of a spread model, in the order in which they travel. Empty where nothing does."""
    if isinstance(module, FSDPModule):
        return _describe_groups(module)
    state = find_state(module)
    if isinstance(module, DistributedDataParallel):
        reducer = module._replica.reducer
    elif state is not None:
        reducer = state.replica.reducer
    else:
        return []
    names = [ddp_param.spec.name for ddp_param in reducer.ddp_params]
    return [
        {
            "label": f"bucket {index}",
            "num_bytes": bucket.num_bytes,
            "parameters": [names[param] for param in bucket.params],
        }
        for index, bucket in enumerate(reducer.bucket_set.plan)
    ]


def _describe_groups(root: nn.Module) -> list[Unit]:
    return [
        {
            "label": group.name,
            "num_bytes": group.num_bytes,
            "parameters": [param.fqn for param in group.params],
        }
        for module in root.modules()
        if isinstance(module, FSDPModule)
        for group in state_of(module).groups
    ]

"""What `_get_ddp_logging_data` returns: torch's names for what weft knows of a module, its plan and its last
step.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from weft.data_parallel.ddp import DistributedDataParallel


_DTYPE_NAMES = {"float32": "float", "float64": "double", "float16": "c10::Half", "bfloat16": "c10::BFloat16"}
_ENVIRONMENT = {
    "master_port": "MASTER_PORT",
    "master_addr": "MASTER_ADDR",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
    "gloo_socket_ifname": "GLOO_SOCKET_IFNAME",
    "gloo_device_transport": "GLOO_DEVICE_TRANSPORT",
}


def describe(ddp: DistributedDataParallel) -> dict[str, Any]:
    """The logging data of a DDP module, by torch's names."""
    replica, reducer = ddp._replica, ddp._replica.reducer
    plan = reducer.bucket_set.plan
    specs = [ddp_param.spec for ddp_param in reducer.ddp_params]
    sizes = ", ".join(str(bucket.num_bytes) for bucket in plan)
    facts: dict[str, Any] = {
        "world_size": replica.group.size(),
        "rank": replica.group.rank(),
        "backend_name": dist.get_backend(replica.group),
        "module_name": type(ddp.module).__name__,
        "device_ids": "" if ddp.device_ids is None else ", ".join(map(str, ddp.device_ids)),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "is_multi_device_module": int(len({spec.device for spec in specs}) > 1),
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "bucket_cap_bytes": reducer.bucket_set.caps.rest_bytes,
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(reducer.static_graph),
        "has_sync_bn": int(any(isinstance(child, nn.SyncBatchNorm) for child in ddp.module.modules())),
        "iteration": reducer.num_steps,
        "dtypes": ", ".join(
            sorted({_DTYPE_NAMES.get(name, name) for name in (str(spec.dtype)[6:] for spec in specs)})
        ),
        "total_parameter_size_bytes": sum(spec.num_bytes for spec in specs),
        "num_parameter_tensors": len(specs),
        "bucket_sizes": sizes,
        "num_buckets_reduced": len(plan),
        "has_rebuilt_buckets": int(reducer.bucket_set.is_rebuilt),
        **reducer.times.report(),
    }
    if reducer.bucket_set.is_rebuilt:
        facts["rebuilt_bucket_sizes"] = sizes
        facts["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, reducer.bucket_set.order))
        facts["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(map(str, bucket.params)) for bucket in plan
        )
    if reducer.hook is not None:
        facts["comm_hook"] = replica.hook_name or getattr(reducer.hook, "__qualname__", str(reducer.hook))
    if replica.error:
        facts |= {"has_error": 1, "error": replica.error}
    return facts | {name: os.environ.get(key, "N/A") for name, key in _ENVIRONMENT.items()}

"""CUDA graphs: what may be captured, and what is refused before it spoils the capture.

A step is captured right where its collectives are kernels: on nccl. What needs the host, a collective of
the local group or of gloo, or a number that is read from the GPU, can't be replayed; CUDA would say so at the
end of the capture, in an error that names nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from weft.errors import StateError


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of the device is being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_host_read(device: torch.device, what: str, advice: str) -> None:
    """Raise StateError where `what`, which reads from the GPU, comes while a CUDA graph is captured."""
    if is_capturing(device):
        raise StateError(
            f"CUDA graph: {what}, and a captured step can't wait for the host. Nothing of this step is "
            f"usable. {advice}"
        )


def check_engine(op: str, tensors: Sequence[torch.Tensor], group: ProcessGroup) -> None:
    """Raise StateError for a collective on a GPU's tensors that the capture under way can't hold."""
    if not tensors or not tensors[0].is_cuda or not torch.cuda.is_current_stream_capturing():
        return
    engines = [part.partition(":") for part in dist.get_backend_config(group).split(",")]
    engine = next((name for device, _, name in engines if device == "cuda"), dist.get_backend(group))
    if engine != "nccl" and group.size() > 1:
        raise StateError(
            f"CUDA graph: {op} on backend '{engine}' runs on the host and can't be captured; nccl's "
            "collectives can. Take backend 'nccl', or step without a graph."
        )

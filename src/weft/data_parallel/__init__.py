"""Data parallel: a module copied to every rank, gradients averaged while backward makes them."""

from weft.data_parallel.buffers import BufferCommHookLocation
from weft.data_parallel.ddp import DistributedDataParallel
from weft.data_parallel.mixed_precision import MixedPrecision
from weft.data_parallel.replicate import ReplicatedModule, replicate

__all__ = [
    "BufferCommHookLocation",
    "DistributedDataParallel",
    "MixedPrecision",
    "ReplicatedModule",
    "replicate",
]

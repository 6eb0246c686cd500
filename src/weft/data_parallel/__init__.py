"""Data parallel: a module copied to every rank, gradients averaged while backward makes them."""

from weft.data_parallel.buffer_hook import BufferCommHookLocation
from weft.data_parallel.ddp import DistributedDataParallel
from weft.data_parallel.precision import MixedPrecision
from weft.data_parallel.replicate import ReplicatedModule, replicate

__all__ = [
    "BufferCommHookLocation",
    "DistributedDataParallel",
    "MixedPrecision",
    "ReplicatedModule",
    "replicate",
]

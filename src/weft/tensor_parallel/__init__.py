"""Tensor parallel: one module's weights and activations split over the ranks of a mesh axis."""

from weft.tensor_parallel.api import parallelize_module
from weft.tensor_parallel.initial import init_parameters
from weft.tensor_parallel.loss import loss_parallel
from weft.tensor_parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from weft.tensor_parallel.randomness import local_randomness
from weft.tensor_parallel.styles import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "init_parameters",
    "local_randomness",
    "loss_parallel",
    "parallelize_module",
]

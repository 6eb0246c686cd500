"""Optimizers that know of other ranks: sharded state, local SGD, steps inside backward."""

from weft.optimizers import averagers
from weft.optimizers.averagers import (
    HierarchicalModelAverager,
    ModelAverager,
    PeriodicModelAverager,
    average_parameters,
    get_params_to_average,
)
from weft.optimizers.in_backward import apply_optimizer_in_backward, get_in_backward_optimizers
from weft.optimizers.post_local_sgd import PostLocalSGDOptimizer
from weft.optimizers.zero import ZeroRedundancyOptimizer

__all__ = [
    "HierarchicalModelAverager",
    "ModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "ZeroRedundancyOptimizer",
    "apply_optimizer_in_backward",
    "average_parameters",
    "averagers",
    "get_in_backward_optimizers",
    "get_params_to_average",
]

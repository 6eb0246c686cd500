"""Optimizers that know of other ranks: sharded state, local SGD, steps inside backward."""

from weft.optimizers import averagers
from weft.optimizers.averagers import (
    HierarchicalModelAverager,
    ModelAverager,
    PeriodicModelAverager,
    average_parameters,
    get_params_to_average,
)
from weft.optimizers.clip import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
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
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "get_in_backward_optimizers",
    "get_params_to_average",
    "get_total_norm",
]

"""Autograd over several workers, under torch's names."""

from weft.dist_autograd.api import (
    _current_context,
    _get_debug_info,
    _get_max_id,
    _has_valid_context,
    _init,
    _is_valid_context,
    _new_context,
    _release_context,
    _retrieve_context,
    backward,
    context,
    get_gradients,
    is_available,
)
from weft.dist_autograd.context import DistAutogradContext
from weft.dist_autograd.optimizer import DistributedOptimizer

__all__ = [
    "DistAutogradContext",
    "DistributedOptimizer",
    "_current_context",
    "_get_debug_info",
    "_get_max_id",
    "_has_valid_context",
    "_init",
    "_is_valid_context",
    "_new_context",
    "_release_context",
    "_retrieve_context",
    "backward",
    "context",
    "get_gradients",
    "is_available",
]

"""Tensors in bulk: flat buffers and the views in them, tensors inside containers."""

from weft.tensors.flat import (
    batch_by_dtype,
    contiguous_strides,
    copy_all,
    dense_strides,
    grads_of,
    view_in,
)
from weft.tensors.tree import find_tensors, map_tensors

__all__ = [
    "batch_by_dtype",
    "contiguous_strides",
    "copy_all",
    "dense_strides",
    "find_tensors",
    "grads_of",
    "map_tensors",
    "view_in",
]

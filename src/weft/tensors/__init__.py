"""Tensors in bulk: flat buffers and the views in them, tensors inside containers."""

from weft.tensors.flat import batch_by_dtype, copy_all, dense_strides, view_in
from weft.tensors.tree import find_tensors, map_tensors

__all__ = ["batch_by_dtype", "copy_all", "dense_strides", "find_tensors", "map_tensors", "view_in"]

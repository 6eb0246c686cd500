"""Tensors in bulk: flat buffers and the views in them, tensors inside containers, and DTensors opened."""

from weft.tensors.dtensor import (
    local_of,
    make_dtensor,
    make_parameter,
    make_spec,
    make_traceable,
    shaped_spec,
    with_dtype,
)
from weft.tensors.flat import (
    batch_by_dtype,
    contiguous_strides,
    copy_all,
    dense_strides,
    grads_of,
    has_gaps,
    holder_count,
    use_count,
    view_in,
)
from weft.tensors.spread import Spread, plan_spread
from weft.tensors.tree import find_tensors, map_tensors

__all__ = [
    "Spread",
    "batch_by_dtype",
    "contiguous_strides",
    "copy_all",
    "dense_strides",
    "find_tensors",
    "grads_of",
    "has_gaps",
    "holder_count",
    "local_of",
    "make_dtensor",
    "make_parameter",
    "make_spec",
    "make_traceable",
    "map_tensors",
    "plan_spread",
    "shaped_spec",
    "use_count",
    "view_in",
    "with_dtype",
]

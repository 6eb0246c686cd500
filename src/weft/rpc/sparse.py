"""Sparse tensors as dense ones, and back.

What is no dense tensor and no sparse one either is refused here, with what to send instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.errors import UnsupportedError

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
_LAYOUTS = {str(layout).removeprefix("torch."): layout for layout in (torch.sparse_coo, *_COMPRESSED)}


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor is its memory, read with a shape and strides."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def take_apart(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bool, list[torch.Tensor]]:
    """A sparse tensor's layout, its shape, whether it is coalesced, and the dense tensors in it.

    Raises UnsupportedError for a tensor of any other kind.
    """
    tensor = tensor.detach()
    layout = str(tensor.layout).removeprefix("torch.")
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
        return layout, tuple(tensor.shape), tensor.is_coalesced(), parts
    if tensor.layout in _COMPRESSED:
        outer, inner = _COMPRESSED[tensor.layout]
        parts = [getattr(tensor, outer)(), getattr(tensor, inner)(), tensor.values()]
        return layout, tuple(tensor.shape), False, parts
    if tensor.is_quantized:
        raise UnsupportedError(
            "weft.rpc: quantized tensors don't travel. Send int_repr() with the scale and the zero point, or "
            "dequantize() it."
        )
    if tensor.is_nested:
        raise UnsupportedError("weft.rpc: nested tensors don't travel. Send the list that unbind() gives.")
    raise UnsupportedError(
        f"weft.rpc: a tensor of layout {tensor.layout} doesn't travel. Make it dense (to_dense()) "
        "before it is sent."
    )


def put_together(
    layout: str, shape: Sequence[int], is_coalesced: bool, parts: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The sparse tensor that was taken apart. Raises RuntimeError when the parts are no such tensor."""
    if layout == "sparse_coo":
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices, values, tuple(shape), check_invariants=True, is_coalesced=is_coalesced
        )
    outer, inner, values = parts
    make: Any = torch.sparse_compressed_tensor
    return make(outer, inner, values, tuple(shape), layout=_LAYOUTS[layout], check_invariants=True)

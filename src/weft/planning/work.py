"""What an operation has to do: its multiplications and the bytes it touches, by its tensors' shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from weft.planning.machine import Work

_MATMULS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
# Read as many rows of a table as they write, not all of it.
_LOOKUPS = {"aten::embedding", "aten::index", "aten::gather", "aten::index_select"}


def work_of(
    op: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *, is_view: bool
) -> Work:
    """The work of an operation on these tensors."""
    name: str = op.name().split(".")[0]
    if is_view:
        return Work(name, 0.0, 0, is_view=True)
    num_bytes = sum(_num_bytes(tensor) for tensor in (*inputs, *outputs))
    if name in _LOOKUPS:
        num_bytes = 2 * sum(_num_bytes(tensor) for tensor in outputs)
    return Work(name, _flops(name, inputs, outputs), num_bytes)


def _flops(name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> float:
    if name in _MATMULS:
        left, right = inputs[-2], inputs[-1]
        return 2.0 * left.numel() * right.shape[-1]
    if "scaled_dot_product" in name:
        is_backward = "backward" in name
        query, key = (inputs[1], inputs[2]) if is_backward else (inputs[0], inputs[1])
        products = 5 if is_backward else 2
        whole = products * 2.0 * math.prod(query.shape) * key.shape[-2]
        return whole / 2  # each place looks at those before it
    if name == "aten::convolution":
        return 2.0 * outputs[0].numel() * inputs[1].numel() / max(1, inputs[1].shape[0])
    if name == "aten::convolution_backward":
        return 4.0 * inputs[0].numel() * inputs[2].numel() / max(1, inputs[2].shape[0])
    return 0.0


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()

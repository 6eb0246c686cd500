"""Layers that have a kernel of their own on a GPU and are made of several operations on a CPU.

A plan for GPUs is made with tensors of the CPU. Where a GPU keeps less for backward, this calls its own
operation.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Fused(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.rms_norm:
            return _rms_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _rms_norm(
    input: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    return torch.ops.aten._fused_rms_norm(input, shape, weight, eps)[0]


@contextmanager
def fused_as_on_gpu(*, is_on: bool) -> Generator[None]:
    """Call what a GPU would, while the block runs."""
    if not is_on:
        yield
        return
    with _Fused():
        yield

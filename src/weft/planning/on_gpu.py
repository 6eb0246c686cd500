"""What is otherwise on a GPU: layers with a kernel of their own, and memory that is given back sooner.

A plan for GPUs is made with tensors of the CPU, which have no values. Where a GPU keeps less for backward,
this calls an operation of the CPU that keeps the same.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import rms_norm
from torch.overrides import TorchFunctionMode

from weft.fsdp.all_gather import memory_as_on_gpu


class _Fused(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.rms_norm or func is rms_norm:  # which calls the first, unseen from here
            return _rms_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _rms_norm(
    input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    if weight is not None and weight.dtype is not input.dtype:  # which no kernel does at once
        return torch.rms_norm(input, normalized_shape, weight, eps)
    # A GPU's own kernel reads and writes as often as this one, and keeps the input and a number for each row.
    return torch.native_layer_norm(input, normalized_shape, weight, None, eps or 0.0)[0]


@contextmanager
def as_on_gpu(*, is_on: bool) -> Generator[None]:
    """Do what is done for a GPU, while the block runs."""
    if not is_on:
        yield
        return
    with _Fused(), memory_as_on_gpu():
        yield

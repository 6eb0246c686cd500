"""Flat buffers: how a tensor lies in one, and which tensors can share one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides for a copy of such a tensor that fills its memory without gaps.

    The tensor's own, where they do (contiguous, channels_last, transposed); those of a
    contiguous tensor otherwise.
    """
    expected = 1
    for size, stride in sorted(
        ((size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1),
        key=lambda pair: (pair[1], pair[0]),
    ):
        if stride != expected:
            return contiguous_strides(shape)
        expected *= size
    return tuple(strides) if math.prod(shape) > 0 else contiguous_strides(shape)


def has_gaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether there may be elements between the first and the last of a tensor that are not its own.

    False for permuted and for expanded tensors, whose elements lie side by side.
    """
    step = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if stride != step:
            return 0 not in shape
        step *= size
    return False


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def view_in(flat: torch.Tensor, offset: int, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """The tensor that lies at `offset` of the flat buffer.

    Autograd doesn't know it for a view, so it may serve as a `.grad` that is detached in
    place, as any other.
    """
    alias = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return alias.set_(
        flat.untyped_storage(), flat.storage_offset() + offset, torch.Size(shape), tuple(strides)
    )


def grads_of(params: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Their gradients, as they are now."""
    return [param.grad for param in params]


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, in one batch. The one use of a private name, `_foreach_copy_`."""
    torch._foreach_copy_(targets, sources)  # type: ignore[reportPrivateImportUsage]


def batch_by_dtype(tensors: Iterable[torch.Tensor], limit_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Batches of tensors that one flat buffer can carry: one dtype, one device, up to a size."""
    batches: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        num_bytes = tensor.numel() * tensor.element_size()
        if key in batches and sizes[key] + num_bytes > limit_bytes:
            yield batches.pop(key)
            sizes[key] = 0
        batches.setdefault(key, []).append(tensor)
        sizes[key] = sizes.get(key, 0) + num_bytes
    yield from batches.values()


def holder_count(tensor: torch.Tensor) -> int:
    """How many hold this very tensor, in C++ and in Python. The one use of a private name, `_use_count`."""
    return tensor._use_count()  # type: ignore[attr-defined]


def use_count(tensor: torch.Tensor) -> int:
    """How many tensors share this one's memory. The one use of a private name, `_storage_Use_Count`."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)

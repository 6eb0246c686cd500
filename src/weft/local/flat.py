"""Tensors of any stride as the flat, contiguous memory that collectives move.

A contiguous tensor is its own flat form. Another is copied, and copied back after
a collective that writes it.

Collectives write behind autograd's back, as all of c10d's do: on `tensor.data`, which
has the tensor's memory but neither its history nor its version counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch


def _is_flat_already(tensor: torch.Tensor) -> bool:
    # A conjugated or negated view is contiguous, but its memory holds other numbers.
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.data
    if not _is_flat_already(plain):
        plain = plain.resolve_conj().resolve_neg().contiguous()
    return plain.view(-1)


class Flat:
    """A tensor's flat form, for the length of a `with`.

    is_read: what is in it matters, so a copy is filled. is_written: the collective
    changes it, so a copy is brought back, unless the collective raised. buffer: where
    the copy is to lie, if there must be one (a pinned buffer of the host).
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        *,
        is_read: bool = True,
        is_written: bool = True,
        buffer: torch.Tensor | None = None,
    ) -> None:
        self._tensor = tensor.data
        self._is_read = is_read
        self._is_copy = buffer is not None or not _is_flat_already(tensor)
        self._is_written = is_written
        self._flat = buffer

    def __enter__(self) -> torch.Tensor:
        tensor, flat = self._tensor, self._flat
        if not self._is_copy:
            return tensor if tensor.dim() == 1 else tensor.view(-1)
        if flat is None:
            flat = self._flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        if self._is_read:
            flat.view(tensor.shape).copy_(tensor)
        return flat

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._is_copy and self._is_written and self._flat is not None:
            self._tensor.copy_(self._flat.view(self._tensor.shape), non_blocking=True)


def flat_input(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors that are only read, one behind the other in one flat tensor."""
    if len(tensors) == 1:
        return _flat(tensors[0])
    return torch.cat([_flat(tensor) for tensor in tensors])

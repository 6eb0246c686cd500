"""Tensors of any stride as the flat, contiguous memory that collectives move.

A contiguous tensor is its own flat form. Another is copied, and copied back after
a collective that writes it.

Collectives write behind autograd's back, as all of c10d's do: on `tensor.data`, which
has the tensor's memory but neither its history nor its version counter.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
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
    changes it, so a copy is brought back, unless the collective raised.
    """

    __slots__ = ("_copy", "_is_read", "_is_written", "_tensor")

    def __init__(self, tensor: torch.Tensor, *, is_read: bool = True, is_written: bool = True) -> None:
        self._tensor = tensor.data
        self._is_read = is_read
        self._is_written = is_written
        self._copy: torch.Tensor | None = None

    def __enter__(self) -> torch.Tensor:
        tensor = self._tensor
        if _is_flat_already(tensor):
            return tensor if tensor.dim() == 1 else tensor.view(-1)
        self._copy = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        if self._is_read:
            self._copy.view(tensor.shape).copy_(tensor)
        return self._copy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._is_written and self._copy is not None:
            self._tensor.copy_(self._copy.view(self._tensor.shape))


def flat_input(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors that are only read, one behind the other in one flat tensor."""
    if len(tensors) == 1:
        return _flat(tensors[0])
    return torch.cat([_flat(tensor) for tensor in tensors])


@contextmanager
def flat_outputs(tensors: Sequence[torch.Tensor]) -> Generator[list[torch.Tensor]]:
    """Tensors that are only written, each in its flat form."""
    with ExitStack() as stack:
        yield [stack.enter_context(Flat(tensor, is_read=False)) for tensor in tensors]

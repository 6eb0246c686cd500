"""A peer's tensor during one collective.

A window reads and writes elements lo..hi of the tensor that a peer brought to the
collective. `TensorWindow` lies in memory that this process has mapped, and is read
in place. `RemoteWindow` lies in the peer's own memory, and is copied in one pass.
"""

from __future__ import annotations

from typing import Protocol

import torch

from weft.local.kernel import OWN_MEMORY, RemoteMemory, Spans


class Scratch:
    """Buffers of a device that are used again by every collective."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get(self, purpose: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """The purpose's buffer, of `numel` elements. Its content is whatever it was."""
        buffer = self._buffers.get((purpose, dtype))
        if buffer is None or buffer.numel() < numel:
            with torch.inference_mode(False):  # it must be writable in that mode and outside of it
                buffer = torch.empty(numel, dtype=dtype, device=self._device)
            self._buffers[purpose, dtype] = buffer
        return buffer if buffer.numel() == numel else buffer[:numel]


class Window(Protocol):
    """Elements of a peer's flat tensor."""

    def read(self, lo: int, hi: int) -> torch.Tensor:
        """Elements lo..hi, in place where they can be read, else copied.

        A copy is good until the next `read` from any window of the collective.
        """
        ...

    def read_kept(self, lo: int, hi: int, kept: torch.Tensor) -> torch.Tensor:
        """As `read`, but a copy is made into `kept`, where later reads leave it alone."""
        ...

    def read_into(self, lo: int, hi: int, out: torch.Tensor) -> None:
        """Copy elements lo..hi into `out`, a contiguous tensor of that many elements."""
        ...

    def write(self, lo: int, source: torch.Tensor) -> None:
        """Copy `source`, contiguous, over the elements from lo on."""
        ...


class TensorWindow:
    """A window on memory that is mapped here."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # 1D

    def read(self, lo: int, hi: int) -> torch.Tensor:
        """The elements themselves: no copy."""
        return self._tensor[lo:hi]

    def read_kept(self, lo: int, hi: int, kept: torch.Tensor) -> torch.Tensor:
        """The elements themselves: no copy."""
        return self._tensor[lo:hi]

    def read_into(self, lo: int, hi: int, out: torch.Tensor) -> None:
        """Copy the elements."""
        out.copy_(self._tensor[lo:hi])

    def read_into_spans(self, spans: Spans) -> None:
        """Copy the elements from the first on, one span of our memory after another."""
        OWN_MEMORY.read_into_spans(spans, self._tensor.data_ptr())

    def write(self, lo: int, source: torch.Tensor) -> None:
        """Copy over the elements."""
        self._tensor[lo : lo + source.numel()].copy_(source)


class RemoteWindow:
    """A window on the memory of another process, through the kernel."""

    __slots__ = ("_address", "_dtype", "_itemsize", "_memory", "_scratch")

    def __init__(self, memory: RemoteMemory, address: int, dtype: torch.dtype, scratch: Scratch) -> None:
        self._memory = memory
        self._address = address
        self._dtype = dtype
        self._itemsize = dtype.itemsize
        self._scratch = scratch

    def read(self, lo: int, hi: int) -> torch.Tensor:
        """The elements, copied into scratch memory."""
        out = self._scratch.get("read", self._dtype, hi - lo)
        self.read_into(lo, hi, out)
        return out

    def read_kept(self, lo: int, hi: int, kept: torch.Tensor) -> torch.Tensor:
        """The elements, copied into `kept`."""
        self.read_into(lo, hi, kept)
        return kept

    def read_into(self, lo: int, hi: int, out: torch.Tensor) -> None:
        """One copy, made by the kernel."""
        self._memory.read(out.data_ptr(), self._address + lo * self._itemsize, (hi - lo) * self._itemsize)

    def read_into_spans(self, spans: Spans) -> None:
        """Copy the elements from the first on, one span of our memory after another."""
        self._memory.read_into_spans(spans, self._address)

    def write(self, lo: int, source: torch.Tensor) -> None:
        """One copy, made by the kernel."""
        self._memory.write(
            source.data_ptr(), self._address + lo * self._itemsize, source.numel() * self._itemsize
        )

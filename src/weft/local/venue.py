"""Where a collective takes place: on its tensors' own device, or, for small CUDA tensors, on the host.

Ranks that share a GPU take turns on it, and a turn costs a tenth of a millisecond and
more. A copy to the host needs no turn. So small CUDA tensors are copied into pinned
shared memory, reduced or moved there as CPU tensors are, and copied back.

A venue also gives tensors of any stride the flat form that collectives work on
(flat.py). Every rank must choose the same venue: the choice rests on a size that
ranks agree on.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch

from weft.local import cuda_driver
from weft.local.flat import Flat, flat_input
from weft.local.memory import CpuMemory
from weft.local.move import Movements
from weft.local.reduce import Reductions

# Above it the GPU's bandwidth pays for the turns.
HOST_BYTES = 2 * 1024 * 1024
_LEAST_PINNED_BYTES = 256 * 1024


class Venue(Protocol):
    """One collective's place."""

    reductions: Reductions
    movements: Movements

    def flat(self, tensor: torch.Tensor, *, is_read: bool = True, is_written: bool = True) -> Flat:
        """The tensor in its flat form, while a `with` lasts."""
        ...

    def inputs(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tensors that are only read, behind each other in one flat tensor."""
        ...


class DeviceVenue:
    """The tensors' own device."""

    def __init__(self, reductions: Reductions, movements: Movements) -> None:
        self.reductions = reductions
        self.movements = movements

    def flat(self, tensor: torch.Tensor, *, is_read: bool = True, is_written: bool = True) -> Flat:
        """The tensor's own memory where it is flat."""
        return Flat(tensor, is_read=is_read, is_written=is_written)

    def inputs(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor's own memory where it is one flat tensor."""
        return flat_input(tensors)


class PinnedBuffers:
    """Pinned shared memory of one group and device, used again by each collective."""

    def __init__(self, cpu: CpuMemory, device: torch.device) -> None:
        self._cpu = cpu
        self._device = device
        self._stream: torch.cuda.Stream | None = None  # that copied last
        self._buffers: list[torch.Tensor] = []
        weakref.finalize(self, cuda_driver.unpin, self._buffers).atexit = False

    def begin(self) -> None:
        """Wait for the copies of the collective before, which used the same buffers."""
        if self._stream is not None:
            self._stream.synchronize()
        self._stream = torch.cuda.current_stream(self._device)

    def get(self, index: int, num_bytes: int) -> torch.Tensor:
        """The index-th buffer of a collective."""
        if index == len(self._buffers):
            self._buffers.append(self._new(num_bytes))
        elif self._buffers[index].numel() < num_bytes:
            cuda_driver.unpin([self._buffers[index]])
            self._buffers[index] = self._new(num_bytes)
        return self._buffers[index][:num_bytes]

    def _new(self, num_bytes: int) -> torch.Tensor:
        buffer = self._cpu.allocate(max(num_bytes, _LEAST_PINNED_BYTES))
        cuda_driver.pin(buffer)
        return buffer


class HostVenue:
    """The host, for small CUDA tensors. Made anew for each collective."""

    def __init__(self, reductions: Reductions, movements: Movements, buffers: PinnedBuffers) -> None:
        self.reductions = reductions
        self.movements = movements
        self._buffers = buffers
        self._num_used = 0
        buffers.begin()

    def flat(self, tensor: torch.Tensor, *, is_read: bool = True, is_written: bool = True) -> Flat:
        """The tensor in a pinned buffer."""
        buffer = self._buffer(tensor.numel(), tensor.dtype)
        return Flat(tensor, is_read=is_read, is_written=is_written, buffer=buffer)

    def inputs(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensors in a pinned buffer."""
        buffer = self._buffer(sum(tensor.numel() for tensor in tensors), tensors[0].dtype)
        start = 0
        for tensor in tensors:
            buffer[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
            start += tensor.numel()
        return buffer

    def _buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self._num_used += 1
        return self._buffers.get(self._num_used - 1, numel * dtype.itemsize).view(dtype)


@contextmanager
def flat_outputs(venue: Venue, tensors: Sequence[torch.Tensor]) -> Generator[list[torch.Tensor]]:
    """Tensors that are only written, each in its flat form."""
    with ExitStack() as stack:
        yield [stack.enter_context(venue.flat(tensor, is_read=False)) for tensor in tensors]

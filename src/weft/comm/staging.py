"""Buffers between a collective and the tensors it is for, used again by the next one.

Fresh memory of the CPU costs a page fault every few kilobytes, more than the copy
that fills it. So a group keeps its last buffers of a dtype, up to a bound, and hands
each out while nobody else has it. On other devices torch's allocator does that.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

_LIMIT_BYTES = 16 * 2**20  # kept for one group and dtype


class _Shelf:
    """The free buffers of one group, by dtype; the largest last."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._free: dict[torch.dtype, list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        with self._mutex:
            free = self._free.get(dtype, [])
            for place, buffer in enumerate(free):
                if buffer.numel() >= numel:
                    return free.pop(place)
        with torch.inference_mode(False):  # it must be writable in that mode and outside of it
            return torch.empty(numel, dtype=dtype)

    def put(self, buffer: torch.Tensor) -> None:
        with self._mutex:
            free = self._free.setdefault(buffer.dtype, [])
            free.append(buffer)
            free.sort(key=torch.Tensor.numel)
            while free and sum(kept.numel() * kept.element_size() for kept in free) > _LIMIT_BYTES:
                # The largest serves everyone, unless it alone is too much.
                free.pop(0 if len(free) > 1 else -1)


_shelves: weakref.WeakKeyDictionary[dist.ProcessGroup, _Shelf] = weakref.WeakKeyDictionary()


class Borrowed:
    """Memory of others that a collective uses: from the launch on, until the stream that waits has it."""

    __slots__ = ("_stream", "_tensors")

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self._tensors = tensors
        device = next((tensor.device for tensor in tensors if tensor is not None), None)
        is_cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if is_cuda else None

    @property
    def is_on_stream(self) -> bool:
        """Whether there is something to give back."""
        return self._stream is not None

    def give_back(self) -> None:
        """The current stream is behind the collective. Another one, that launched it, may not be."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            if current != self._stream:
                for tensor in self._tensors:
                    if tensor is not None:
                        tensor.record_stream(current)
        self._tensors = ()


class Staging:
    """A flat buffer of `like`'s dtype and device, with anything in it."""

    __slots__ = ("_buffer", "_shelf", "flat")

    def __init__(self, group: dist.ProcessGroup, numel: int, like: torch.Tensor) -> None:
        self._shelf = _shelves.setdefault(group, _Shelf()) if like.is_cpu else None
        if self._shelf is None:
            self._buffer = torch.empty(numel, dtype=like.dtype, device=like.device)
        else:
            self._buffer = self._shelf.take(numel, like.dtype)
        self.flat = self._buffer[:numel]

    def give_back(self) -> None:
        """Say, once, that nobody uses the buffer any more. Not after a failed collective: peers might."""
        if self._shelf is not None:
            self._shelf.put(self._buffer)
        elif self._buffer.is_cuda:
            # It may have been made under another stream than the one that uses it last.
            self._buffer.record_stream(torch.cuda.current_stream(self._buffer.device))

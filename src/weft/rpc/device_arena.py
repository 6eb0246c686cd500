"""Blocks of a GPU's memory that workers of one host pass to each other through CUDA IPC.

As in arena.py, but the memory is a GPU's and only the flags are the host's. The lender copies a tensor in and
waits for its stream; the borrower copies it out, waits for its own, and clears the flag. It doesn't keep what
it borrowed: memory of a process that ends is gone at once, and tensors on it would be too.

The borrower keeps a slab open once it has used it, since opening takes longer than most copies. Memory must
not be freed while a peer has it open, so such slabs stay for good. Beyond KEPT_BYTES new slabs are said to be
passing: a borrower closes them before it clears the flag.
"""

from __future__ import annotations

import os
import struct
import threading
import weakref

import torch

from weft.errors import PeerError
from weft.local import cuda_driver
from weft.local.cuda_driver import HANDLE_BYTES
from weft.local.segment import Segment, own_segment
from weft.rpc.arena import FREE, Borrower, Place, Slab
from weft.rpc.wire import WireError

KEPT_BYTES = 256 << 20
_SLAB_BYTES = 4 << 20  # a GPU's memory is taken at once, not page by page
_SLIP = struct.Struct(f"<{HANDLE_BYTES}sQ?")  # the memory's handle, its bytes, whether it is kept
_SLIP_START = 512  # in the page, behind the flags

# Threads of one process can't open each other's handles, and need not.
_slabs_here: weakref.WeakValueDictionary[int, Slab] = weakref.WeakValueDictionary()


class DeviceSlabs:
    """Makes the slabs of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept_bytes = 0

    def new_slab(self, block_bytes: int, num_blocks: int) -> Slab:
        """A slab of device memory. Raises ConfigError when there is none, or it can't be shared."""
        num_blocks = max(1, min(num_blocks, _SLAB_BYTES // block_bytes))
        num_bytes = block_bytes * num_blocks
        buffer = cuda_driver.new_buffer(num_bytes, self._device)
        data = buffer.tensor(lambda: cuda_driver.free_buffers([buffer]))
        is_kept = self._kept_bytes + num_bytes <= KEPT_BYTES
        self._kept_bytes += num_bytes if is_kept else 0
        page = own_segment(_SLIP_START + _SLIP.size, is_reclaimed=False)
        _SLIP.pack_into(page.memory, _SLIP_START, buffer.handle, num_bytes, is_kept)
        slab = Slab(page, data, 0, block_bytes, num_blocks, is_kept)
        _slabs_here[page.name.segment_id] = slab
        return slab


class DeviceBorrower:
    """Copies what peers lent out of their memory. Thread-safe."""

    def __init__(self, pages: Borrower) -> None:
        self._pages = pages
        self._opened: dict[tuple[int, int], torch.Tensor] = {}
        self._pids: dict[int, set[int]] = {}  # a peer's processes
        self._mutex = threading.Lock()

    def fetch(self, place: Place, peer_id: int, device: torch.device) -> torch.Tensor:
        """A copy of the block's bytes on `device`. The block goes back at once."""
        page = self._pages.page_of(place, peer_id)
        try:
            if place.pid == os.getpid():
                slab = _slabs_here.get(place.segment_id)
                if slab is None:
                    raise PeerError(
                        f"worker {peer_id} has shut down, and its memory is gone with it.", [peer_id]
                    )
                return _copy_out(slab.data, place, device)
            self._pids.setdefault(peer_id, set()).add(place.pid)
            return _copy_out(self._open(page, place, device), place, device)
        finally:
            page.memory[place.flag] = FREE

    def _open(self, page: Segment, place: Place, device: torch.device) -> torch.Tensor:
        key = (place.pid, place.segment_id)
        with self._mutex:
            memory = self._opened.get(key)
            if memory is None:
                handle, num_bytes, is_kept = _SLIP.unpack_from(page.memory, _SLIP_START)
                memory = cuda_driver.open_device_memory(handle, num_bytes, device)
                if is_kept:
                    self._opened[key] = memory
        return memory

    def release_peer(self, peer_id: int) -> None:
        """Close what a peer lent."""
        with self._mutex:
            pids = self._pids.pop(peer_id, set[int]())
            for key in [key for key in self._opened if key[0] in pids]:
                del self._opened[key]

    def close(self) -> None:
        """Close all that is open."""
        with self._mutex:
            self._opened.clear()


def _copy_out(memory: torch.Tensor, place: Place, device: torch.device) -> torch.Tensor:
    # In a function of its own, so that passing memory is closed when it returns.
    if place.start + place.num_bytes > memory.numel():
        raise WireError(f"a block outside of its memory: {place}")
    out = torch.empty(place.num_bytes, dtype=torch.uint8, device=device)
    out.copy_(memory[place.start : place.start + place.num_bytes], non_blocking=True)
    torch.cuda.current_stream(device).synchronize()
    return out

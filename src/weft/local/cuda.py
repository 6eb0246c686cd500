"""How a rank's CUDA tensors become readable to its peers: several ranks on one GPU, or on several.

A tensor is copied into device memory that peers have opened through CUDA IPC, unless
`allocate` put it there. Before a rank tells the others that its part is done, its host
waits for its stream. Interprocess events would spare the host that wait, but the driver
leaves a file in /dev/shm for every process that makes one, also after a clean exit.

Ranks that share a GPU take turns on it, and a turn costs a tenth of a millisecond and
more. An allocated tensor costs one turn, of the rank that reduces for all; another
costs three. Carrying small tensors over the host instead gained little (0.31 ms
against 0.38 to 0.49 for 256 KB), so there is one way for all sizes.
"""

from __future__ import annotations

import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch.futures import Future

from weft.local import cuda_driver
from weft.local.board import Place
from weft.local.cuda_driver import HANDLE_BYTES, DeviceBuffer
from weft.local.memory import Share, copy_around, plan_share, segment_place
from weft.local.roster import Roster
from weft.local.segment import MappedSegments, Segment, own_segment, part_of
from weft.local.windows import Scratch, TensorWindow, Window
from weft.local.work import LocalWork

# One piece, whatever the size: a GPU needs no cache-sized pieces.
_PIECE_BYTES = 1 << 62
_SLIP = struct.Struct(f"<{HANDLE_BYTES}sQ")  # the memory's handle, its bytes


@dataclass(eq=False)
class _Slip:
    """A device buffer, and the page of shared memory that tells peers how to open it."""

    page: Segment
    buffer: DeviceBuffer


# Threads of one process can't open each other's handles, and need not.
_slips_here: weakref.WeakValueDictionary[int, _Slip] = weakref.WeakValueDictionary()


class CudaMemory:
    """The memory of one device's tensors. Used by one collective at a time."""

    piece_bytes = _PIECE_BYTES

    def __init__(self, roster: Roster, segments: MappedSegments, device: torch.device) -> None:
        self._roster = roster
        self._device = device
        self.scratch = Scratch(device)
        self._mapped = segments
        self.stream = torch.cuda.Stream(device)  # for collectives that overlap with the caller's
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        self.gpu = int.from_bytes(sha256(uuid.encode()).digest()[:7], "little")
        self._is_shared_gpu = False
        self._opened: dict[tuple[int, int], torch.Tensor] = {}
        self._allocated: dict[int, _Slip] = {}  # by address
        # Peers keep a buffer open once they have used it, so a dropped one is used again
        # rather than freed under them; all are freed with the group.
        self._spare: list[_Slip] = []
        self._buffers: list[DeviceBuffer] = []
        weakref.finalize(self, cuda_driver.free_buffers, self._buffers).atexit = False
        self._mutex = threading.Lock()  # `allocate` is called on any thread
        self._staging: _Slip | None = None
        self._settled: torch.Event | None = None  # behind the last copy out of the staging buffer
        self._is_staged = False

    def _take(self, num_bytes: int) -> _Slip:
        """A buffer of at least `num_bytes`: a dropped one that fits, or a new one."""
        with self._mutex:
            fitting = [slip for slip in self._spare if num_bytes <= slip.buffer.num_bytes <= 2 * num_bytes]
            if fitting:
                self._spare.remove(fitting[0])
                torch.cuda.synchronize(self._device)  # whatever still used it
                return fitting[0]
        buffer = cuda_driver.new_buffer(max(1, num_bytes), self._device)
        self._buffers.append(buffer)
        page = own_segment(_SLIP.size)
        _SLIP.pack_into(page.memory, 0, buffer.handle, buffer.num_bytes)
        slip = _slips_here[page.name.segment_id] = _Slip(page, buffer)
        return slip

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Zeroed device memory that peers open."""
        slip = self._take(num_bytes)
        address = slip.buffer.address
        self._allocated[address] = slip

        def drop() -> None:
            del self._allocated[address]
            self._spare.append(slip)

        return slip.buffer.tensor(drop)[:num_bytes].zero_()

    def is_inline(self, numel: int, dtype: torch.dtype | None) -> bool:
        """There are no inline buffers on a device; an empty tensor needs none."""
        return numel == 0

    def expose(self, tensor: torch.Tensor, slot: int, own: Share, *, may_inline: bool) -> Place:
        """Make a flat tensor readable to the peers; the answer tells them where it is."""
        self._is_staged = False
        base = tensor.untyped_storage().data_ptr()
        slip = self._allocated.get(base)
        if slip is not None:
            return segment_place(slip.page.name, tensor.data_ptr() - base)
        num_bytes = tensor.numel() * tensor.element_size()
        if self._staging is None or self._staging.buffer.num_bytes < num_bytes:
            if self._staging is not None:
                self._spare.append(self._staging)
            self._staging = self._take(num_bytes)
        if self._settled is not None:  # the collective before may have run on another stream
            torch.cuda.current_stream(self._device).wait_event(self._settled)
        copy_around(self._staged(tensor), tensor, own)
        self._is_staged = True
        return segment_place(self._staging.page.name, 0)

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._staging is not None
        num_bytes = tensor.numel() * tensor.element_size()
        return self._staging.buffer.tensor()[:num_bytes].view(tensor.dtype)

    def settle(self, tensor: torch.Tensor, own: Share) -> None:
        """Copy the staged bytes back, if the tensor was staged."""
        if self._is_staged:
            copy_around(tensor, self._staged(tensor), own)
            self._settled = torch.cuda.current_stream(self._device).record_event()

    def window(self, peer: int, place: Place, dtype: torch.dtype, numel: int, slot: int) -> Window:
        """The peer's exposed tensor."""
        member = self._roster.members[peer]
        if member.is_thread_here:
            memory = _slips_here[place.segment_id].buffer.tensor()
        else:
            page = self._mapped.get(place.segment(member.pid), member.global_rank)
            memory = self._open(page, member.global_rank)
        tensor = part_of(memory, place.start, numel * dtype.itemsize, member.global_rank).view(dtype)
        if tensor.device == self._device:
            return TensorWindow(tensor)
        return _FarWindow(tensor, self.scratch)

    def _open(self, page: Segment, rank: int) -> torch.Tensor:
        key = (page.name.pid, page.name.segment_id)
        memory = self._opened.get(key)
        if memory is None:
            part_of(page.tensor, 0, _SLIP.size, rank)  # raises where the page is too short
            handle, num_bytes = _SLIP.unpack_from(page.memory)
            memory = self._opened[key] = cuda_driver.open_device_memory(handle, num_bytes, self._device)
        return memory

    def finish_writes(self) -> None:
        """Wait for the stream: what it still writes, peers could read too early."""
        torch.cuda.current_stream(self._device).synchronize()

    def plan_share(self, numel: int, size: int, rank: int) -> Share:
        """Which elements this rank reduces: an equal share, but all are rank 0's on a shared GPU.

        Ranks take turns on a GPU that they share, so shares would be computed one after
        another, and each turn costs more than a tenth of a millisecond.
        """
        if self._is_shared_gpu:
            return (0, numel) if rank == 0 else (0, 0)
        return plan_share(numel, size, rank)

    @property
    def device_number(self) -> int:
        """For signatures: ranks that plan shares in different ways must not go on."""
        return 2 if self._is_shared_gpu else 1

    def learn_gpus(self, gpus: Sequence[int]) -> None:
        """Hear which GPU each rank uses."""
        self._is_shared_gpu = len(set(gpus)) == 1


class _FarWindow:
    """A window on the memory of another GPU, which is copied here before it is computed with."""

    def __init__(self, tensor: torch.Tensor, scratch: Scratch) -> None:
        self._tensor = tensor  # 1D
        self._scratch = scratch

    def read(self, lo: int, hi: int) -> torch.Tensor:
        """The elements, copied into scratch memory."""
        out = self._scratch.get("read", self._tensor.dtype, hi - lo)
        return out.copy_(self._tensor[lo:hi], non_blocking=True)

    def read_kept(self, lo: int, hi: int, kept: torch.Tensor) -> torch.Tensor:
        """The elements, copied into `kept`."""
        return kept.copy_(self._tensor[lo:hi], non_blocking=True)

    def read_into(self, lo: int, hi: int, out: torch.Tensor) -> None:
        """Copy the elements."""
        out.copy_(self._tensor[lo:hi], non_blocking=True)

    def write(self, lo: int, source: torch.Tensor) -> None:
        """Copy over the elements."""
        self._tensor[lo : lo + source.numel()].copy_(source, non_blocking=True)


class CudaWork(LocalWork):
    """A collective on CUDA tensors, ordered with the caller's stream.

    One that runs at once on the caller's thread uses the caller's stream. One that
    waits in the lane uses the group's, behind what the caller had queued.
    """

    def __init__(self, words: str, results: Sequence[torch.Tensor], stream: torch.cuda.Stream) -> None:
        super().__init__(words, results)
        self._stream = stream
        self._ready: torch.Event | None = None
        self._finished: torch.Event | None = None
        self._task: Callable[[float], None] | None = None

    def before_queue(self) -> None:
        """Mark the place in the caller's stream."""
        self._ready = torch.cuda.current_stream(self._stream.device).record_event()

    def run(self, task: Callable[[float], None], timeout_secs: float) -> None:
        """Queue the collective on the caller's stream, or on the group's."""
        if self._ready is None:
            return super().run(task, timeout_secs)
        # Held until waited for: the inputs must outlive the stream's use of them.
        self._task = task
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            super().run(task, timeout_secs)
            self._finished = self._stream.record_event()
        return None

    def synchronize(self) -> None:
        """Order the current stream behind the collective."""
        if self._finished is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._finished)
            self._task = None

    def _new_future(self) -> Future[list[torch.Tensor]]:
        return Future(devices=[self._stream.device])

    def _complete(self, future: Future[list[torch.Tensor]]) -> None:
        if self._finished is None:
            super()._complete(future)
        else:
            with torch.cuda.stream(self._stream):  # whose work the future's callbacks must follow
                super()._complete(future)

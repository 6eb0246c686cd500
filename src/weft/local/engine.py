"""One rank's machinery of a local group: its board, its memory on each device, its mailbox.

The group (group.py) speaks c10d; the engine does the work. It lives from the
group's creation until `close`, which every way of ending a group leads to.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from weft.errors import ConfigError
from weft.local.board import Board, RankState
from weft.local.mailbox import Mailbox
from weft.local.meeting import Meeting
from weft.local.memory import CpuMemory, Memory
from weft.local.move import Movements
from weft.local.reduce import Reductions
from weft.local.roster import Roster
from weft.local.segment import MappedSegments, Segment
from weft.local.spread_moves import Spreading
from weft.local.work import LocalWork


@dataclass(frozen=True, slots=True)
class Device:
    """What a rank has for the tensors of one device."""

    memory: Memory
    reductions: Reductions
    movements: Movements


class Engine:
    """What a rank needs to take part in its group's collectives."""

    def __init__(self, page: Segment, roster: Roster, group_name: str, *, is_direct: bool) -> None:
        self.rank = roster.rank
        self.size = roster.size
        self._pid = os.getpid()
        self._roster = roster
        self._board = Board(page, roster.rank, roster.size)
        self._segments = MappedSegments()
        self._meeting = Meeting(self._board, roster, self._segments, group_name)
        rings = memoryview(page.memory)[Board.num_bytes(roster.size) :]
        self.mailbox = Mailbox(rings, self._meeting, self._segments)
        memory = CpuMemory(self._board, roster, self._segments, is_direct=is_direct)
        self.cpu = Device(memory, Reductions(self._meeting, memory), Movements(self._meeting, memory, memory))
        self.spreading = Spreading(self._meeting, memory, self.cpu.reductions)
        self._gpus: dict[torch.device, Device] = {}
        self._board.set_state(RankState.OPEN)

    def device_of(self, tensor: torch.Tensor) -> Device:
        """What this rank has for the tensor's device."""
        return self.cpu if tensor.is_cpu else self._gpu(tensor.device)

    def _gpu(self, device: torch.device) -> Device:
        found = self._gpus.get(device)
        if found is None:
            from weft.local.cuda import CudaMemory

            memory = CudaMemory(self._roster, self._segments, device)
            movements = Movements(self._meeting, memory, self.cpu.memory)
            found = self._gpus[device] = Device(memory, Reductions(self._meeting, memory), movements)
        return found

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zeroed tensor in memory that peers reach."""
        if device == torch.device("cuda"):
            device = torch.device("cuda", torch.cuda.current_device())
        if not isinstance(dtype, torch.dtype):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"allocate: dtype must be a torch.dtype, got {dtype!r}.")
        if not all(isinstance(length, int) for length in shape):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"allocate: lengths must be integers, got {tuple(shape)!r}.")
        numel = prod(shape)
        if numel < 0 or any(length < 0 for length in shape):
            raise ConfigError(f"allocate: shape {tuple(shape)} has a negative length.")
        self.check_open()
        owner = self.cpu if device.type == "cpu" else self._gpu(device)
        memory = owner.memory.allocate(max(1, numel) * dtype.itemsize)
        return memory[: numel * dtype.itemsize].view(dtype).view(shape)

    def work_for(
        self, words: str, results: Sequence[torch.Tensor], device_of: torch.Tensor | None
    ) -> LocalWork:
        """A work for a call, ordered with the streams of the tensor's device."""
        if device_of is not None and device_of.is_cuda:
            from weft.local.cuda import CudaMemory, CudaWork

            memory = self._gpu(device_of.device).memory
            assert isinstance(memory, CudaMemory)
            return CudaWork(words, results, memory.stream)
        return LocalWork(words, results)

    @property
    def is_in_its_process(self) -> bool:
        """Whether this is the process that made the group: a forked child has no part in it."""
        return os.getpid() == self._pid

    def check_open(self) -> None:
        """Raise if the group was left or has failed."""
        self._meeting.check_open()

    def late_ranks(self) -> list[int]:
        """The ranks, of the world, that have not come as far as this one."""
        return self._meeting.late_ranks()

    def abort(self, reason: str) -> None:
        """Close the group for every rank."""
        if self.is_in_its_process:
            self._meeting.fail(reason)

    def close(self, why: str) -> None:
        """Leave the group. Peers that still need this rank raise PeerError."""
        if self.is_in_its_process:
            self.mailbox.close()
            self._meeting.leave(why)
            self._roster.unlock()

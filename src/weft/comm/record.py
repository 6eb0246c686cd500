"""Record what a rank communicates: `with weft.record() as events`.

Times are of the host (time.perf_counter, one clock for all processes of a machine).
An event is written when the rank waits for its collective (or its future completes).
Its end is when the collective was done, on the local group; other backends don't tell,
so there it is when the rank found out. Handles that nobody waits for leave no event.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from weft.comm.call import Call, current_watchers, install_watcher, remove_watcher
from weft.comm.group import state_of


@dataclass(frozen=True, slots=True)
class Event:
    """One collective of one rank."""

    op: str
    feature: str  # which part of weft called: "ddp", "fsdp", ..., or "user"
    rank: int  # in the world
    group: str  # the group's name
    group_size: int
    bytes_in: int
    bytes_out: int
    dtype: torch.dtype | None
    shapes: tuple[tuple[int, ...], ...]  # of the inputs
    detail: str  # the reduce op, the root
    site: str
    start_secs: float
    end_secs: float
    error: str | None = None


class Events(list[Event]):
    """The recorded events, in the order in which they ended."""

    def by_op(self, op: str) -> Events:
        """Those of one operation."""
        return Events(event for event in self if event.op == op)

    def by_feature(self, feature: str) -> Events:
        """Those of one feature."""
        return Events(event for event in self if event.feature == feature)

    @property
    def total_bytes_in(self) -> int:
        """How many bytes the rank gave in all."""
        return sum(event.bytes_in for event in self)


class _Recorder:
    def __init__(self, rank: int | None) -> None:
        self.events = Events()
        self._rank = rank
        self._mutex = threading.Lock()
        self._starts: dict[int, float] = {}

    def started(self, call: Call) -> None:
        if self._rank is None or call.rank == self._rank:
            self._starts[id(call)] = time.perf_counter()

    def finished(self, call: Call, error: BaseException | None, end_secs: float) -> None:
        start_secs = self._starts.pop(id(call), None)
        if start_secs is None:
            return
        state = state_of(call.group)
        event = Event(
            op=call.op,
            feature=call.feature,
            rank=state.global_rank,
            group=state.name,
            group_size=len(state.ranks),
            bytes_in=call.bytes_in,
            bytes_out=call.bytes_out,
            dtype=call.dtype,
            shapes=tuple(tuple(tensor.shape) for tensor in call.inputs),
            detail=call.detail,
            site=call.site,
            start_secs=start_secs,
            end_secs=end_secs,
            error=None if error is None else f"{type(error).__name__}: {error}",
        )
        self.add(event)

    def add(self, event: Event) -> None:
        if self._rank is None or event.rank == self._rank:
            with self._mutex:
                self.events.append(event)


def note(
    op: str,
    feature: str,
    detail: str,
    group: dist.ProcessGroup | None,
    *,
    bytes_in: int = 0,
    bytes_out: int = 0,
    start_secs: float | None = None,
) -> None:
    """Put an event that is no collective into the records under way: a reshard, say. It ends now."""
    recorders = [watcher for watcher in current_watchers() if isinstance(watcher, _Recorder)]
    if not recorders:
        return
    now = time.perf_counter()
    state = None if group is None else state_of(group)
    event = Event(
        op=op,
        feature=feature,
        rank=dist.get_rank() if state is None else state.global_rank,
        group="" if state is None else state.name,
        group_size=1 if state is None else len(state.ranks),
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        dtype=None,
        shapes=(),
        detail=detail,
        site="",
        start_secs=now if start_secs is None else start_secs,
        end_secs=now,
    )
    for recorder in recorders:
        recorder.add(event)


@contextmanager
def record() -> Generator[Events]:
    """Record this rank's collectives while the block runs.

    Each rank records its own; where ranks are threads, too. Collectives that are
    waited for after the block are recorded then. Calls that bypass the door (bare
    torch.distributed) are not seen.
    """
    recorder = _Recorder(dist.get_rank() if dist.is_initialized() else None)
    install_watcher(recorder)
    try:
        yield recorder.events
    finally:
        remove_watcher(recorder)

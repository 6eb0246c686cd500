"""Record what a rank communicates: `with weft.record() as events`.

Times are of the host (time.perf_counter, one clock for all processes of a machine).
An event is written when the rank waits for its collective (or its future completes).
Its end is when the collective was done, on the local group; other backends don't tell,
so there it is when the rank found out. Handles that nobody waits for leave no event.

A rank stands still for a collective from `wait_start_secs` to its end. A hook's collectives are
waited for by another thread, and the rank goes on: whoever waits for the hook says so (`stand_for`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from weft.comm.call import Call, current_watchers, install_watcher, remove_watcher
from weft.comm.group import state_of

T = TypeVar("T")


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
    label: str = ""  # what it is about: "bucket 2", a module's fqn
    wait_start_secs: float | None = None  # when the rank began to stand still for it; None: it did not

    @property
    def is_note(self) -> bool:
        """Whether it is no collective but something that a feature noted: a reshard, say."""
        return not self.site


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
        self._started: dict[int, tuple[Call, float]] = {}
        self._stood_for: str | None = None  # the label of what the rank waits for, while other threads run it

    def is_for(self, rank: int) -> bool:
        """Whether this rank's calls are recorded."""
        return self._rank is None or rank == self._rank

    def started(self, call: Call) -> None:
        if self.is_for(call.rank):
            now = time.perf_counter()
            self._started[id(call)] = call, now
            if call.label and call.label == self._stood_for:
                call.stand.start_secs = now

    def stand(self, label: str | None) -> None:
        """The rank begins to stand still for calls of this label, those that are under way and later ones."""
        self._stood_for = label
        now = time.perf_counter()
        for call, _ in list(self._started.values()):
            if call.label and call.label == label and call.stand.start_secs is None:
                call.stand.start_secs = now

    def finished(self, call: Call, error: BaseException | None, end_secs: float) -> None:
        started = self._started.pop(id(call), None)
        if started is None:
            return
        start_secs = started[1]
        wait_start_secs = call.stand.start_secs
        if wait_start_secs is not None and wait_start_secs > end_secs:
            wait_start_secs = None  # it was done when the rank came to wait
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
            label=call.label,
            wait_start_secs=wait_start_secs,
        )
        self.add(event)

    def add(self, event: Event) -> None:
        if self.is_for(event.rank):
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
        label=detail,
    )
    for recorder in recorders:
        recorder.add(event)


def stand_for(label: str, group: dist.ProcessGroup, wait: Callable[[], T]) -> T:
    """Wait for calls of this label that another thread launches and waits for: the rank stands still."""
    if not current_watchers():
        return wait()
    rank = state_of(group).global_rank
    recorders = [found for found in current_watchers() if isinstance(found, _Recorder) and found.is_for(rank)]
    for recorder in recorders:
        recorder.stand(label)
    try:
        return wait()
    finally:
        for recorder in recorders:
            recorder.stand(None)


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

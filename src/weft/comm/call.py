"""One call through the door, and those who watch calls.

A watcher sees every collective: the recorder, the desync check and the test kit's
faults are watchers. With none installed the door makes no Call at all, so that
watching costs nothing while nobody watches.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from weft.comm.group import state_of

_WEFT = Path(__file__).parent.parent
_SKIPPED_FOLDERS = (f"{_WEFT}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}")


@dataclass(slots=True)
class Stand:
    """When the rank began to stand still for a call; None: it has not."""

    start_secs: float | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """What one rank called. Compared between ranks by `essentials`."""

    op: str
    feature: str  # which part of weft called: "ddp", "fsdp", ..., or "user"
    group: dist.ProcessGroup = field(repr=False)
    number: int  # of this rank's calls on this group
    inputs: tuple[torch.Tensor, ...] = field(repr=False)
    outputs: tuple[torch.Tensor, ...] = field(repr=False)
    detail: str = ""  # what else must agree: the reduce op, the root
    site: str = ""  # file:line in function, of the first caller outside weft and torch
    label: str = ""  # what it is about: a bucket, a module
    stand: Stand = field(default_factory=Stand, repr=False, compare=False)

    @property
    def rank(self) -> int:
        """The calling rank, in the world."""
        return state_of(self.group).global_rank

    @property
    def bytes_in(self) -> int:
        """How many bytes the rank gives."""
        return _num_bytes(self.inputs)

    @property
    def bytes_out(self) -> int:
        """How many bytes the rank gets."""
        return _num_bytes(self.outputs)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of its tensors, None without any."""
        tensors = self.inputs or self.outputs
        return tensors[0].dtype if tensors else None

    def words(self) -> str:
        """The call as a reader would write it."""
        tensors = self.inputs or self.outputs
        shapes = ", ".join(f"{_short(t.dtype)}{list(t.shape)}" for t in tensors[:4])
        more = f", and {len(tensors) - 4} more" if len(tensors) > 4 else ""
        return f"{self.op}({', '.join(part for part in (shapes + more, self.detail) if part)})"


class Watcher(Protocol):
    """Someone who sees every call. Both methods run on the calling rank."""

    def started(self, call: Call) -> None:
        """Before the call moves anything. An error raised here keeps it from moving."""
        ...

    def finished(self, call: Call, error: BaseException | None, end_secs: float) -> None:
        """When somebody has found its result, or its error, which was there at `end_secs`."""
        ...


_watchers: tuple[Watcher, ...] = ()
_mutex = threading.Lock()


def current_watchers() -> tuple[Watcher, ...]:
    """Those who watch now."""
    return _watchers


def install_watcher(watcher: Watcher) -> None:
    """Let the watcher see every call from now on, in every rank-thread of this process."""
    global _watchers
    with _mutex:
        _watchers = (*_watchers, watcher)


def remove_watcher(watcher: Watcher) -> None:
    """Stop it. Harmless when it is not installed."""
    global _watchers
    with _mutex:
        _watchers = tuple(other for other in _watchers if other is not watcher)


_threads = threading.local()


def stand_aside() -> None:
    """Say that this thread works beside the rank's own: the rank goes on while the thread waits."""
    _threads.is_aside = True


def is_aside() -> bool:
    """Whether the calling thread is one of those."""
    return getattr(_threads, "is_aside", False)


# Whose a collective is that a group is asked for, for those who must know (weft.join).
door_feature: ContextVar[str | None] = ContextVar("weft_door_feature", default=None)  # None: not by weft.comm
host_feature: ContextVar[str | None] = ContextVar("weft_host_feature", default=None)


@contextmanager
def hosted_by(feature: str) -> Generator[None]:
    """Run a function of the user's, a gradient hook say, as part of a feature: so are its collectives."""
    token = host_feature.set(feature)
    try:
        yield
    finally:
        host_feature.reset(token)


def call_site() -> str:
    """The first caller outside weft and torch, as file:line in function."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_skipped(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_skipped(filename: str) -> bool:
    return filename.startswith(_SKIPPED_FOLDERS)


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    total = 0
    for tensor in tensors:
        if tensor.layout is torch.sparse_coo:
            entries = tensor.detach().coalesce()
            total += _num_bytes((entries.indices(), entries.values()))
        else:
            total += tensor.numel() * tensor.element_size()
    return total


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

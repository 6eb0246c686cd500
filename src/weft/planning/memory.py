"""What memory a rank has at its peak, by kind. Storages are followed from their birth to their end.

The same log serves imagined tensors and those of a real run, so a plan can be held against a run.

Torch's `UntypedStorage.resize_` is replaced while a log is open: fully_shard gives memory back by it, and no
operation tells.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weft.planning.operations import is_about_values, is_for_dtensor, tensors_in

_ANCHOR = "_weft_anchor"  # on a storage
_WEFT = str(Path(__file__).parent.parent)
_TORCH = str(Path(torch.__file__).parent)
_PLANNING = str(Path(__file__).parent)
# Memory that these parts ask for is for messages, unless it turns out to be parameters or gradients.
_SENDERS = tuple(f"{_WEFT}/{part}/" for part in ("comm", "comm_hooks", "fsdp", "data_parallel"))
# What this part brings may be other ranks' memory, seen from here. It counts when its use is known.
_SHARERS = f"{_WEFT}/local/"
_ELSEWHERE = "elsewhere"


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank when it has the most, by what they are for."""

    parameters: int  # and buffers of modules
    gradients: int
    optimizer: int
    activations: int  # what forward keeps for backward, and what operations need for a while
    communication: int  # gathered parameters, buckets on their way, what messages are packed into

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.communication


@dataclass(eq=False, slots=True)
class _Entry:
    """One storage, from when it has got its size."""

    num_bytes: int
    kind: str
    born: int


class _Anchor:
    """Hangs on a storage and ends with it."""

    __slots__ = ("entry", "log")

    def __init__(self, log: StorageLog, entry: _Entry) -> None:
        self.log = log
        self.entry = entry

    def __del__(self) -> None:
        self.log.end(self.entry)


@dataclass(slots=True)
class _Span:
    """Bytes that were there from one time to another, both included."""

    kind: str
    num_bytes: int
    born: int
    died: int


class StorageLog:
    """Follows storages. `now` counts operations."""

    def __init__(self) -> None:
        self.now = 0
        self._live: set[_Entry] = set()
        self._ended: list[_Span] = []
        self._num_bytes = 0
        self._most_bytes = 0
        self._most_at = 0
        self._begun = 0

    def see(self, tensors: Iterable[torch.Tensor]) -> None:
        """An operation has used, or made, these tensors."""
        self.now += 1
        for tensor in tensors:
            storage = tensor.untyped_storage()
            entry = self._find(storage)
            if entry is None:
                self._begin(storage)
            elif entry.num_bytes != storage.nbytes() and entry.kind != _ELSEWHERE:
                self._resize(entry, storage.nbytes())
        if self._num_bytes > self._most_bytes:
            self._most_bytes, self._most_at = self._num_bytes, self.now

    def _find(self, storage: torch.UntypedStorage) -> _Entry | None:
        anchor: _Anchor | None = storage.__dict__.get(_ANCHOR)
        return anchor.entry if anchor is not None and anchor.log is self else None

    def _begin(self, storage: torch.UntypedStorage) -> None:
        kind = _kind_by_caller()
        entry = _Entry(storage.nbytes() if kind != _ELSEWHERE else 0, kind, self.now)
        setattr(storage, _ANCHOR, _Anchor(self, entry))
        self._live.add(entry)
        self._num_bytes += entry.num_bytes

    def end(self, entry: _Entry) -> None:
        """Its storage is gone."""
        self._live.discard(entry)
        self._num_bytes -= entry.num_bytes
        self._close(entry)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has got memory, or given it back."""
        entry = self._find(storage)
        if entry is not None:
            self._resize(entry, storage.nbytes())
            if self._num_bytes > self._most_bytes:
                self._most_bytes, self._most_at = self._num_bytes, self.now

    def _resize(self, entry: _Entry, num_bytes: int) -> None:
        self._close(entry)
        self.now += 1  # the old size was there at the last operation, the new one wasn't
        self._num_bytes += num_bytes - entry.num_bytes
        entry.num_bytes, entry.born = num_bytes, self.now

    def _close(self, entry: _Entry) -> None:
        if self.now >= self._begun and entry.num_bytes:
            self._ended.append(_Span(entry.kind, entry.num_bytes, entry.born, self.now))

    def assign(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Say what these tensors are for."""
        for tensor in tensors:
            storage = local_part(tensor).untyped_storage()
            entry = self._find(storage)
            if entry is not None:
                if entry.kind == _ELSEWHERE:
                    self._resize(entry, storage.nbytes())
                entry.kind = kind

    def begin_window(self) -> None:
        """Look for the peak from now on."""
        self.now += 1
        self._begun = self.now
        self._ended.clear()
        self._most_bytes, self._most_at = self._num_bytes, self.now

    def peak(self) -> Memory:
        """The memory at the window's peak, by kind."""
        sums: dict[str, int] = {field.name: 0 for field in fields(Memory)}
        at = self._most_at
        for entry in self._live:
            if entry.born <= at and entry.num_bytes:
                sums[entry.kind] += entry.num_bytes
        for span in self._ended:
            if span.born <= at <= span.died:
                sums[span.kind] += span.num_bytes
        return Memory(**sums)


class Following(TorchDispatchMode):
    """Lets a log see the tensors of each operation that is really done."""

    lets_collectives_pass = True  # see weft.comm.fresh

    def __init__(self, log: StorageLog) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called by torch for each operation."""
        if is_for_dtensor(types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = list(tensors_in((args, kwargs)))
        if is_about_values(types, inputs, kwargs):
            self._log.see((*inputs, *tensors_in(result)))
        return result


@contextmanager
def followed_resizes(log: StorageLog) -> Generator[None]:
    """Let the log hear of storages that are resized, while the block runs."""
    inherited = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = inherited(storage, size)
        log.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = inherited  # type: ignore[method-assign]


def assign_model(log: StorageLog, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Tell the log what a model, its gradients and its optimizer have."""
    log.assign("parameters", (*model.parameters(), *model.buffers()))
    log.assign("gradients", (param.grad for param in model.parameters() if param.grad is not None))
    states: Iterable[dict[str, Any]] = optimizer.state.values()
    log.assign(
        "optimizer",
        (value for state in states for value in state.values() if isinstance(value, torch.Tensor)),
    )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a DTensor; a plain tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def _kind_by_caller() -> str:
    """What new memory is for, as far as the nearest caller outside torch tells."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_TORCH) and not name.startswith(_PLANNING):
            if name.startswith(_SHARERS):
                return _ELSEWHERE
            return "communication" if name.startswith(_SENDERS) else "activations"
        frame = frame.f_back
    return "activations"

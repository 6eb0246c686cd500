"""Functions that workers ask each other to run, and what they leave where they ran.

Thread-ranks share this module, so everything is kept apart by the name of the worker that runs.
"""

from __future__ import annotations

import enum
import functools
import os
import threading
import weakref
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.distributed import rpc as torch_rpc

import weft.rpc

GATE_SECS = 30.0

_lock = threading.RLock()  # a finalizer may run in whoever holds it
_counts: dict[tuple[str, str], int] = {}
_gates: dict[tuple[str, str], threading.Event] = {}
_kept: dict[tuple[str, str], Any] = {}
_freed: set[tuple[str, str]] = set()


def begin_anew(worker: str) -> None:
    """Forget what an earlier worker of this name has left here."""
    with _lock:
        for notes in (_counts, _gates, _kept):
            for place in [place for place in notes if place[0] == worker]:
                del notes[place]
        _freed.difference_update({place for place in _freed if place[0] == worker})


def me(lib: str) -> str:
    """The name of the worker whose call this thread runs."""
    return import_module(lib).get_worker_info().name


@dataclass(frozen=True)
class Spot:
    """Where a function ran."""

    worker: str
    pid: int
    thread: int


def spot(lib: str) -> Spot:
    return Spot(me(lib), os.getpid(), threading.get_ident())


def count(lib: str, key: str) -> int:
    """Count a visit, and say how many there were: here, not where the call came from."""
    with _lock:
        place = (me(lib), key)
        _counts[place] = _counts.get(place, 0) + 1
        return _counts[place]


def visits(lib: str, key: str) -> int:
    with _lock:
        return _counts.get((me(lib), key), 0)


def visits_at(worker: str, key: str) -> int:
    """The same, from a thread that runs no call."""
    with _lock:
        return _counts.get((worker, key), 0)


def gate_of(worker: str, key: str) -> threading.Event:
    with _lock:
        return _gates.setdefault((worker, key), threading.Event())


def open_gate(lib: str, key: str) -> None:
    gate_of(me(lib), key).set()


def pass_gate(lib: str, key: str, answer: Any = None) -> Any:
    """Count a visit, wait until the gate is open, give the answer."""
    count(lib, f"at gate {key}")
    assert gate_of(me(lib), key).wait(GATE_SECS), f"gate {key} was never opened"
    return answer


def keep(lib: str, key: str, thing: Any) -> None:
    """Keep a thing on this worker."""
    with _lock:
        _kept[me(lib), key] = thing


def kept(lib: str, key: str) -> Any:
    with _lock:
        return _kept[me(lib), key]


def drop(lib: str, key: str) -> None:
    with _lock:
        thing = _kept.pop((me(lib), key))
    del thing


def echo(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def give(thing: Any) -> Any:
    return thing


def nothing() -> None:
    pass


def add(a: Any, b: Any) -> Any:
    return a + b


class OwnError(ValueError):
    """Takes one text, as most do."""


class DetailedError(RuntimeError):
    """Has attributes, and arguments that aren't its text."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail
        self.later: list[int] = []


class StubbornError(Exception):
    """Can't be built again from its args."""

    def __init__(self, is_bad: bool, text: str) -> None:
        super().__init__(text)


def fail_with(kind: type[BaseException], *args: Any) -> None:
    raise kind(*args)


def deferred(function: Any) -> Any:
    """Both libraries' mark, so that one function serves both."""
    marked = weft.rpc.functions.async_execution(function)
    return torch_rpc.functions.async_execution(marked)


def trail(lib: str, hops: list[str]) -> list[str]:
    """Go on to the next hop from here; the workers that it led through, last first."""
    rpc = import_module(lib)
    here = rpc.get_worker_info().name
    if not hops:
        return [here]
    return [*rpc.rpc_sync(hops[0], trail, (lib, hops[1:])), here]


class Counter:
    """Has a state and a home: the worker that made it."""

    instances = 0

    def __init__(self, start: int = 0) -> None:
        self.value = start
        type(self).instances += 1

    def bump(self, by: int = 1) -> int:
        self.value += by
        return self.value

    def get(self) -> int:
        return self.value

    def address(self) -> tuple[int, int]:
        return os.getpid(), id(self)

    def fail(self, text: str) -> None:
        raise ValueError(text)

    def pass_gate(self, lib: str, key: str) -> int:
        pass_gate(lib, key)
        return self.value

    @classmethod
    def make(cls, start: int) -> Counter:
        return cls(start)

    @staticmethod
    def scale(value: int, by: int) -> int:
        return value * by


class Meta(type):
    """Makes classes."""


class Choices(enum.Enum):
    """Without members, so that a call of it makes another one."""


class Lazy:
    """Computes what it is asked for when it is asked."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    @functools.cached_property
    def mark(self) -> str:
        os.mkdir(self.flag)
        return self.flag


def make_lazy(flag: str) -> Lazy:
    return Lazy(flag)


class Tracked:
    """Says when it is freed on the worker that made it."""

    def __init__(self, lib: str, key: str) -> None:
        self.key = key
        self.made_by = me(lib)
        with _lock:
            _freed.discard((self.made_by, key))
        weakref.finalize(self, _note_freed, self.made_by, key)

    def get(self) -> str:
        return self.key

    def __reduce__(self) -> tuple[Any, ...]:
        return TrackedCopy, (self.key,)


@dataclass(frozen=True)
class TrackedCopy:
    """What to_here gives: a copy doesn't count as the value."""

    key: str


def _note_freed(worker: str, key: str) -> None:
    with _lock:
        _freed.add((worker, key))


def is_freed(lib: str, key: str) -> bool:
    with _lock:
        return (me(lib), key) in _freed


def make_tracked_at_gate(lib: str, key: str) -> Tracked:
    pass_gate(lib, key)
    return Tracked(lib, key)


def make_tracked_rref(lib: str, key: str) -> Any:
    """An RRef of the worker's own, of which nothing stays here."""
    return import_module(lib).RRef(Tracked(lib, key))


def key_of(rref: Any) -> str:
    return rref.to_here().key


def local_key_of(rref: Any) -> str:
    return rref.local_value().key


def tensor_facts(tensor: torch.Tensor) -> dict[str, Any]:
    """What can be said of a tensor where it is."""
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return {
        "shape": tuple(tensor.shape),
        "stride": tensor.stride() if is_strided else None,
        "dtype": str(tensor.dtype),
        "layout": str(tensor.layout),
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "type": type(tensor).__name__,
    }

"""Meet the collectives of watched groups where c10d makes them: in the methods of their classes.

c10d's groups are made in C++ and take no attributes of their own, so the methods are
replaced in the class, while at least one Join is under way and not a moment longer. Groups
that nobody watches pass straight through. Ranks that are threads have groups of their own.

The private name of torch that is used here: `_world.pg_map`, the groups that are there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


class CallWatch(Protocol):
    """Someone through whose hands the calls on a group go."""

    def around_call(
        self, method: str, group: dist.ProcessGroup, args: Sequence[Any], call: Callable[[], Any]
    ) -> Any:
        """Make the call and return its result, or raise instead. Calls made meanwhile are not watched."""
        ...


_mutex = threading.Lock()
_watches: dict[dist.ProcessGroup, list[CallWatch]] = {}  # of each group, the innermost last
_originals: dict[type, dict[str, Any]] = {}  # of each class that is patched; None: inherited
_within = threading.local()  # .is_set: this thread's calls are not watched


def groups_with(ranks: Iterable[int]) -> list[dist.ProcessGroup]:
    """The groups of this rank that hold all these ranks of the world, and more than one."""
    wanted = set(ranks)
    return [
        group
        for group in list(c10d._world.pg_map)
        if group.size() > 1 and wanted.issubset(dist.get_process_group_ranks(group))
    ]


def install_watch(watch: CallWatch, groups: Iterable[dist.ProcessGroup], methods: Iterable[str]) -> None:
    """Let the watch see the calls of these methods on these groups."""
    with _mutex:
        for group in groups:
            _watches.setdefault(group, []).append(watch)
            _patch(type(group), methods)


def remove_watch(watch: CallWatch) -> None:
    """Let it see no more. The last watch that goes leaves the classes as they were."""
    with _mutex:
        for group, watches in list(_watches.items()):
            if watch in watches:
                watches.remove(watch)
                if not watches:
                    del _watches[group]
        for cls in set(_originals) - {type(group) for group in _watches}:
            _unpatch(cls)


def innermost_watch(group: dist.ProcessGroup) -> CallWatch | None:
    """The watch in force on the group."""
    watches = _watches.get(group)
    return watches[-1] if watches else None


@contextmanager
def unwatched() -> Generator[None]:
    """Make calls that no watch sees, on this thread."""
    before = getattr(_within, "is_set", False)
    _within.is_set = True
    try:
        yield
    finally:
        _within.is_set = before


def _patch(cls: type, methods: Iterable[str]) -> None:
    if cls in _originals:
        return
    _originals[cls] = {name: cls.__dict__.get(name) for name in methods if hasattr(cls, name)}
    for name in _originals[cls]:
        setattr(cls, name, _watched(name, getattr(cls, name)))


def _unpatch(cls: type) -> None:
    for name, original in _originals.pop(cls).items():
        if original is None:
            delattr(cls, name)
        else:
            setattr(cls, name, original)


def _watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        watches = _watches.get(group)
        if watches is None or getattr(_within, "is_set", False):
            return original(group, *args, **kwargs)
        _within.is_set = True  # as unwatched() does, in less time: this is on every call's way
        try:
            given = (*args, *kwargs.values())
            return watches[-1].around_call(name, group, given, lambda: original(group, *args, **kwargs))
        finally:
            _within.is_set = False

    return method

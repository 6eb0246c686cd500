"""A value that a worker owns, for itself and for others: on its way, there, or failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from weft.errors import PeerTimeoutError
from weft.rpc.failures import fresh_copy


class GlobalId(NamedTuple):
    """A number that no other worker gives out: for a value (RRefId) or for one RRef to it (ForkId)."""

    created_on: int
    local_id: int

    def __repr__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"


_state_lock = threading.Lock()  # one for all: it is held for a few instructions


class OwnedValue:
    """The value that RRefs stand for. It is set once.

    `holders` are the RRefs that other workers have, and who has each; RRefBook alone changes it.
    """

    __slots__ = ("_callbacks", "error", "holders", "id", "is_set", "promised_by", "value")

    def __init__(self, rref_id: GlobalId) -> None:
        self.id = rref_id
        self.holders: dict[GlobalId, int] = {}
        # Who sent an RRef to it, while the call that makes it has not come yet.
        self.promised_by: int | None = None
        self.is_set = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def set(self, value: Any = None, error: BaseException | None = None) -> None:
        """Set the value, or why there is none, unless that is known. Runs what waits for it."""
        with _state_lock:
            if self.is_set:
                return
            self.value, self.error, self.is_set = value, error, True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def when_set(self, callback: Callable[[], None]) -> None:
        """Run `callback` once the value is set: now if it is, else on the thread that sets it."""
        with _state_lock:
            if not self.is_set:
                self._callbacks.append(callback)
                return
        callback()

    def get(self) -> Any:
        """The value that is set; raises its error where it has one."""
        if self.error is not None:
            raise fresh_copy(self.error)
        return self.value

    def wait(self, timeout_secs: float, blocking: Callable[[], AbstractContextManager[None]]) -> Any:
        """The value, once it is there. 0: however long it takes."""
        if not self.is_set:
            is_there = threading.Event()
            self.when_set(is_there.set)
            with blocking():
                if not is_there.wait(timeout_secs or None):
                    raise PeerTimeoutError(
                        f"RPC ran for more than set timeout ({timeout_secs * 1000:g} ms) and will now be "
                        f"marked with an error: the value of OwnerRRef({self.id}) is not there yet; the "
                        "function that makes it still runs on this worker."
                    )
        return self.get()

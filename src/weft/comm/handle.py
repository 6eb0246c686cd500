"""A collective under way: wait for it once, chain work onto it, keep its error.

A Handle owns the buffers of its collective until it is waited for, so that nobody
frees or reuses them under it. On CUDA `wait` orders the current stream behind the
collective and doesn't stop the host.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch.futures import Future

T = TypeVar("T")
U = TypeVar("U")


class Handle(Generic[T]):
    """The result of a collective that may not be there yet."""

    __slots__ = ("_error", "_explain", "_is_waited", "_on_end", "_result", "_words", "_works")

    def __init__(
        self,
        works: Sequence[dist.Work],
        result: T,
        words: str = "",
        explain: Callable[[BaseException], BaseException] | None = None,
        on_end: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        self._works = works
        self._result = result  # held from the start: it owns the buffers
        self._words = words
        self._explain = explain
        self._on_end = on_end
        self._error: BaseException | None = None
        self._is_waited = False

    def wait(self, timeout: float | None = None) -> T:
        """Return the result when it is there.

        Raises what went wrong, now and at every later call. `timeout`, in seconds,
        limits this wait; the group's own timeout holds in any case.
        """
        if not self._is_waited:
            self._wait(timeout)
        if self._error is not None:
            raise self._error
        return self._result

    def _wait(self, timeout: float | None) -> None:
        try:
            for work in self._works:
                if timeout is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=timeout))
        except Exception as error:
            self._error = error if self._explain is None else self._explain(error)
            if self._error is not error:
                self._error.__cause__ = error
        self._is_waited = True
        self._works = ()
        if self._on_end is not None:
            self._on_end(self._error)
            self._on_end = None

    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._is_waited or all(work.is_completed() for work in self._works)

    def then(self, step: Callable[[T], U]) -> Handle[U]:
        """A handle of `step(result)`. The step runs once, on the thread that waits first."""
        return _Chained(self, step)

    def future(self) -> Future[T]:
        """The result as a torch Future, completed by whoever completes the collective."""
        if self._is_waited or not self._works:
            return _completed(self)
        last = self._works[-1].get_future()
        return last.then(lambda _: self.wait())

    def __del__(self) -> None:
        # Nobody looked whether it went well: with its error gone, gradients could be wrong.
        if not getattr(self, "_is_waited", True) and self._works:
            warnings.warn(
                f"a Handle of {self._words or 'a collective'} was dropped without wait(); its error, if it "
                "had one, is lost and its buffers are no longer held.",
                ResourceWarning,
                stacklevel=2,
            )


class _Chained(Handle[Any]):
    """A handle with a step behind it."""

    __slots__ = ("_parent", "_step")

    def __init__(self, parent: Handle[Any], step: Callable[[Any], Any]) -> None:
        super().__init__((), None)
        self._parent = parent
        self._step = step

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for what comes before, then run the step, once."""
        if not self._is_waited:
            try:
                self._result = self._step(self._parent.wait(timeout))
            except Exception as error:
                self._error = error
            self._is_waited = True
        if self._error is not None:
            raise self._error
        return self._result

    def is_done(self) -> bool:
        """Whether what comes before is done; the step itself runs in `wait`."""
        return self._is_waited or self._parent.is_done()

    def future(self) -> Future[Any]:
        """The step's result as a torch Future."""
        if self._is_waited:
            return _completed(self)
        return self._parent.future().then(lambda _: self.wait())


def _completed(handle: Handle[Any]) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(handle.wait())
    except Exception as error:
        future.set_exception(error)
    return future

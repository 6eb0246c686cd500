"""A collective under way: wait for it once, chain work onto it, keep its error.

A Handle owns the buffers of its collective until it is waited for, so that nobody
frees or reuses them under it. On CUDA `wait` orders the current stream behind the
collective and doesn't stop the host. Any thread may wait, and several may.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from traceback import clear_frames
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.futures import Future, collect_all

from weft.errors import PeerTimeoutError

T = TypeVar("T")
U = TypeVar("U")


class Ticket(Protocol):
    """What a handle needs to know of its call. It holds the call's buffers."""

    words: str

    def explain(self, error: Exception) -> BaseException:
        """The error in weft's terms."""
        ...

    def late(self, timeout_secs: float) -> BaseException:
        """The error of a wait that gives up while the collective goes on."""
        ...

    def waits(self, works: Sequence[dist.Work]) -> None:
        """The calling thread is about to wait for these."""
        ...

    def ended(self, error: BaseException | None, end_secs: float) -> None:
        """The call has ended, at this time of time.perf_counter. May be said more than once."""
        ...


class Handle(Generic[T]):
    """The result of a collective that may not be there yet."""

    __slots__ = ("_error", "_is_followed", "_is_waited", "_mutex", "_result", "_ticket", "_works")

    def __init__(self, works: Sequence[dist.Work], result: T, ticket: Ticket | None = None) -> None:
        self._works = works
        self._result = result
        self._ticket = ticket
        self._error: BaseException | None = None
        self._is_waited = False
        self._is_followed = False  # by somebody who keeps the buffers and learns of the error
        self._mutex = threading.Lock()

    @classmethod
    def done(cls, result: T) -> Handle[T]:
        """A handle of what is there already."""
        handle = cls((), result)
        handle._is_waited = True
        return handle

    def wait(self, timeout: float | None = None) -> T:
        """Return the result when it is there.

        Raises what went wrong, now and at every later call. `timeout`, in seconds,
        limits this wait only: it raises PeerTimeoutError with the ranks that are late,
        the collective goes on, and can be waited for again. The group's own timeout
        holds in any case.
        """
        if not self._is_waited:
            self._wait(timeout)
        if self._error is not None:
            raise self._error
        return self._result

    def _wait(self, timeout: float | None) -> None:
        if not self._mutex.acquire(timeout=-1 if timeout is None else timeout):
            raise self._late(timeout or 0.0)
        try:
            if not self._is_waited:
                self._wait_for_works(timeout)
        finally:
            self._mutex.release()

    def _wait_for_works(self, timeout: float | None) -> None:
        if self._ticket is not None:
            self._ticket.waits(self._works)
        try:
            for work in self._works:
                if timeout is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=timeout))
        except Exception as error:
            if timeout is not None and not all(work.is_completed() for work in self._works):
                if isinstance(error, PeerTimeoutError):
                    raise  # it names the ranks
                raise self._late(timeout) from error
            if timeout is not None:  # it may have been done just after: how it went, this says
                self._wait_for_works(None)
                return
            self._error = _explained(error, self._ticket)
        self._is_waited = True
        if self._ticket is not None:
            self._ticket.ended(self._error, _end_secs(self._works))
        self._works, self._ticket = (), None

    def _late(self, timeout: float) -> BaseException:
        ticket = self._ticket
        return TimeoutError("the collective is not done") if ticket is None else ticket.late(timeout)

    def followed(self) -> Handle[T]:
        """This handle, which may now be dropped in silence: its owner waits, unless an error has come out."""
        self._is_followed = True
        return self

    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._is_waited or all(work.is_completed() for work in self._works)

    def then(self, step: Callable[[T], U]) -> Handle[U]:
        """A handle of `step(result)`. The step runs once, on the thread that waits first."""
        return _Chained(self, step)

    def future(self) -> Future[T]:
        """The result as a torch Future, completed by whoever completes the collective."""
        works, ticket = self._works, self._ticket
        if self._is_waited or not works:
            return _completed(self)
        self._is_followed = True
        try:
            futures = [work.get_future() for work in works]
        except RuntimeError:  # gloo's reduce-scatter has none
            return _completed(self)
        completed = futures[0] if len(futures) == 1 else collect_all(futures)
        return completed.then(_once(_take_result, futures, works, ticket, self._result))

    def __del__(self) -> None:
        # Nobody looked whether it went well: with its error gone, gradients could be wrong.
        if not getattr(self, "_is_waited", True) and not self._is_followed and self._is_missed():
            words = self._ticket.words if self._ticket is not None else "a collective"
            warnings.warn(
                f"a Handle of {words} was dropped without wait(); its error, if it had one, is lost and its "
                "buffers are no longer held.",
                ResourceWarning,
                stacklevel=2,
            )

    def _is_missed(self) -> bool:
        """Whether something is lost when nobody waits."""
        return not all(work.is_completed() and _went_well(work) for work in self._works)


class _Chained(Handle[Any]):
    """A handle with a step behind it."""

    __slots__ = ("_parent", "_step")

    def __init__(self, parent: Handle[Any], step: Callable[[Any], Any]) -> None:
        super().__init__((), None)
        self._parent = parent
        self._step = step

    def _wait(self, timeout: float | None) -> None:
        parent = self._parent
        value, error = None, None
        try:
            value = parent.wait(timeout)
        except Exception as caught:
            if isinstance(caught, TimeoutError) and caught is not parent._error:
                raise  # what comes before goes on: nothing is settled
            error = caught
        self._take_step(value, error)

    def _take_step(self, value: Any, error: BaseException | None) -> None:
        """Settle it, with what came before."""
        with self._mutex:
            if self._is_waited:
                return
            if error is None:
                try:
                    self._result = self._step(value)
                except Exception as caught:
                    error = caught
            self._error = error
            self._is_waited = True

    def followed(self) -> Handle[Any]:
        """This handle, which may now be dropped in silence, and so may what comes before."""
        self._parent.followed()
        return super().followed()

    def is_done(self) -> bool:
        """Whether what comes before is done; the step itself runs in `wait`."""
        return self._is_waited or self._parent.is_done()

    def _is_missed(self) -> bool:
        return True  # its step never ran

    def future(self) -> Future[Any]:
        """The step's result as a torch Future."""
        if self._is_waited:
            return _completed(self)
        return self._parent.future().then(_once(_take_chained, self))


def _take_result(
    _: Future[Any],
    futures: Sequence[Future[Any]],
    works: Sequence[dist.Work],
    ticket: Ticket | None,
    result: T,
) -> T:
    """The result of works that are done, or their error.

    Waiting for a work inside its own completion would never end, so its futures are asked; `Handle.wait`
    stays possible beside it.
    """
    error = None
    try:
        for future in futures:
            future.value()
    except Exception as caught:
        error = _explained(caught, ticket)
    if ticket is not None:
        ticket.ended(error, _end_secs(works))
    if error is not None:
        raise error
    return result


def _take_chained(before: Future[Any], handle: _Chained) -> Any:
    """The result of a chained handle whose parent's future is done."""
    value, error = None, None
    try:
        value = before.value()
    except Exception as caught:
        error = caught
    handle._take_step(value, error)
    return handle.wait()


def _once(step: Callable[..., U], *args: Any) -> Callable[[Future[Any]], U]:
    """`step` as a callback that has let go of its arguments before its result is out.

    A callback is freed by the group's own thread, at any time after those who wait were woken. If it still
    held the group then, it could be the last to do so, and gloo's group aborts the process when a thread of
    its own is the one that frees it.
    """
    held = [args]

    def run(before: Future[Any]) -> U:
        try:
            return step(before, *held.pop())
        except Exception as error:
            clear_frames(error.__traceback__)  # they have the arguments too
            raise

    return run


def _explained(error: Exception, ticket: Ticket | None) -> BaseException:
    explained = error if ticket is None else ticket.explain(error)
    if explained is not error:
        explained.__cause__ = error
    return explained


def _went_well(work: dist.Work) -> bool:
    try:
        work.wait()  # it is completed: this only asks how
    except Exception:
        return False
    return True


def _end_secs(works: Sequence[dist.Work]) -> float:
    """When the last of the works was done, where they know it (the local group's do); now elsewhere."""
    return max((getattr(work, "end_secs", 0.0) for work in works), default=0.0) or time.perf_counter()


def _completed(handle: Handle[Any]) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        result = handle.wait()
        if isinstance(result, torch.Tensor) and result.is_cuda:
            future = Future(devices=[result.device])
        future.set_result(result)
    except Exception as error:
        future.set_exception(error)
    return future

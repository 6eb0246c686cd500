"""What a handle's futures hold, and for how long."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.futures import Future

from weft.comm.handle import Handle


class Work:
    """A work with a future, as gloo's are."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()

    def get_future(self) -> Future[Any]:
        return self.future


class JustDone:
    """A work that ends between a wait that gave up and the look that follows; `error` is its own."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def wait(self, timeout: Any = None) -> bool:
        if timeout is not None:
            raise RuntimeError("Timed out waiting")
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return True


class LateWork(JustDone):
    """A work that ends while its ticket looks for the ranks that are late."""

    is_done = False

    def is_completed(self) -> bool:
        was_done, self.is_done = self.is_done, True
        return was_done


class Ticket:
    words = "all_reduce"

    def explain(self, error: Exception) -> BaseException:
        return error

    def late(self, timeout_secs: float) -> BaseException:
        return TimeoutError(str(timeout_secs))

    def waits(self, works: Sequence[Any]) -> None:
        pass

    def ended(self, error: BaseException | None, end_secs: float) -> None:
        pass


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def fail(tensor: torch.Tensor) -> torch.Tensor:
    raise ValueError("a step that fails")


class Steps:
    """Steps of an object that has the ticket, as calls with an end of their own have their group."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket

    def double(self, tensor: torch.Tensor) -> torch.Tensor:
        return double(tensor)

    def fail(self, tensor: torch.Tensor) -> torch.Tensor:
        return fail(tensor)


def make_step(name: str, ticket: Ticket) -> Any:
    return {"double": double, "fail": fail}.get(name) or getattr(Steps(ticket), name.removeprefix("own "))


@pytest.mark.parametrize("num_works", [1, 2])
@pytest.mark.parametrize("step", ["none", "double", "fail", "own double", "own fail"])
@pytest.mark.parametrize("is_well", [True, False])
def test_the_callback_holds_nothing_when_its_result_is_out(step: str, num_works: int, is_well: bool) -> None:
    """The group's thread frees the callback later: it must not be the last that holds the group."""
    works, ticket = [Work() for _ in range(num_works)], Ticket()
    held = weakref.ref(ticket)
    handle: Handle[Any] = Handle(works, torch.ones(1), ticket)  # type: ignore[arg-type]
    future = (handle if step == "none" else handle.then(make_step(step, ticket))).future()
    del handle, ticket
    seen: list[bool] = []
    # It runs where the result is set: in the middle of the works' own completion.
    future.add_done_callback(lambda _: seen.append(held() is not None))
    assert held() is not None, "until then the buffers are held"
    for work in works:
        if is_well:
            work.future.set_result(None)
        else:
            work.future.set_exception(RuntimeError("the peer is gone"))
    assert seen == [False]
    if is_well and "fail" not in step:
        assert future.wait() == (1 if step == "none" else 2)
    else:
        with pytest.raises(Exception, match="the peer is gone" if not is_well else "a step that fails"):
            future.wait()


def test_a_wait_that_gave_up_just_before_the_end_has_the_result() -> None:
    handle: Handle[str] = Handle([JustDone()], "result", Ticket())  # type: ignore[list-item]
    assert handle.wait(timeout=0.1) == "result"
    broken: Handle[str] = Handle([JustDone(ValueError("why"))], "result", Ticket())  # type: ignore[list-item]
    for _ in range(2):
        with pytest.raises(ValueError, match="why"):
            broken.wait(timeout=0.1)


def test_a_wait_that_gave_up_settles_no_step() -> None:
    handle: Handle[str] = Handle([LateWork()], "result", Ticket())  # type: ignore[list-item]
    chained = handle.then(str.upper)
    with pytest.raises(TimeoutError):
        chained.wait(timeout=0.1)
    assert handle.is_done()  # by now
    assert chained.wait() == "RESULT"

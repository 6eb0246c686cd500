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


@pytest.mark.parametrize("num_works", [1, 2])
@pytest.mark.parametrize("step", [None, double, fail])
@pytest.mark.parametrize("is_well", [True, False])
def test_the_callback_holds_nothing_when_its_result_is_out(step: Any, num_works: int, is_well: bool) -> None:
    """The group's thread frees the callback later: it must not be the last that holds the group."""
    works, ticket = [Work() for _ in range(num_works)], Ticket()
    held = weakref.ref(ticket)
    handle: Handle[Any] = Handle(works, torch.ones(1), ticket)  # type: ignore[arg-type]
    future = (handle if step is None else handle.then(step)).future()
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
    if is_well and step is not fail:
        assert future.wait() == (1 if step is None else 2)
    else:
        with pytest.raises(Exception, match="the peer is gone" if not is_well else "a step that fails"):
            future.wait()

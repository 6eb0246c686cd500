"""Handles: waits, steps and futures, and what they hold for how long."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future

import weft
from tests.local.inputs import assert_still_usable, me, num_ranks
from tests.ranks import run_on
from weft import comm
from weft.comm.handle import Handle

pytestmark = [run_on(threads=3, timeout=60), run_on(weft=3, gloo=3, timeout=20)]


def test_a_second_wait_gives_the_same() -> None:
    tensor = torch.ones(5)
    handle = comm.all_reduce(tensor)
    assert handle.wait() is handle.wait()
    assert handle.is_done()
    assert (tensor == num_ranks()).all(), "reduced twice"


def test_steps_run_once() -> None:
    calls: list[float] = []

    def step(tensor: torch.Tensor) -> float:
        calls.append(tensor[0].item())
        return calls[-1] * 2

    handle = comm.all_reduce(torch.ones(5)).then(step)
    assert isinstance(handle, comm.Handle)
    assert handle.wait() == handle.wait() == 2 * num_ranks()
    assert calls == [num_ranks()]
    chained = comm.all_reduce(torch.ones(5)).then(lambda t: t + 1).then(lambda t: t.sum().item())
    assert chained.wait() == 5 * (num_ranks() + 1)


def test_steps_run_once_between_threads() -> None:
    calls: list[int] = []
    handle = comm.all_reduce(torch.ones(5)).then(lambda tensor: calls.append(1))
    threads = [threading.Thread(target=handle.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1], f"the step ran {len(calls)} times"


def test_a_failing_step_fails_every_wait() -> None:
    def step(tensor: torch.Tensor) -> None:
        calls.append(1)
        raise OSError("disk full")

    calls: list[int] = []
    handle = comm.all_reduce(torch.ones(5)).then(step)
    for _ in range(2):
        with pytest.raises(OSError, match="disk full"):
            handle.wait()
    assert calls == [1]
    assert_still_usable()


def test_futures_of_handles() -> None:
    tensor = torch.ones(5)
    future = comm.all_reduce(tensor).future()
    assert isinstance(future, torch._C.Future), type(future)  # what c10d's own works give
    got = future.wait()
    got = got[0] if isinstance(got, list) else got
    assert (got == num_ranks()).all()
    assert (tensor == num_ranks()).all()
    doubled = comm.all_reduce(torch.ones(5)).then(lambda t: t * 2).future()
    assert (doubled.wait() == 2 * num_ranks()).all()


def test_buffers_are_held_until_the_wait() -> None:
    tensor = torch.ones(100_000)
    alive = weakref.ref(tensor)
    handle = comm.all_reduce(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    assert (handle.wait() == num_ranks()).all()
    out, whole = torch.empty(5), torch.ones(5 * num_ranks())
    alive = weakref.ref(whole)
    handle = comm.reduce_scatter_tensor(out, whole)
    del whole
    gc.collect()
    assert alive() is not None or handle.is_done()
    handle.wait()
    gc.collect()
    assert alive() is None, "an input that is held after the wait"


@run_on(weft=3, gloo=3, timeout=20)
def test_dropped_handles_warn() -> None:
    beside = dist.new_group()
    if dist.get_rank() > 0:
        dist.barrier(group=beside)  # so that rank 0's collective can't be done before its handle is dropped
        comm.all_reduce(torch.ones(5)).wait()
    else:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comm.all_reduce(torch.ones(5))
            gc.collect()
        dist.barrier(group=beside)
        seen = [str(warning.message) for warning in caught if issubclass(warning.category, ResourceWarning)]
        assert len(seen) == 1, seen
        assert "all_reduce" in seen[0]
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm.all_reduce(torch.ones(5)).wait()
        gc.collect()
        dist.barrier()
    assert not [w for w in caught if issubclass(w.category, ResourceWarning)]


@run_on(threads=2, timeout=60)
def test_a_failed_handle_that_is_dropped_warns() -> None:
    handle = comm.all_reduce(torch.ones(3 + dist.get_rank()))
    barrier = comm.barrier()
    barrier.wait()  # behind the collective that failed
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del handle
        gc.collect()
    assert any(issubclass(warning.category, ResourceWarning) for warning in caught)


def test_late_ranks_are_named() -> None:
    """wait(timeout) gives up for now; the collective goes on, and the next wait gets it."""
    late = num_ranks() - 1
    tensor = torch.ones(5)
    if me() == late:
        for rank in range(late):
            comm.recv(torch.empty(1), rank).wait()  # all others have given up once
        comm.all_reduce(tensor).wait()
    else:
        handle = comm.all_reduce(tensor)
        assert not handle.is_done()
        with pytest.raises(weft.PeerTimeoutError):
            handle.wait(timeout=0.2)
        with pytest.raises(weft.PeerTimeoutError) as caught:
            handle.wait(timeout=0.2)
        comm.send(torch.ones(1), late).wait()
        assert caught.value.ranks == (late,), caught.value
        assert isinstance(caught.value, TimeoutError)
        assert "all_reduce" in str(caught.value)
        assert handle.wait() is tensor
    assert (tensor == num_ranks()).all()
    assert_still_usable()


@run_on(threads=3, timeout=60)
@run_on(weft=3, timeout=20)  # gloo notices nothing without the desync check
def test_errors_are_kept() -> None:
    """The same error, at every wait."""
    tensor = torch.ones(5 if me() else 6)
    handle = comm.all_reduce(tensor)
    for _ in range(3):
        with pytest.raises(weft.DesyncError):
            handle.wait()
    assert handle.is_done()
    assert_still_usable()


# Of works made by hand, in one process


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


@run_on()
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


@run_on()
def test_a_wait_that_gave_up_just_before_the_end_has_the_result() -> None:
    handle: Handle[str] = Handle([JustDone()], "result", Ticket())  # type: ignore[list-item]
    assert handle.wait(timeout=0.1) == "result"
    broken: Handle[str] = Handle([JustDone(ValueError("why"))], "result", Ticket())  # type: ignore[list-item]
    for _ in range(2):
        with pytest.raises(ValueError, match="why"):
            broken.wait(timeout=0.1)


@run_on()
def test_a_wait_that_gave_up_settles_no_step() -> None:
    handle: Handle[str] = Handle([LateWork()], "result", Ticket())  # type: ignore[list-item]
    chained = handle.then(str.upper)
    with pytest.raises(TimeoutError):
        chained.wait(timeout=0.1)
    assert handle.is_done()  # by now
    assert chained.wait() == "RESULT"

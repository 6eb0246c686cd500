"""A rank goes its own way, alive, or raises: the others' next call says who, and why."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.local.inputs import assert_still_usable, me, num_ranks
from tests.ranks import run_on
from weft import comm
from weft.testing import shared_pool

pytestmark = run_on(threads=3, weft=3, timeout=60)


def test_a_rank_whose_function_returned_is_named() -> None:
    """It was the last rank's; the others wait for it."""
    if me() == num_ranks() - 1:
        return
    with pytest.raises(weft.PeerError) as caught:
        dist.all_reduce(torch.ones(5))
    assert caught.value.ranks == (num_ranks() - 1,), caught.value
    assert not isinstance(caught.value, weft.PeerTimeoutError | weft.DesyncError), caught.value


def test_a_rank_that_destroyed_its_group_is_named() -> None:
    group = dist.new_group()
    dist.all_reduce(torch.ones(5), group=group)
    if me() == num_ranks() - 1:
        dist.destroy_process_group(group)
    else:
        for _ in range(2):
            with pytest.raises(weft.PeerError) as caught:
                dist.all_reduce(torch.ones(5), group=group)
            assert caught.value.ranks == (num_ranks() - 1,), caught.value
        handle = comm.all_reduce(torch.ones(5), group=group)
        for _ in range(2):
            with pytest.raises(weft.PeerError):
                handle.wait()
    assert_still_usable()  # the default group is another one


def test_a_rank_may_leave_with_a_work_under_way() -> None:
    """Leaving waits for the works that are under way, so that nobody misses a result."""
    group = dist.new_group()
    tensor = torch.ones(300_000)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    if me() == num_ranks() - 1:
        dist.destroy_process_group(group)
    work.wait()
    assert (tensor == num_ranks()).all()


def test_a_rank_that_comes_too_late_is_named_by_all_who_wait() -> None:
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    late = num_ranks() - 1
    if me() != late:
        with pytest.raises(weft.PeerTimeoutError) as caught:
            comm.all_reduce(torch.ones(5), group=group).wait()
        assert caught.value.ranks == (late,), caught.value
        assert f"{late}" in str(caught.value)
        assert "all_reduce" in str(caught.value)
    dist.barrier()


def raises() -> None:
    if me() == num_ranks() - 1:
        raise OSError("disk full")
    dist.all_reduce(torch.ones(5))


def raises_in_the_middle() -> None:
    for i in range(10):
        dist.all_reduce(torch.ones(50_000))
        if i == 5 and me() == 1:
            raise OSError("disk full")


def launch_threads(body: Callable[[], None]) -> list[Any]:
    return weft.launch(body, ranks=3, kind="thread", backend="weft", timeout=60)


def launch_processes(body: Callable[[], None]) -> list[Any]:
    return shared_pool(3).run(body, backend="weft", timeout=60)


@run_on()
@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(launch_threads, marks=pytest.mark.threads),
        pytest.param(launch_processes, marks=pytest.mark.processes),
    ],
)
@pytest.mark.parametrize(("body", "culprit"), [(raises, 2), (raises_in_the_middle, 1)])
def test_the_first_cause_is_told_once(
    body: Callable[[], None], culprit: int, launch: Callable[[Callable[[], None]], list[Any]]
) -> None:
    with pytest.raises(weft.LaunchError) as caught:
        launch(body)
    error = caught.value
    assert isinstance(error.__cause__, OSError)
    assert str(error).startswith(f"launch: rank {culprit} of 3 raised OSError: disk full")
    for rank in {0, 1, 2} - {culprit}:
        report = error.failures[rank]
        assert "PeerError" in report
        assert f"rank {culprit}" in report
        assert report.count("disk full") == 1, report

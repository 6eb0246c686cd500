"""Bodies for ranks: one goes its own way, alive. The others' next call says who, and why."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import weft
from tests.local_bodies.inputs import assert_still_usable, me, num_ranks
from weft import comm


def returns_early() -> str:
    """The last rank's function returns; the others wait for it."""
    if me() == num_ranks() - 1:
        return "returned"
    with pytest.raises(weft.PeerError) as caught:
        dist.all_reduce(torch.ones(5))
    assert caught.value.ranks == (num_ranks() - 1,), caught.value
    assert not isinstance(caught.value, weft.PeerTimeoutError | weft.DesyncError), caught.value
    return "named it"


def destroys_its_group() -> str:
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
    return "named it"


def leaves_with_a_work_under_way() -> str:
    """Leaving waits for the works that are under way, so that nobody misses a result."""
    group = dist.new_group()
    tensor = torch.ones(300_000)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    if me() == num_ranks() - 1:
        dist.destroy_process_group(group)
    work.wait()
    assert (tensor == num_ranks()).all()
    return "named it"


def raises() -> None:
    if me() == num_ranks() - 1:
        raise OSError("disk full")
    dist.all_reduce(torch.ones(5))


def raises_in_the_middle() -> None:
    for i in range(10):
        dist.all_reduce(torch.ones(50_000))
        if i == 5 and me() == 1:
            raise OSError("disk full")


def comes_too_late() -> str:
    """A rank that is not there in time is named, by all who wait."""
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    late = num_ranks() - 1
    if me() != late:
        with pytest.raises(weft.PeerTimeoutError) as caught:
            comm.all_reduce(torch.ones(5), group=group).wait()
        assert caught.value.ranks == (late,), caught.value
        assert f"{late}" in str(caught.value)
        assert "all_reduce" in str(caught.value)
    dist.barrier()
    return "named it"


BODIES = [returns_early, destroys_its_group, leaves_with_a_work_under_way, comes_too_late]

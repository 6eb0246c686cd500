"""What `weft.record` sees."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.local.inputs import me, num_ranks
from tests.ranks import run_on
from weft import comm

pytestmark = [run_on(threads=3, timeout=60), run_on(weft=3, gloo=3, timeout=20)]


def line() -> int:
    """The line that calls this."""
    return sys._getframe(1).f_lineno


def test_every_field_of_an_event() -> None:
    group: Any = dist.new_group()
    before = time.monotonic()
    with weft.record() as events:
        here = line() + 1
        comm.all_reduce(torch.ones(3, 4, dtype=torch.float64), group=group, feature="ddp").wait()
        comm.all_gather_into_tensor(torch.empty(num_ranks() * 5), torch.ones(5)).wait()
        comm.reduce_scatter_tensor(torch.empty(5), torch.ones(num_ranks() * 5)).wait()
        comm.barrier().wait()
        comm.all_gather_object("x").wait()
    first, gathered, scattered, barrier, objects = events
    assert (first.op, first.feature, first.rank) == ("all_reduce", "ddp", me())
    assert first.group == group.group_name
    assert first.group_size == num_ranks()
    assert (first.bytes_in, first.bytes_out) == (96, 96)
    assert first.dtype == torch.float64
    assert (3, 4) in first.shapes
    assert first.error is None
    assert f"test_recording.py:{here} in test_every_field_of_an_event" in first.site, first.site
    assert (gathered.bytes_in, gathered.bytes_out) == (20, 20 * num_ranks())
    assert (scattered.bytes_in, scattered.bytes_out) == (20 * num_ranks(), 20)
    assert gathered.feature == "user"
    assert (barrier.op, barrier.bytes_in, barrier.bytes_out, barrier.dtype) == ("barrier", 0, 0, None)
    assert "test_recording.py" in objects.site
    for event in events:
        assert event.start_secs <= event.end_secs, event
        assert event.group_size == num_ranks()
    assert [event.start_secs for event in events] == sorted(event.start_secs for event in events)
    # The clock is a monotonic one, though which one is not promised: durations fit into the block's.
    assert sum(event.end_secs - event.start_secs for event in events) <= time.monotonic() - before
    assert len(events.by_op("all_reduce")) == 1
    assert len(events.by_feature("user")) == 4
    assert events.total_bytes_in == sum(event.bytes_in for event in events)


def test_every_function_is_recorded() -> None:
    n = num_ranks()
    root = 0
    with weft.record() as events:
        comm.all_reduce(torch.ones(2)).wait()
        comm.all_reduce_coalesced([torch.ones(2), torch.ones(3)]).wait()
        comm.reduce(torch.ones(2), root).wait()
        comm.broadcast(torch.ones(2), root).wait()
        comm.all_gather([torch.ones(2) for _ in range(n)], torch.ones(2)).wait()
        comm.all_gather_into_tensor(torch.ones(2 * n), torch.ones(2)).wait()
        comm.all_gather_into_tensor_coalesced([torch.ones(2 * n)], [torch.ones(2)]).wait()
        comm.reduce_scatter(torch.ones(2), [torch.ones(2) for _ in range(n)]).wait()
        comm.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * n)).wait()
        comm.reduce_scatter_tensor_coalesced([torch.ones(2)], [torch.ones(2 * n)]).wait()
        comm.gather(torch.ones(2), [torch.ones(2) for _ in range(n)] if me() == root else None, root).wait()
        comm.scatter(torch.ones(2), [torch.ones(2) for _ in range(n)] if me() == root else None, root).wait()
        comm.all_to_all([torch.ones(2) for _ in range(n)], [torch.ones(2) for _ in range(n)]).wait()
        comm.all_to_all_single(torch.ones(2 * n), torch.ones(2 * n)).wait()
        comm.barrier().wait()
        comm.all_gather_object(1).wait()
        comm.gather_object(1, root).wait()
        comm.broadcast_object_list([1], root).wait()
        comm.scatter_object_list([1] * n if me() == root else None, root).wait()
        after, before = (me() + 1) % n, (me() - 1) % n
        comm.exchange([("send", torch.ones(2), after), ("recv", torch.ones(2), before)]).wait()
    ops = [event.op for event in events]
    for name in (
        "all_reduce",
        "all_reduce_coalesced",
        "reduce",
        "broadcast",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
        "gather",
        "scatter",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
        "scatter_object_list",
    ):
        assert ops.count(name) == 1, f"{name} is recorded {ops.count(name)} times: {ops}"
    sites = {event.site for event in events}
    assert all("test_recording.py:" in site for site in sites), sites
    assert {event.rank for event in events} == {me()}


def test_nested_blocks() -> None:
    with weft.record() as outer:
        comm.all_reduce(torch.ones(1)).wait()
        with weft.record() as inner:
            comm.broadcast(torch.ones(1), 0).wait()
        comm.barrier().wait()
    comm.all_reduce(torch.ones(1)).wait()
    assert [event.op for event in inner] == ["broadcast"]
    assert [event.op for event in outer] == ["all_reduce", "broadcast", "barrier"]


def test_only_this_ranks_own_calls_are_recorded() -> None:
    """Rank 0 records, the others do not; and the other way round."""
    dist.barrier()
    if me() == 0:
        with weft.record() as events:
            for _ in range(3):
                comm.all_reduce(torch.ones(1)).wait()
        assert [event.rank for event in events] == [0, 0, 0]
    else:
        for _ in range(3):
            comm.all_reduce(torch.ones(1)).wait()
    with weft.record() as events:
        comm.all_reduce(torch.ones(me() + 1 if num_ranks() == 1 else 1)).wait()
    assert [event.rank for event in events] == [me()]


def test_calls_that_are_under_way_at_the_end() -> None:
    with weft.record() as events:
        handle = comm.all_reduce(torch.ones(5))
    handle.wait()
    assert [event.op for event in events] == ["all_reduce"]
    with weft.record() as events:
        assert events == []
        try:
            raise KeyError("x")
        except KeyError:
            comm.all_reduce(torch.ones(5)).wait()
    assert len(events) == 1


def test_errors_are_recorded() -> None:
    with weft.record() as events:
        comm.all_reduce(torch.ones(1)).wait()
        with pytest.raises((ValueError, RuntimeError)):
            comm.broadcast(torch.ones(1), num_ranks() + 3).wait()
        comm.all_reduce(torch.ones(1)).wait()
    assert [event.op for event in events.by_op("all_reduce")] == ["all_reduce"] * 2

"""Bodies for ranks: what `weft.record` and `weft.desync_check` see."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import weft
from tests.local_bodies.inputs import assert_still_usable, me, num_ranks
from weft import comm


def line() -> int:
    """The line that calls this."""
    return sys._getframe(1).f_lineno


def every_field() -> None:
    group = dist.new_group()
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
    assert f"recording.py:{here} in every_field" in first.site, first.site
    assert (gathered.bytes_in, gathered.bytes_out) == (20, 20 * num_ranks())
    assert (scattered.bytes_in, scattered.bytes_out) == (20 * num_ranks(), 20)
    assert gathered.feature == "user"
    assert (barrier.op, barrier.bytes_in, barrier.bytes_out, barrier.dtype) == ("barrier", 0, 0, None)
    assert "recording.py" in objects.site
    for event in events:
        assert event.start_secs <= event.end_secs, event
        assert event.group_size == num_ranks()
    assert [event.start_secs for event in events] == sorted(event.start_secs for event in events)
    # The clock is a monotonic one, though which one is not promised: durations fit into the block's.
    assert sum(event.end_secs - event.start_secs for event in events) <= time.monotonic() - before
    assert len(events.by_op("all_reduce")) == 1
    assert len(events.by_feature("user")) == 4
    assert events.total_bytes_in == sum(event.bytes_in for event in events)


def every_function_is_recorded() -> None:
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
    assert all("recording.py:" in site for site in sites), sites
    assert {event.rank for event in events} == {me()}


def nested() -> None:
    with weft.record() as outer:
        comm.all_reduce(torch.ones(1)).wait()
        with weft.record() as inner:
            comm.broadcast(torch.ones(1), 0).wait()
        comm.barrier().wait()
    comm.all_reduce(torch.ones(1)).wait()
    assert [event.op for event in inner] == ["broadcast"]
    assert [event.op for event in outer] == ["all_reduce", "broadcast", "barrier"]


def only_this_ranks_own() -> None:
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


def under_way_at_the_end() -> None:
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


def errors_are_recorded() -> None:
    with weft.record() as events:
        comm.all_reduce(torch.ones(1)).wait()
        with pytest.raises((ValueError, RuntimeError)):
            comm.broadcast(torch.ones(1), num_ranks() + 3).wait()
        comm.all_reduce(torch.ones(1)).wait()
    assert [event.op for event in events.by_op("all_reduce")] == ["all_reduce"] * 2


BODIES = [
    every_field,
    every_function_is_recorded,
    nested,
    only_this_ranks_own,
    under_way_at_the_end,
    errors_are_recorded,
]


def sites_in(error: BaseException) -> dict[int, str]:
    """Each rank's call site, as the message tells it."""
    found = re.findall(r"rank (\d+)[^\n]*?([\w./]+\.py:\d+)", str(error))
    return {int(rank): site for rank, site in found}


def check_desync(call_of_the_first: Callable[[], object], call_of_the_last: Callable[[], object]) -> None:
    """Fail unless the last rank, doing another thing than the others, is noticed by all, with all lines."""
    is_last = me() == num_ranks() - 1
    with pytest.raises(weft.DesyncError) as caught:
        (call_of_the_last if is_last else call_of_the_first)()
    sites = sites_in(caught.value)
    assert sorted(sites) == list(range(num_ranks())), str(caught.value)
    assert all("recording.py:" in site for site in sites.values()), str(caught.value)
    assert len(set(sites.values())) == 2, str(caught.value)
    assert num_ranks() - 1 in caught.value.ranks, caught.value


def desync_of_every_kind() -> None:
    check_desync(
        lambda: comm.all_reduce(torch.ones(5)).wait(),
        lambda: comm.all_reduce(torch.ones(6)).wait(),
    )
    check_desync(
        lambda: comm.all_reduce(torch.ones(5)).wait(),
        lambda: comm.all_reduce(torch.ones(5, dtype=torch.int32)).wait(),
    )
    check_desync(
        lambda: comm.all_reduce(torch.ones(5)).wait(),
        lambda: comm.all_reduce(torch.ones(5), dist.ReduceOp.MAX).wait(),
    )
    check_desync(
        lambda: comm.all_reduce(torch.ones(5)).wait(),
        lambda: comm.barrier().wait(),
    )
    check_desync(
        lambda: comm.broadcast(torch.ones(5), 0).wait(),
        lambda: comm.broadcast(torch.ones(5), 1).wait(),
    )
    check_desync(
        lambda: comm.all_gather_object(1).wait(),
        lambda: comm.broadcast(torch.ones(5), 0).wait(),
    )
    # Nothing moved, so everybody goes on.
    assert comm.all_reduce(torch.ones(1)).wait().item() == num_ranks()


def in_the_block() -> None:
    with weft.desync_check(timeout=10):
        comm.all_reduce(torch.ones(5)).wait()
        comm.all_gather_object(me()).wait()
        comm.gather(torch.ones(2), [torch.ones(2)] * num_ranks() if me() == 0 else None, 0).wait()
        if me() == 0:
            comm.send(torch.ones(3), 1).wait()
        elif me() == 1:
            comm.recv(torch.ones(3), 0).wait()
        desync_of_every_kind()
    assert_still_usable()


def in_a_group() -> None:
    """Ranks are named as ranks of the world; the group's others don't take part."""
    group = dist.new_group([1, 2])
    with weft.desync_check(timeout=10):
        if me() in (1, 2):
            with pytest.raises(weft.DesyncError) as caught:
                comm.all_reduce(torch.ones(me()), group=group).wait()
            assert sorted(sites_in(caught.value)) == [1, 2], str(caught.value)
    assert_still_usable()


def a_rank_that_does_not_come() -> None:
    with weft.desync_check(timeout=0.5):
        if me() < num_ranks() - 1:
            with pytest.raises(weft.PeerTimeoutError) as caught:
                comm.all_reduce(torch.ones(5)).wait()
            assert caught.value.ranks == (num_ranks() - 1,), caught.value
            assert "all_reduce" in str(caught.value)
    store = dist.distributed_c10d._get_default_store()
    store.add("given up", 1)
    while store.add("given up", 0) < num_ranks():
        pass


DESYNC_BODIES = [in_the_block, in_a_group, a_rank_that_does_not_come]

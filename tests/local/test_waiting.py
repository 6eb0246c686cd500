"""Waits that cost nothing and give up in time, works that go on by themselves, and many ranks."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import weft
from tests.local.inputs import (
    all_gather_single,
    assert_same,
    me,
    num_ranks,
    reduce_scatter_single,
    reduced,
    sample,
    samples,
)
from tests.ranks import run_on

pytestmark = run_on(threads=3, weft=3, timeout=60)

WAIT_SECS = 1.0
CPU_SECS = 0.2


@run_on(threads=64, weft=8, timeout=60, collective_timeout=60, full=True)
def test_more_ranks_than_cores() -> None:
    n = num_ranks()
    for numel in (3, 20_000):
        tensor = sample(me(), numel)
        dist.all_reduce(tensor)
        assert_same(tensor, reduced(samples(numel)), "all_reduce")
        out = torch.empty(n * numel)
        all_gather_single(out, sample(me(), numel))
        assert_same(out, torch.cat(samples(numel)), "all_gather_into_tensor")
        part = torch.empty(numel)
        reduce_scatter_single(part, torch.ones(n * numel))
        assert_same(part, torch.full((numel,), float(n)), "reduce_scatter_tensor")
        tensor = sample(me(), numel)
        dist.broadcast(tensor, n - 1)
        assert_same(tensor, sample(n - 1, numel), "broadcast")
        out = torch.empty(n * 3)
        dist.all_to_all_single(out, torch.full((n * 3,), float(me())))
        assert_same(out, torch.arange(float(n)).repeat_interleave(3), "all_to_all_single")
        work = dist.all_reduce(torch.ones(numel), async_op=True)
        tensor = torch.empty(numel)
        ops = [
            dist.P2POp(dist.isend, sample(me(), numel), (me() + 1) % n),
            dist.P2POp(dist.irecv, tensor, (me() - 1) % n),
        ]
        for message in dist.batch_isend_irecv(ops):
            message.wait()
        assert_same(tensor, sample((me() - 1) % n, numel), "ring")
        work.wait()
    dist.barrier()
    half = dist.new_group(list(range(0, n, 2)))
    if me() % 2 == 0:
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, group=half)
        assert (tensor == len(range(0, n, 2))).all()
    gathered = [None] * n
    dist.all_gather_object(gathered, me())
    assert gathered == list(range(n))


def test_waiting_costs_nothing() -> None:
    """The last rank comes a second late, to each of several kinds of waits."""
    late = num_ranks() - 1
    waits = [
        lambda: dist.all_reduce(torch.ones(5)),
        lambda: dist.all_reduce(torch.ones(300_000)),
        lambda: dist.all_reduce(torch.ones(5), async_op=True).wait(),
        lambda: dist.recv(torch.ones(5), late) if me() != late else send_to_all(),
    ]
    is_thread = threading.current_thread() is not threading.main_thread()
    for i, wait in enumerate(waits):
        dist.barrier()
        if me() == late:
            threading.Event().wait(WAIT_SECS)
            wait()
            continue
        clock = time.thread_time if is_thread else time.process_time
        began, used = time.monotonic(), clock()
        wait()
        waited, used = time.monotonic() - began, clock() - used
        assert waited > 0.9 * WAIT_SECS, f"wait {i} took {waited:.3f} s only"
        assert used < CPU_SECS, f"wait {i}: {used:.3f} s of CPU in {waited:.3f} s"


def send_to_all() -> None:
    for rank in range(num_ranks() - 1):
        dist.send(torch.ones(5), rank)


def test_works_go_on_by_themselves() -> None:
    """Rank 0 starts a collective and doesn't wait. The others finish theirs, and only then rank 0 waits."""
    other = dist.new_group()
    for numel in (5, 300_000):
        tensor, out = sample(me(), numel), torch.empty(num_ranks() * numel)
        works = [
            dist.all_reduce(tensor, async_op=True),
            all_gather_single(out, sample(me(), numel), async_op=True),
        ]
        if me() != 0:
            for work in works:
                work.wait()
            assert_same(tensor, reduced(samples(numel)), "all_reduce that rank 0 doesn't wait for")
            assert_same(out, torch.cat(samples(numel)), "all_gather that rank 0 doesn't wait for")
        dist.barrier(other)  # all others are done, or nobody comes past this
        deadline = time.monotonic() + 10
        while not all(work.is_completed() for work in works):
            assert time.monotonic() < deadline, "not completed, though all others are"
            os.sched_yield()
        assert_same(tensor, reduced(samples(numel)), "all_reduce that is_completed")
        assert_same(out, torch.cat(samples(numel)), "all_gather that is_completed")
        for work in works:
            work.wait()


def test_starting_does_not_wait() -> None:
    """async_op=True returns before the others have come, however many works are under way."""
    tensors = [sample(me(), 1000 * (1 + i), salt=i) for i in range(20)]
    if me() == num_ranks() - 1:
        for rank in range(num_ranks() - 1):
            dist.recv(torch.empty(1), rank)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    else:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        assert not any(work.is_completed() for work in works)
        dist.send(torch.ones(1), num_ranks() - 1)
    for work in works:
        work.wait()
    for i, tensor in enumerate(tensors):
        assert_same(tensor, reduced(samples(1000 * (1 + i), salt=i)), f"all_reduce {i}")


@run_on(threads=2, timeout=60)
def test_a_straggler_does_not_finish_what_others_gave_up() -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
    for numel in (3, 100_000):
        tensor = torch.ones(numel)
        if dist.get_rank() == 0:
            with pytest.raises(weft.PeerTimeoutError):
                dist.all_reduce(tensor, group=group)
            dist.barrier()
            dist.barrier()
            assert (tensor == 1).all()
        else:
            dist.barrier()  # rank 0 has given up
            with pytest.raises(weft.PeerError):
                dist.all_reduce(tensor, group=group)
            dist.barrier()
        group = dist.new_group([0, 1], timeout=timedelta(seconds=0.3))


@run_on(threads=2, timeout=60)
def test_a_future_may_wait_for_the_next_collective() -> None:
    group = dist.group.WORLD
    first, second = torch.ones(3), torch.ones(100_000)

    def step(_: torch.futures.Future[list[torch.Tensor]]) -> float:
        return group.allreduce([second]).get_future().wait()[0].sum().item()

    future = group.allreduce([first]).get_future().then(step)
    assert future.wait() == 200_000.0


@run_on(threads=2, timeout=60)
def test_a_receive_that_was_given_up_for_now_can_be_waited_for_again() -> None:
    if dist.get_rank() == 0:
        tensor = torch.zeros(3)
        handle = weft.comm.recv(tensor, 1)
        with pytest.raises(weft.PeerTimeoutError) as caught:
            handle.wait(timeout=0.05)
        assert caught.value.ranks == (1,)
        dist.barrier()
        assert (handle.wait() == 7).all()
    else:
        dist.barrier()
        weft.comm.send(torch.full((3,), 7.0), 0).wait()

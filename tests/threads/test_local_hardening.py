"""The local group in the corners: stragglers, callbacks that wait, late messages."""

from __future__ import annotations

import gc
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import weft
from weft.testing import on_ranks


@on_ranks(2)
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


@on_ranks(2)
def test_a_future_may_wait_for_the_next_collective() -> None:
    group = dist.group.WORLD
    first, second = torch.ones(3), torch.ones(100_000)

    def step(_: torch.futures.Future[list[torch.Tensor]]) -> float:
        return group.allreduce([second]).get_future().wait()[0].sum().item()

    future = group.allreduce([first]).get_future().then(step)
    assert future.wait() == 200_000.0


@on_ranks(2)
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


@on_ranks(2)
def test_a_failed_handle_that_is_dropped_warns() -> None:
    handle = weft.comm.all_reduce(torch.ones(3 + dist.get_rank()))
    barrier = weft.comm.barrier()
    barrier.wait()  # behind the collective that failed
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del handle
        gc.collect()
    assert any(issubclass(warning.category, ResourceWarning) for warning in caught)


@on_ranks(2)
def test_an_average_of_small_integers_does_not_wrap() -> None:
    tensor = torch.tensor([100, -100], dtype=torch.int8)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    assert tensor.tolist() == [100, -100]

"""What is only where ranks are processes: a kernel that forbids to reach into another one, and forks."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.distributed as dist

import weft
from tests.ranks import run_on

SIZES = (3, 9_000, 300_001)


def _value(rank: int, numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) % 97 + rank


def check_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for numel in SIZES:
        total = torch.stack([_value(peer, numel) for peer in range(size)]).sum(0)
        tensor = _value(rank, numel)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, total)
        tensor = _value(rank, numel)
        dist.reduce(tensor, 1)
        assert torch.equal(tensor, total if rank == 1 else _value(rank, numel))
        outs = [torch.empty(numel) for _ in range(size)]
        dist.all_gather(outs, _value(rank, numel))
        assert all(torch.equal(out, _value(peer, numel)) for peer, out in enumerate(outs))
        part = torch.empty(numel)
        dist.reduce_scatter(part, [_value(rank + peer, numel) for peer in range(size)])
        assert torch.equal(part, torch.stack([_value(peer + rank, numel) for peer in range(size)]).sum(0))
        tensor = _value(rank, numel)
        dist.broadcast(tensor, size - 1)
        assert torch.equal(tensor, _value(size - 1, numel))


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_through_shared_buffers(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DIRECT_COPY", "0")
    weft.launch(check_collectives, ranks=ranks, timeout=60)


@pytest.mark.processes
def test_one_rank_that_forbids_it_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks agree on the way: if one may not be read, none is."""
    monkeypatch.setenv("WEFT_DIRECT_COPY", "1")
    weft.launch(check_with_one_forbidding, ranks=2, timeout=60)


def check_with_one_forbidding() -> None:
    os.environ["WEFT_DIRECT_COPY"] = "0" if dist.get_rank() == 1 else "1"
    group = dist.new_group(list(range(dist.get_world_size())))
    tensor = _value(dist.get_rank(), 300_001)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, _value(0, 300_001) + _value(1, 300_001))


@run_on(weft=2, timeout=60)
def test_a_forked_child_cannot_touch_its_parents_group() -> None:
    if dist.get_rank() == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of forks in a process with threads
            child = os.fork()
        if child == 0:
            try:
                dist.all_reduce(torch.ones(1))
            except weft.StateError:
                dist.destroy_process_group()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]

"""The local group where the kernel forbids reaching into another process: through shared buffers."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import weft

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


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_through_shared_buffers(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DIRECT_COPY", "0")
    weft.launch(check_collectives, ranks=ranks, timeout=60)


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

"""Ranks that die or come too late on gloo: the door says who."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft
from tests.local_bodies.deaths import go, nothing_left_behind, run_to_the_end, see, sightings
from tests.local_bodies.inputs import me, num_ranks
from weft import comm
from weft.testing.pool import shared_pool


def one_dies(folder: Path) -> None:
    comm.all_reduce(torch.ones(4)).wait()
    victim = 1
    if me() == victim:
        go(folder, "kill")
    see(folder, victim, "all_reduce", lambda: comm.all_reduce(torch.ones(4)).wait())


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    with nothing_left_behind():
        run_to_the_end(one_dies, (tmp_path,), ranks=3, backend="gloo", collective_timeout=20)
    seen = sightings(tmp_path)
    assert [s.rank for s in seen] == [0, 2]
    for sighting in seen:
        assert sighting.ranks == [1], sighting
        assert sighting.error == "PeerError", sighting
        assert "all_reduce" in sighting.message


def one_is_late() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    late = num_ranks() - 1
    if me() != late:
        handle = comm.all_reduce(torch.ones(4), group=group)
        for _ in range(2):
            with pytest.raises(weft.PeerTimeoutError) as caught:
                handle.wait()
            assert caught.value.ranks == (late,), caught.value
        assert "all_reduce" in str(caught.value)
        assert isinstance(caught.value, TimeoutError)
    store = dist.distributed_c10d._get_default_store()
    store.add("over", 1)
    while store.add("over", 0) < num_ranks():
        pass


@pytest.mark.full
def test_a_late_rank_is_named() -> None:
    shared_pool(3).run(one_is_late, backend="gloo", timeout=60)

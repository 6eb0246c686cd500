"""Who is blamed for a failed collective: ranks that die or are late on gloo, and what notes are worth."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import weft
from tests.local.deaths import go, nothing_left_behind, run_to_the_end, see, sightings
from tests.local.inputs import me, num_ranks
from tests.ranks import run_on
from weft import comm
from weft.comm import blame
from weft.errors import PeerError
from weft.trust import SealedStore, install_secret, job_secret, make_secret, world_name


def one_dies(folder: Path) -> None:
    comm.all_reduce(torch.ones(4)).wait()
    victim = 1
    if me() == victim:
        go(folder, "kill")
    see(folder, victim, "all_reduce", lambda: comm.all_reduce(torch.ones(4)).wait())


@pytest.mark.processes
def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    with nothing_left_behind():
        run_to_the_end(one_dies, (tmp_path,), ranks=3, backend="gloo", collective_timeout=20)
    seen = sightings(tmp_path)
    assert [s.rank for s in seen] == [0, 2]
    for sighting in seen:
        assert sighting.ranks == [1], sighting
        assert sighting.error == "PeerError", sighting
        assert "all_reduce" in sighting.message


@run_on(gloo=3, timeout=60, full=True)
def test_a_late_rank_is_named() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    late = num_ranks() - 1
    if me() != late:
        handle = comm.all_reduce(torch.ones(4), group=group)
        errors: list[weft.PeerTimeoutError] = []
        for _ in range(2):
            with pytest.raises(weft.PeerTimeoutError) as caught:
                handle.wait()
            assert caught.value.ranks == (late,), caught.value
            errors.append(caught.value)
        assert "all_reduce" in str(errors[-1])
        assert isinstance(errors[-1], TimeoutError)
    store = dist.distributed_c10d._get_default_store()
    store.add("over", 1)
    while store.add("over", 0) < num_ranks():
        pass


# Notes in the group's store

WORDS = "group 'g' of 3 ranks"
GROUP = cast(Any, SimpleNamespace())


@pytest.fixture(params=[True, False], ids=["secret", "no secret"])
def secret(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = job_secret()
    install_secret(make_secret() if request.param else None)
    yield request.param
    install_secret(before)


@pytest.fixture
def store(secret: bool, monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    """The store of a group of ranks 0, 1 and 2, as rank 0 sees it."""
    store = dist.HashStore()
    state = SimpleNamespace(rank=0, global_rank=0, ranks=(0, 1, 2), name="g", words=lambda: WORDS)
    monkeypatch.setattr(blame, "state_of", lambda group: state)
    monkeypatch.setattr(blame, "store_of", lambda group: store)
    monkeypatch.setattr(blame, "_GRACE_SECS", 0.1)
    return store


def leave_note(store: Any, rank: int, note: object) -> None:
    sealed = SealedStore(store, job_secret(), group=f"{WORDS} in world '{world_name()}'", rank=rank)
    sealed.set(f"weft/failed/g/{rank}", json.dumps(note))


def explain() -> PeerError:
    error = blame.explain(RuntimeError("Connection closed by peer"), GROUP, 5, "all_reduce")
    assert isinstance(error, PeerError)
    return error


def test_a_rank_without_a_note_has_not_arrived(store: dist.HashStore) -> None:
    leave_note(store, 1, [5, "all_reduce"])
    error = explain()
    assert error.ranks == (2,)
    assert "Not arrived: ranks [2]." in str(error)


def test_a_rank_in_another_call_is_named(store: dist.HashStore) -> None:
    leave_note(store, 1, [4, "broadcast"])
    leave_note(store, 2, [5, "all_reduce"])
    error = explain()
    assert error.ranks == (1,)
    assert "Rank 1 was at call 4, broadcast." in str(error)


@pytest.mark.parametrize(
    "note",
    [
        None,
        [],
        [5],
        ["5", "x"],
        [True, "x"],
        [-1, "x"],
        [1 << 70, "x"],
        [5, "x" * 10_000],
        {"a": 1},
        [[5], "x"],
    ],
)
def test_a_note_of_other_types_blames_nobody(note: object, store: dist.HashStore) -> None:
    leave_note(store, 1, note)
    error = explain()
    assert error.ranks == (2,)
    assert "The note of rank 1 was refused: " in str(error)


@pytest.mark.parametrize("value", [b"", b"{", b"\xff" * 64, b"x" * 10_000_000, b"[" * 100_000])
def test_a_malformed_note_blames_nobody(value: bytes, store: dist.HashStore) -> None:
    store.set("weft/failed/g/1", value)
    error = explain()
    assert error.ranks == (2,)
    assert "The note of rank 1 was refused: " in str(error)
    assert len(str(error)) < 2000


def test_a_note_of_another_world_blames_nobody(
    store: dist.HashStore, secret: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key is the same in the world after, and one who writes to the store may have kept it."""
    leave_note(store, 1, [5, "all_reduce"])
    leave_note(store, 2, [5, "all_reduce"])
    assert explain().ranks == ()
    monkeypatch.setattr(blame, "world_name", lambda: "the next")
    assert ("The note of rank 1 was refused: " in str(explain())) == secret


def test_a_strangers_note_blames_nobody(store: dist.HashStore, secret: bool) -> None:
    store.set("weft/failed/g/1", json.dumps([4, "a lie"]))
    leave_note(store, 2, [5, "all_reduce"])
    error = explain()
    assert ("a lie" in str(error)) is not secret
    if secret:
        assert error.ranks == ()
        assert "the value 'weft/failed/g/1' of rank 1" in str(error)

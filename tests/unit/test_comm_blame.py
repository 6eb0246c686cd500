"""Notes in a group's store blame nobody when they are not of the rank that they name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from weft.comm import blame
from weft.errors import PeerError
from weft.trust import SealedStore, install_secret, job_secret, make_secret, world_name

WORDS = "group 'g' of 3 ranks"
GROUP = cast(Any, SimpleNamespace())


@pytest.fixture(autouse=True, params=[True, False], ids=["secret", "no secret"])
def secret(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = job_secret()
    install_secret(make_secret() if request.param else None)
    yield request.param
    install_secret(before)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
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

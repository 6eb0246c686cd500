"""The desync check believes what the ranks of its group have written into their store, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from weft.comm import desync
from weft.errors import DesyncError, TamperedError
from weft.trust import SealedStore, install_secret, job_secret, make_secret, world_name

WORDS = "group 'g' of 2 ranks"
CALL = SimpleNamespace(
    group=None, op="all_reduce", number=5, inputs=(torch.ones(3),), outputs=(), detail="sum",
    site="train.py:3", words=lambda: "all_reduce",
)  # fmt: skip
SAME = [["all_reduce", [[3]], ["torch.float32"], "sum"], "all_reduce", "train.py:3"]
OTHER = [["broadcast", [[3]], ["torch.float32"], "0"], "broadcast", "train.py:9"]
KEY = "weft/desync/g/5/1"


@pytest.fixture(autouse=True)
def secret() -> Iterator[None]:
    before = job_secret()
    install_secret(make_secret())
    yield
    install_secret(before)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
    """The store of a group of ranks 0 and 1, as rank 0 sees it."""
    store = dist.HashStore()
    state = SimpleNamespace(rank=0, global_rank=0, ranks=(0, 1), name="g", words=lambda: WORDS)
    monkeypatch.setattr(desync, "state_of", lambda group: state)
    monkeypatch.setattr(desync, "store_of", lambda group: store)
    return store


def write(store: Any, entry: str, group: str | None = None) -> None:
    """Write rank 1's entry, sealed."""
    group = f"{WORDS} in world '{world_name()}'" if group is None else group
    SealedStore(store, job_secret(), group=group, rank=1).set(KEY, entry)


def check() -> None:
    desync.DesyncCheck(timeout_secs=5).started(cast(Any, CALL))


def test_ranks_that_call_the_same_go_on(store: dist.HashStore) -> None:
    write(store, json.dumps(SAME))
    check()


def test_a_rank_that_calls_another_is_named(store: dist.HashStore) -> None:
    write(store, json.dumps(OTHER))
    with pytest.raises(DesyncError, match=r"rank 1: broadcast at train\.py:9"):
        check()


@pytest.mark.parametrize("entry", [SAME, OTHER, [], None, {"a": 1}, [[], 1, "x"]])
def test_an_entry_of_a_stranger_is_refused(entry: object, store: dist.HashStore) -> None:
    store.set(KEY, json.dumps(entry))
    with pytest.raises(TamperedError, match=KEY):
        check()


@pytest.mark.parametrize("world", ["another", ""])
def test_an_entry_of_another_group_or_world_is_refused(world: str, store: dist.HashStore) -> None:
    group = f"{WORDS} in world '{world}'" if world else "group 'h' of 2 ranks in world ''"
    write(store, json.dumps(OTHER), group)
    with pytest.raises(TamperedError, match=KEY):
        check()


@pytest.mark.parametrize("entry", [[], None, {"a": 1}, [[], 1, "x"], [1, "x", "y"]])
def test_an_entry_of_other_types_is_refused(entry: object, store: dist.HashStore) -> None:
    write(store, json.dumps(entry))
    with pytest.raises(TamperedError, match=KEY):
        check()

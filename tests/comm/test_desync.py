"""The desync check: ranks that call different things are told where; it believes its group's ranks alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import weft
from tests.local.inputs import assert_still_usable, me, num_ranks
from tests.ranks import run_on
from weft import comm
from weft.comm import desync
from weft.errors import DesyncError, TamperedError
from weft.trust import SealedStore, install_secret, job_secret, make_secret, world_name

pytestmark = [run_on(threads=3, timeout=60), run_on(weft=3, gloo=3, timeout=20)]


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
    assert all("test_desync.py:" in site for site in sites.values()), str(caught.value)
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


def test_a_rank_that_calls_another_is_named_with_every_line() -> None:
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


def test_ranks_of_a_group_are_named_as_ranks_of_the_world() -> None:
    """The world's others don't take part."""
    group = dist.new_group([1, 2])
    with weft.desync_check(timeout=10):
        if me() in (1, 2):
            with pytest.raises(weft.DesyncError) as caught:
                comm.all_reduce(torch.ones(me()), group=group).wait()
            assert sorted(sites_in(caught.value)) == [1, 2], str(caught.value)
    assert_still_usable()


def test_a_rank_that_does_not_come_is_named() -> None:
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


@run_on()
@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("backend", ["weft", "gloo"])
def test_the_environment_turns_the_check_on(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DESYNC_CHECK", "1")
    weft.launch(desync_of_every_kind, ranks=2, backend=backend, timeout=60)
    assert os.environ["WEFT_DESYNC_CHECK"] == "1"


# What it reads in the store

WORDS = "group 'g' of 2 ranks"
CALL = SimpleNamespace(
    group=None, op="all_reduce", number=5, inputs=(torch.ones(3),), outputs=(), detail="sum",
    site="train.py:3", words=lambda: "all_reduce",
)  # fmt: skip
SAME = [["all_reduce", [[3]], ["torch.float32"], "sum"], "all_reduce", "train.py:3"]
OTHER = [["broadcast", [[3]], ["torch.float32"], "0"], "broadcast", "train.py:9"]
KEY = "weft/desync/g/5/1"


@pytest.fixture
def secret() -> Iterator[None]:
    before = job_secret()
    install_secret(make_secret())
    yield
    install_secret(before)


@pytest.fixture
def store(secret: None, monkeypatch: pytest.MonkeyPatch) -> dist.HashStore:
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


@run_on()
def test_ranks_that_call_the_same_go_on(store: dist.HashStore) -> None:
    write(store, json.dumps(SAME))
    check()


@run_on()
def test_an_entry_of_a_rank_that_calls_another_names_it(store: dist.HashStore) -> None:
    write(store, json.dumps(OTHER))
    with pytest.raises(DesyncError, match=r"rank 1: broadcast at train\.py:9"):
        check()


@run_on()
@pytest.mark.parametrize("entry", [SAME, OTHER, [], None, {"a": 1}, [[], 1, "x"]])
def test_an_entry_of_a_stranger_is_refused(entry: object, store: dist.HashStore) -> None:
    store.set(KEY, json.dumps(entry))
    with pytest.raises(TamperedError, match=KEY):
        check()


@run_on()
@pytest.mark.parametrize("world", ["another", ""])
def test_an_entry_of_another_group_or_world_is_refused(world: str, store: dist.HashStore) -> None:
    group = f"{WORDS} in world '{world}'" if world else "group 'h' of 2 ranks in world ''"
    write(store, json.dumps(OTHER), group)
    with pytest.raises(TamperedError, match=KEY):
        check()


@run_on()
@pytest.mark.parametrize("entry", [[], None, {"a": 1}, [[], 1, "x"], [1, "x", "y"]])
def test_an_entry_of_other_types_is_refused(entry: object, store: dist.HashStore) -> None:
    write(store, json.dumps(entry))
    with pytest.raises(TamperedError, match=KEY):
        check()

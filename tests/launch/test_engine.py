"""Which engine ranks take and why, how they agree on it, and how nccl's ranks are prepared."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from weft.errors import ConfigError, PeerTimeoutError, TamperedError
from weft.launcher import agreement, child, init, launch
from weft.launcher.agreement import RankVariables, agree_on_facts, wait_for_first
from weft.launcher.backends import GPU_EACH, EngineFacts, announce, choose_engine, prepare_nccl
from weft.launcher.payload import encode_call
from weft.launcher.stores import corner_of, memory_store
from weft.launcher.wire import Job
from weft.trust import make_secret

T = TypeVar("T")
FACTS = EngineFacts(4)


@pytest.mark.parametrize(
    ("facts", "backend", "reason"),
    [
        (replace(FACTS, num_gpus=4), "cpu:gloo,cuda:nccl", "ranks of one host with a GPU each"),
        (replace(FACTS, num_gpus=4, has_nccl=False), "weft", "but this build of torch has no nccl"),
        (replace(FACTS, num_gpus=4, are_threads=True), "weft", "threads of one process"),
        (replace(FACTS, num_gpus=1), "weft", "ranks of one host that share a GPU"),
        (replace(FACTS, num_gpus=3), "weft", "ranks of one host that share 3 GPUs"),
        (FACTS, "weft", "ranks of one host that have no GPU"),
        (replace(FACTS, obstacle="no memfd"), "gloo", "the local group (weft) can't run: no memfd"),
        (replace(FACTS, num_ranks=1, num_gpus=1), "weft", "one rank has no peers"),
        (
            replace(FACTS, is_one_host=False, num_gpus=4),
            "cpu:gloo,cuda:nccl",
            "several hosts with a GPU each",
        ),
        (replace(FACTS, is_one_host=False, num_gpus=2), "gloo", "several hosts that share 2 GPUs"),
        (replace(FACTS, is_one_host=False), "gloo", "several hosts that have no GPU"),
    ],
)
def test_the_engine_follows_the_hardware(facts: EngineFacts, backend: str, reason: str) -> None:
    choice = choose_engine(facts)
    assert choice.backend == backend
    assert reason in choice.reason


@pytest.mark.threads
@pytest.mark.parametrize(
    ("gpus", "backend", "sharing"),
    [
        (["a", "b", "c", "d"], "cpu:gloo,cuda:nccl", [False] * 4),  # also where each sees its own only
        (["a", "a", "b", "b"], "weft", [True] * 4),
        (["a", "b", "c", "a"], "weft", [True, False, False, True]),
        (["a", "b", "c", None], "weft", [False] * 4),  # a rank without one: nccl can't reach it
        ([None] * 4, "weft", [False] * 4),
    ],
)
def test_ranks_agree_on_the_engine(
    gpus: list[str | None], backend: str, sharing: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "_gpu_of", lambda local_rank: gpus[local_rank])
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    store = memory_store()

    found = agree_on_threads(lambda rank: agree_on_facts(store, RankVariables(rank, 4, rank, 4), None))
    assert {choose_engine(facts).backend for facts, _ in found} == {backend}
    assert [shares for _, shares in found] == sharing


def agree_on_threads(agree: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(agree, range(4)))


@pytest.mark.threads
@pytest.mark.parametrize(("hosts", "backend"), [("aaaa", "weft"), ("aabb", "gloo"), ("aaab", "gloo")])
def test_hosts_are_told_apart_by_what_they_are(
    hosts: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not by LOCAL_WORLD_SIZE: agents of torchrun may share a host, batch systems don't set it."""
    here = threading.local()
    monkeypatch.setattr(agreement, "host_identity", lambda: here.name)
    store = memory_store()

    def agree(rank: int) -> EngineFacts:
        here.name = hosts[rank]
        return agree_on_facts(store, RankVariables(rank, 4, local_rank=rank % 2, local_size=2), None)[0]

    assert {choose_engine(facts).backend for facts in agree_on_threads(agree)} == {backend}


@pytest.mark.threads
def test_ranks_that_ask_for_different_engines_all_hear_of_it() -> None:
    store = memory_store()

    def agree(rank: int) -> str:
        with pytest.raises(ConfigError) as caught:
            agree_on_facts(store, RankVariables(rank, 4, rank, 4), "gloo" if rank == 2 else None)
        return str(caught.value)

    (told,) = set(agree_on_threads(agree))
    assert told.startswith("init: rank 0 asks for the default backend, and rank 2 for backend 'gloo'.")


FORGED = [
    b"",
    b"{",
    b"{}",
    b"[" * 100_000,
    b"x" * 10_000_000,
    b'{"host": 1, "asked": 2, "gpu": 3, "obstacle": 4, "has_nccl": 5, "number": 6}',
    b'{"num_gpus": true, "is_one_host": 1, "has_nccl": 1, "obstacle": 1, "shared_gpus": 1, "numbers": 1, '
    b'"problem": 1, "refusal": 1}',
]


@pytest.mark.threads
@pytest.mark.parametrize("is_sealed", [True, False])
@pytest.mark.parametrize("key", ["facts/1", "summary"])
@pytest.mark.parametrize("value", FORGED, ids=range(len(FORGED)))
def test_what_a_stranger_writes_in_the_ranks_store_is_refused(
    value: bytes, key: str, is_sealed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rank that reads it, and where that is rank 0 by all of them."""
    store, secret = memory_store(), make_secret() if is_sealed else None
    wait = agreement._wait

    def wait_while_someone_writes(store: Any, keys: list[str], variables: RankVariables) -> None:
        wait(store, keys, variables)
        if key in keys:
            store.set(key, value)

    monkeypatch.setattr(agreement, "_wait", wait_while_someone_writes)

    def agree(rank: int) -> object:
        try:
            return agree_on_facts(store, RankVariables(rank, 4, rank, 4), None, secret)
        except TamperedError as error:
            return error

    found = agree_on_threads(agree)
    assert all(isinstance(outcome, TamperedError) for outcome in found[1:])
    assert isinstance(found[0], TamperedError) is (key == "facts/1")


@pytest.mark.threads
@pytest.mark.parametrize(
    ("key", "field"), [("facts/1", "host"), ("facts/1", "asked"), ("summary", "obstacle")]
)
def test_well_formed_facts_of_a_stranger_are_refused(
    key: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank has written, with another text in one field: its nonce can be read in the store."""
    store, secret = memory_store(), make_secret()
    wait = agreement._wait

    def wait_while_someone_writes(store: Any, keys: list[str], variables: RankVariables) -> None:
        wait(store, keys, variables)
        if key in keys:
            sealed = store.get(key)
            start = sealed.rindex(b'{"')  # the tag before it may hold any byte
            changed = json.dumps({**json.loads(sealed[start:]), field: "another one"}).encode()
            store.set(key, sealed[:start] + changed)

    monkeypatch.setattr(agreement, "_wait", wait_while_someone_writes)

    def agree(rank: int) -> object:
        try:
            return agree_on_facts(store, RankVariables(rank, 4, rank, 4), None, secret)
        except (TamperedError, ConfigError) as error:
            return error

    found = agree_on_threads(agree)
    assert all(isinstance(outcome, TamperedError) for outcome in found[0 if key == "facts/1" else 1 :])


@pytest.mark.threads
def test_facts_and_summaries_of_another_meeting_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are sealed with this job's secret, for a meeting of this name."""
    secret = make_secret()
    before = memory_store()
    agree_on_threads(lambda rank: agree_on_facts(before, RankVariables(rank, 4, rank, 4), None, secret))
    wait = agreement._wait

    def went_on(rank: int, store: Any) -> bool:
        try:
            agree_on_facts(store, RankVariables(rank, 4, rank, 4), None, secret)
        except TamperedError:
            return False
        return True

    for key, refusing in (("facts/1", [1]), ("summary", [1, 2, 3])):

        def wait_while_someone_writes(store: Any, keys: list[str], variables: RankVariables, key: str = key):
            wait(store, keys, variables)
            if key in keys:
                store.set(key, before.get(key))

        monkeypatch.setattr(agreement, "_wait", wait_while_someone_writes)

        outcomes = agree_on_threads(partial(went_on, store=memory_store()))
        assert [rank for rank in range(4) if not outcomes[rank]] == refusing


def test_a_rank_that_never_calls_init_is_named() -> None:
    store = corner_of(memory_store(), "here", timedelta(seconds=0.05))
    with pytest.raises(PeerTimeoutError, match=r"Not there: \[1\] of 2") as caught:
        agree_on_facts(store, RankVariables(0, 2, local_rank=0, local_size=2), None)
    assert caught.value.ranks == (1,)


def test_a_first_rank_that_never_calls_init_is_named_alone() -> None:
    store = corner_of(memory_store(), "here", timedelta(seconds=0.05))
    message = r"rank 2 timed out waiting .* Not there: \[0\] of 4"
    with pytest.raises(PeerTimeoutError, match=message) as caught:
        wait_for_first(store, RankVariables(2, 4, local_rank=2, local_size=4))
    assert caught.value.ranks == (0,)


@pytest.mark.threads
def test_one_line_says_which_engine_and_why(caplog: pytest.LogCaptureFixture) -> None:
    announce.cache_clear()
    caplog.set_level("INFO", "weft")
    for _ in range(2):
        launch(init, ranks=3, kind="thread")
    assert caplog.messages == ["weft: 3 ranks on backend 'weft': threads of one process"]


NCCL = ("NCCL_HOSTID", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME")


@pytest.fixture
def no_nccl_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NCCL, "MASTER_PORT"):  # which a rank sets
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_nccl_variables")
@pytest.mark.parametrize("backend", ["nccl", GPU_EACH, "NCCL"])
def test_nccl_ranks_that_share_a_gpu_are_hosts_of_their_own(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    announce.cache_clear()
    caplog.set_level("INFO", "weft")
    hosts: list[str] = []
    for rank in (1, 2, 0):
        os.environ.pop("NCCL_HOSTID", None)
        prepare_nccl(backend, rank, shares_gpu=True, is_one_host=True)
        hosts.append(os.environ["NCCL_HOSTID"])
        assert bool(caplog.messages) is (rank == 0)
    assert len(set(hosts)) == 3
    assert (os.environ["NCCL_IB_DISABLE"], os.environ["NCCL_SOCKET_IFNAME"]) == ("1", "lo")
    (line,) = caplog.messages
    assert line.startswith("weft: nccl ranks share a GPU and talk over sockets: for tests.")
    assert caplog.records[0].levelname == "WARNING"


@pytest.mark.usefixtures("no_nccl_variables")
@pytest.mark.parametrize(("backend", "shares_gpu"), [(GPU_EACH, False), ("weft", True), ("cpu:gloo", True)])
def test_other_ranks_are_left_as_they_are(
    backend: str, shares_gpu: bool, caplog: pytest.LogCaptureFixture
) -> None:
    prepare_nccl(backend, 0, shares_gpu=shares_gpu, is_one_host=True)
    assert not set(NCCL) & set(os.environ)
    assert not caplog.messages


@pytest.mark.usefixtures("no_nccl_variables")
def test_nccl_ranks_of_several_hosts_find_their_own_way_and_keep_what_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "mine")
    prepare_nccl("nccl", 1, shares_gpu=True, is_one_host=False)
    assert os.environ["NCCL_HOSTID"] == "mine"
    assert "NCCL_SOCKET_IFNAME" not in os.environ


@pytest.mark.usefixtures("no_nccl_variables")
@pytest.mark.parametrize("backend", ["nccl", "NCCL", GPU_EACH])
@pytest.mark.parametrize(("num_gpus", "is_shared"), [(1, True), (2, True), (4, False)])
def test_a_process_rank_prepares_for_nccl_before_its_group_is_made(
    num_gpus: int, is_shared: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[int] = []

    def make_group(*args: object) -> None:
        assert devices == [3 % num_gpus]
        assert ("NCCL_HOSTID" in os.environ) is is_shared
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(child, "init_default_group", make_group)
    job = Job(
        call=encode_call(int, (), {}),
        backend=backend,
        collective_timeout_secs=1.0,
        store_corner="here",
        master_port=0,
        sys_path=(),
        argv=(),
        working_dir="/",
    )
    ours, _theirs = socket.socketpair()
    with ours, _theirs:
        rank = child.RankChild(3, 4, ours)
        rank._store = memory_store()
        with pytest.raises(KeyboardInterrupt):
            rank._run(job)

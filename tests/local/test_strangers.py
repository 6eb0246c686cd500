"""What others write into the store in which a local group's ranks meet is refused, and nothing is mapped."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from weft.errors import ConfigError, PeerTimeoutError, TamperedError, WeftError
from weft.local import introduction
from weft.local.backend import create_local_group
from weft.local.introduction import Introduction
from weft.trust import SealedStore, install_secret, job_secret, make_secret

pytestmark = pytest.mark.threads

Forge = Callable[[Introduction, str], bytes | None]
TIMEOUT = timedelta(seconds=0.5)


@pytest.fixture(autouse=True)
def no_secret() -> Iterator[None]:
    before = job_secret()
    install_secret(None)
    yield
    install_secret(before)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The segments that ranks open."""
    names: list[object] = []
    real = introduction.open_segment

    def open_segment(name: Any, rank: int) -> Any:
        names.append(name)
        return real(name, rank)

    monkeypatch.setattr(introduction, "open_segment", open_segment)
    return names


def meet(monkeypatch: pytest.MonkeyPatch, forge: Forge | None = None, store: Any = None) -> list[object]:
    """Two ranks make a group, while someone overwrites what rank 1 is about to read; what became of each."""
    store = dist.HashStore() if store is None else store
    real_wait = Introduction._wait
    ended = [threading.Event(), threading.Event()]

    def wait_for_other(self: Introduction, keys: Any) -> None:
        # However slow the machine is: a wait is in vain only when the other rank has ended.
        while True:
            is_last_try = ended[1 - self._rank].is_set()
            try:
                return real_wait(self, keys)
            except PeerTimeoutError:
                if is_last_try:
                    raise

    def wait(self: Introduction, keys: Any) -> None:
        wait_for_other(self, keys)
        for key in keys:
            false = forge(self, key) if forge is not None and self._rank == 1 else None
            if false is not None:
                self._corner.set(key, false)

    def make(rank: int) -> object:
        corner = dist.PrefixStore("here", store)
        options = SimpleNamespace(
            timeout=TIMEOUT,
            store=corner,
            group_rank=rank,
            group_size=2,
            global_ranks_in_group=[4, 7],
            group_id="0",
        )
        try:
            group = create_local_group(options)
        except WeftError as error:
            return error
        finally:
            ended[rank].set()
        group.shutdown()
        return group

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(Introduction, "_wait", wait)
        return list(threads.map(make, range(2)))


def check_refused(outcomes: list[object], opened: list[object], key: str) -> None:
    """Rank 1 says what it refused; rank 0 hears nothing more of it, or meets the false value too."""
    assert isinstance(outcomes[1], TamperedError), outcomes
    assert key in str(outcomes[1])
    assert isinstance(outcomes[0], TamperedError | PeerTimeoutError), outcomes
    assert opened == []


def test_without_strangers_a_group_is_made(monkeypatch: pytest.MonkeyPatch, opened: list[object]) -> None:
    store = dist.HashStore()
    for _ in range(3):  # under one name in one store, one after another
        assert not [outcome for outcome in meet(monkeypatch, store=store) if isinstance(outcome, WeftError)]
    assert len(opened) == 3


NAMES: list[Any] = [
    ["self", "../../../tmp/evil", 1, 4096, 5],
    [1, 3, 1, 4096, 5],
    [-1, 3, 1, 4096, 5],
    [os.getpid(), 3, 1, 1 << 60, 5],
    [True, 3, 1, 4096, 5],
    [[os.getpid()], {}, 1, 4096, 5],
    {"pid": os.getpid()},
    "x" * 1000,
    None,
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_given", [True, False], ids=["secret given", "secret shared"])
def test_a_page_that_a_stranger_wrote_is_refused(
    name: object, is_given: bool, monkeypatch: pytest.MonkeyPatch, opened: list[object]
) -> None:
    if is_given:
        install_secret(make_secret())

    def forge(self: Introduction, key: str) -> bytes | None:
        return json.dumps({"name": name}).encode() if key == "page" else None

    check_refused(meet(monkeypatch, forge), opened, "'page' of rank 0")


@pytest.mark.parametrize(
    "value",
    [b"", b"{}", b"\xff" * 100, b"x" * 10_000_000, b"[" * 100_000, b'{"pid": 1}'],
    ids=["nothing", "empty", "no text", "10 MB", "nested", "plain"],
)
def test_values_that_a_stranger_wrote_are_refused(
    value: bytes, monkeypatch: pytest.MonkeyPatch, opened: list[object]
) -> None:
    outcomes = meet(monkeypatch, lambda self, at: value if at == "member/0" else None)
    check_refused(outcomes, opened, "'member/0' of rank 0")
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    outcomes = meet(monkeypatch, lambda self, at: value if at == "direct/0" else None)
    assert isinstance(outcomes[1], TamperedError)
    assert "'direct/0' of rank 0" in str(outcomes[1])
    outcomes.clear()
    gc.collect()
    # It lets go of its lock, so that its peers see it as gone.
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_values_of_other_ranks_keys_and_meetings_are_refused(
    monkeypatch: pytest.MonkeyPatch, opened: list[object]
) -> None:
    install_secret(make_secret())
    store = dist.HashStore()
    seen: dict[str, bytes] = {}

    def remember(self: Introduction, key: str) -> None:
        seen[key] = self._corner.get(key)

    meet(monkeypatch, remember, store)
    assert {"member/0", "member/1", "page", "direct/0"} <= seen.keys()
    opened.clear()
    for key, other in [
        ("member/0", "member/1"),
        ("member/0", "page"),
        ("page", "member/0"),
        ("member/0", "member/0"),
        ("page", "page"),
    ]:
        outcomes = meet(
            monkeypatch, lambda self, at, key=key, other=other: seen[other] if at == key else None, store
        )
        check_refused(outcomes, opened, f"'{key}' of rank 0")
    # Also where the meeting before had the very same name: a value of it fits no page of this one.
    again = dist.HashStore()
    outcomes = meet(monkeypatch, lambda self, at: seen[at] if at == "member/0" else None, again)
    check_refused(outcomes, opened, "'page' of rank 0")


def test_ranks_of_another_job_of_this_user_are_refused(
    monkeypatch: pytest.MonkeyPatch, opened: list[object], tmp_path: Path
) -> None:
    """All that a rank of another job has written is copied here: where its secret is, and its values."""
    seen: dict[str, bytes] = {}

    def remember(self: Introduction, key: str) -> None:
        seen[key] = self._corner.get(key)

    meet(monkeypatch, remember, dist.FileStore(str(tmp_path / "other")))
    assert {"secret", "member/0"} <= seen.keys()
    opened.clear()
    outcomes = meet(monkeypatch, lambda self, key: seen.get(key), dist.FileStore(str(tmp_path / "own")))
    check_refused(outcomes, opened, "'member/0' of rank 0")


@pytest.mark.parametrize("name", [*NAMES, [os.getpid(), 3, 1, 4096, 5]])
def test_a_peers_malformed_page_is_refused(
    name: object, monkeypatch: pytest.MonkeyPatch, opened: list[object]
) -> None:
    """Sealed as it must be: by a rank that runs another version, say."""

    def forge(self: Introduction, key: str) -> bytes | None:
        if key != "page":
            return None
        sealed = SealedStore(self._corner, self._secret, group=self._sealed._group, rank=0)
        return sealed.seal(key, json.dumps({"name": name}))

    check_refused(meet(monkeypatch, forge), opened, "rank 4's entry on the page of the group")


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": "self"},
        {"pid": -1},
        {"pid": True},
        {"pid": 1 << 40},
        {"address": -1},
        {"address": 1 << 64},
        {"address": None},
        {"host": 5},
        {"host": "x" * 10_000},
        {"probe": "zz"},
        {"probe": "00"},
        {"probe": "00" * 10_000},
        {"hostname": ["x"]},
    ],
)
def test_a_ranks_malformed_entry_is_refused(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch, opened: list[object]
) -> None:
    def forge(self: Introduction, key: str) -> bytes | None:
        if key != "member/0":
            return None
        said = json.loads(self._sealed.get(key, 0)) | changes
        return SealedStore(self._corner, self._secret, group=self._group, rank=0).seal(key, json.dumps(said))

    check_refused(meet(monkeypatch, forge), opened, "the entry of rank 4")


@pytest.mark.parametrize("turn", [b"abc", b"-1", b"1.5", b"[1]", b"9" * 50, b"true", b""])
def test_a_malformed_count_of_meetings_is_refused(turn: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set("here/turn/1", turn)
    outcomes = meet(monkeypatch, store=store)
    assert isinstance(outcomes[1], TamperedError)
    assert isinstance(outcomes[0], PeerTimeoutError)


def test_an_entry_that_denies_the_secret_is_an_error(
    monkeypatch: pytest.MonkeyPatch, opened: list[object]
) -> None:
    outcomes = meet(monkeypatch, lambda self, key: b'{"none": "x"}' if key == "secret" else None)
    assert isinstance(outcomes[1], ConfigError)
    assert opened == []

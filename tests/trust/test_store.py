"""Sealed values: what a stranger writes, moves or changes in a store is refused."""

from __future__ import annotations

import hmac
import os
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trust import store_fuzz
from weft.errors import TamperedError
from weft.launcher import agreement
from weft.trust import SealedStore, check_integer, make_secret, peer_memory


def two_ranks(group: str = "group 'a'") -> tuple[dist.HashStore, SealedStore, SealedStore]:
    store, secret = dist.HashStore(), make_secret()
    first, second = (SealedStore(store, secret, group=group, rank=rank) for rank in (0, 1))
    return store, first, second


@pytest.mark.parametrize("value", ["text", "", "ü", b"", b"\x00\xff" * 500])
def test_a_peer_reads_what_was_written(value: str | bytes) -> None:
    _, first, second = two_ranks()
    first.set("k", value)
    second.wait(["k"], timedelta(seconds=1))
    assert second.check(["k"])
    assert second.get("k", 0) == (value.encode() if isinstance(value, str) else value)
    assert second.delete_key("k")
    assert not first.check(["k"])


def test_a_value_of_a_stranger_is_refused() -> None:
    store, first, second = two_ranks()
    first.set("page", "mine")
    sealed = store.get("page")
    for false in (b"", b"mine", sealed[:-1], sealed + b"x", b"\x00" * 32 + b"mine", os.urandom(64)):
        store.set("page", false)
        with pytest.raises(TamperedError, match="'page' of rank 0 in the store of group 'a' was refused"):
            second.get("page", 0)
    store.set("page", sealed)
    assert second.get("page", 0) == b"mine"


def test_a_value_can_not_be_moved() -> None:
    store, first, second = two_ranks()
    first.set("member/0", "mine")
    sealed = store.get("member/0")
    store.set("member/1", sealed)
    with pytest.raises(TamperedError):
        second.get("member/1", 0)  # to another key
    with pytest.raises(TamperedError):
        second.get("member/0", 1)  # to another writer
    other_group = SealedStore(store, make_secret(), group="group 'a'", rank=0)
    with pytest.raises(TamperedError):
        other_group.get("member/0", 0)  # to another job
    _, elsewhere, _ = two_ranks("group 'b'")
    with pytest.raises(TamperedError):
        elsewhere.unseal("member/0", 0, sealed)


def test_a_value_of_another_group_is_refused() -> None:
    secret, store = make_secret(), dist.HashStore()
    SealedStore(store, secret, group="the first", rank=1).set("key", "value")
    with pytest.raises(TamperedError, match="in the store of the second"):
        SealedStore(store, secret, group="the second", rank=0).get("key", 1)


def test_parts_do_not_run_into_each_other() -> None:
    secret, store = make_secret(), dist.HashStore()
    one = SealedStore(store, secret, group="a", rank=1)
    other = SealedStore(store, secret, group="ab", rank=1)
    with pytest.raises(TamperedError):
        other.unseal("c", 1, one.seal("bc", "x"))
    with pytest.raises(TamperedError):
        one.unseal("bc", "1", one.seal("bc", "x"))  # a name is no number


def test_the_secret_is_in_no_value_and_no_error() -> None:
    secret, store = make_secret(), dist.HashStore()
    sealed = SealedStore(store, secret, group="g", rank=0)
    sealed.set("k", "v")
    assert secret.reveal() not in store.get("k")
    assert secret.derive("values in a store") not in store.get("k")
    with pytest.raises(TamperedError) as caught:
        sealed.get("k", 1)
    assert secret.reveal().hex() not in str(caught.value)


def test_without_a_secret_values_are_plain_and_bounded() -> None:
    store = dist.HashStore()
    plain = SealedStore(store, None, group="g", rank=0)
    assert not plain.is_sealed
    plain.set("k", "v")
    assert store.get("k") == b"v"
    assert plain.get("k", 5) == b"v"
    store.set("k", b"x" * (5 << 20))
    with pytest.raises(TamperedError, match="bytes"):
        plain.get("k", 0)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000, b"nan?"])
def test_what_is_no_json_is_refused(text: bytes) -> None:
    plain = SealedStore(dist.HashStore(), None, group="g", rank=0)
    plain.set("k", text)
    with pytest.raises(TamperedError, match="not JSON"):
        plain.get_json("k", 0)
    plain.set("k", "[1, 2]")
    assert plain.get_json("k", 0) == [1, 2]


@settings(max_examples=300)
@given(st.binary(max_size=80))
def test_no_bytes_pass_for_a_sealed_value(value: bytes) -> None:
    sealed = SealedStore(dist.HashStore(), make_secret(), group="g", rank=0)
    with pytest.raises(TamperedError):
        sealed.unseal("k", 0, value)


@pytest.mark.parametrize("value", ["3", 3.0, True, None, [3], -1, 11, 10**40, float("nan")])
def test_an_integer_is_one_and_in_bounds(value: object) -> None:
    assert check_integer(3, "it", 0, 10) == 3
    with pytest.raises(TamperedError, match="it must be an integer from 0 to 10"):
        check_integer(value, "it", 0, 10)


# Fuzzing: scripts/store_fuzz runs much more of it


def test_a_few_thousand_values() -> None:
    tally = store_fuzz.run_values(3_000, seed=22)
    assert tally.values == 3_000
    readers = store_fuzz.SEALED + store_fuzz.UNSEALED
    assert [name for name in readers if tally.believed[name] < 3] == [], (
        "a reader refuses all that it is given"
    )
    assert tally.refused > 1_000


@pytest.mark.parametrize(
    ("module", "name", "instead", "found"),
    [
        (hmac, "compare_digest", lambda *_: True, "was believed by"),
        (agreement, "check_integer", lambda value, *_: value, ""),
        (peer_memory, "_check_link", lambda *_: None, "a file was opened that is not weft's memory"),
    ],
    ids=["seals", "types", "files"],
)
def test_the_fuzzer_finds_a_hole(
    module: Any, name: str, instead: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, instead)
    with pytest.raises((AssertionError, TypeError)) as caught:
        store_fuzz.run_values(4_000, seed=3)
    assert found in str(caught.value)
    assert any("--seed 3 --batch" in note for note in caught.value.__notes__)

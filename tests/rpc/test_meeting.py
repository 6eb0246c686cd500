"""What workers read in a store that others may write to: what a peer sealed, or an error that says so."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import ConfigError, PeerError, TamperedError
from weft.rpc.meeting import Meeting
from weft.rpc.workers import Card, this_host
from weft.trust import JobSecret, make_secret

SECRET = make_secret()
RIGHT: dict[str, Any] = {
    "name": "worker1", "id": 1, "host": "h", "pid": 7, "local_address": "ipc:///proc/7/fd/5",
    "remote_address": "tcp://10.0.0.5:4000", "bell": [7, 4, 1, 4096, 99], "num_devices": 2,
    "devices": ["cuda:0"], "device_maps": {"worker0": {"cuda:0": "cuda:1"}},
}  # fmt: skip
WRONG = [
    ("name", ["", "a b", 3, None, "x" * 128, "a\n"]),
    ("id", [2, -1, "1", 1.0, True, None, 1 << 32]),
    ("host", [3, None, "", "a\nb", "x" * 400]),
    ("pid", [-1, "7", 1.5, True, 1 << 40]),
    ("local_address", ["tcp://10.0.0.5:1", "ipc:///tmp/x", "ipc:///proc/7/fd/../x", "ipc:///proc/7/fd/5\n",
                       "ipc:///proc/8/fd/5", "ipc:///proc/77/fd/5"]),
    ("remote_address", ["ipc:///tmp/evil", "tcp://a b:1", "tcp://h", "inproc://x", 3, "tcp://h:1;tcp://g:2"]),
    ("bell", [[], [1, 2, 3], [7, 4, 1, 4096, "99"], [7, 4, 1, 4096, -1], [8, 4, 1, 4096, 99], None]),
    ("bell", [[True] * 5, {"a": 1}]),
    ("num_devices", [-1, 1 << 40, "2", 2.0, None]),
    ("devices", [["../x"], [3], "cuda:0", None, ["cpu"] * 5000]),
    ("device_maps", [[], {"w": []}, {"w": {"cuda:0": 3}}, {"w": {"cuda:0": "a/b"}}, None]),
]  # fmt: skip


def store() -> Any:
    return dist.HashStore()


def meet(at: Any, rank: int, secret: JobSecret = SECRET, *, is_static: bool = True) -> Meeting:
    meeting = Meeting(at, 2.0, is_static=is_static, rank=rank)
    meeting.seal_with(secret)
    return meeting


def card_of(rank: int) -> Card:
    return Card(f"worker{rank}", rank, this_host(), 1, "ipc:///proc/1/fd/4194303", None, [1, 2, 3, 4, 5])


def corner(at: Any, turn: int) -> Any:
    return dist.PrefixStore(str(turn), dist.PrefixStore("weft_rpc", at))


def test_a_valid_card_is_decoded() -> None:
    card = Card.decode(json.dumps(RIGHT).encode(), 1, "the store")
    assert card.info.name == "worker1"
    assert Card.decode(card.encode(), 1, "the store") == card


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG for value in values], ids=str
)
def test_each_field_is_of_its_type_and_in_range(field: str, value: object) -> None:
    with pytest.raises(TamperedError, match=rf"the card of worker 1 in the store.*'{field}'"):
        Card.decode(json.dumps({**RIGHT, field: value}).encode(), 1, "the store")


KEYS = st.text(max_size=5)
JSON = st.recursive(
    st.none() | st.integers() | KEYS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner)
)


@given(st.one_of(st.binary(max_size=60), JSON.map(lambda value: json.dumps(value).encode())))
@settings(max_examples=200)
def test_a_malformed_card_is_refused(text: bytes) -> None:
    with pytest.raises(TamperedError):
        Card.decode(text, 1, "the store")


def test_cards_come_back_and_no_other() -> None:
    at = store()
    first, second = meet(at, 0), meet(at, 1)
    for rank, meeting in enumerate((first, second)):
        meeting.publish(card_of(rank))
    assert [card.id for card in first.read_all(2)] == [0, 1]
    there = corner(at, 1)
    there.set("card/1", there.get("card/0"))  # a right card, of another worker
    with pytest.raises(TamperedError, match=r"'card/1' of rank 1"):
        second.read_all(2)
    there.set("card/1", card_of(1).encode())  # one that nobody sealed
    with pytest.raises(TamperedError, match=r"'card/1' of rank 1"):
        second.read_all(2)


def test_another_secret_is_another_group() -> None:
    at = store()
    meet(at, 0).publish(card_of(0))
    with pytest.raises(TamperedError, match="different secrets"):
        meet(at, 1, make_secret()).read_all(1)


def test_a_worker_that_cannot_read_the_secret_is_not_waited_for() -> None:
    at = store()
    first, second = (Meeting(at, 60.0, is_static=True, rank=rank) for rank in range(2))
    first.seal_with(first.share_secret(0))
    corner(at, 1).set("secret", json.dumps({"host": "elsewhere", "place": [1, 2, 3]}))
    with pytest.raises(ConfigError, match="another host"):
        second.share_secret(1)
    first.publish(card_of(0))
    with pytest.raises(PeerError, match="rank 1 can't read this group's secret") as caught:
        first.read_all(2)
    assert caught.value.ranks == (1,)


def test_what_was_sealed_for_one_turn_is_void_in_the_next() -> None:
    at = store()
    meet(at, 0).publish(card_of(0))
    again = meet(at, 0)
    corner(at, 2).set("card/0", corner(at, 1).get("card/0"))
    with pytest.raises(TamperedError, match="rank 0"):
        again.read_all(1)


@pytest.mark.parametrize("key", ["report/1", "verdict"])
def test_reports_and_the_verdict_are_sealed(key: str) -> None:
    at = store()
    first, second = meet(at, 0), meet(at, 1)
    second.report(1, "")
    if key == "verdict":
        assert first.read_reports(0, 2) == ""
    corner(at, 1).set(key, "-")
    with pytest.raises(TamperedError, match=key):
        first.read_reports(0, 2) if key == "report/1" else second.read_reports(1, 2)


@pytest.mark.parametrize("epoch", ["x", "-1", "1" * 30, " 1", "9" * 19])
def test_a_malformed_epoch_is_refused(epoch: str) -> None:
    at = store()
    corner(at, 1).set("epoch", epoch)
    with pytest.raises(TamperedError, match="epoch"):
        meet(at, 0)


@pytest.mark.parametrize("turn", ["x", "", "-1", "1.5", " 1", "9" * 30, "٣"])
def test_a_malformed_count_of_meetings_is_refused(turn: str) -> None:
    at = store()
    dist.PrefixStore("weft_rpc", at).set("turn/1", turn)
    with pytest.raises(TamperedError, match="the number of meetings"):
        Meeting(at, 2.0, is_static=True, rank=1)


@pytest.mark.parametrize("text", ["x", "[]", "1", '{"card/1": 3}', '{"../x": "y"}', "[" * 100_000])
def test_a_malformed_list_of_members_is_refused(text: str) -> None:
    at = store()
    corner(at, 0).set("members", text)
    meeting = meet(at, 0, is_static=False)
    for use in (meeting.members, meeting.find_secret, lambda: meeting.join(card_of(0))):
        with pytest.raises(TamperedError, match="list of members"):
            use()


def test_members_are_sealed_one_by_one() -> None:
    at = store()
    first, second = meet(at, 0, is_static=False), meet(at, 1, is_static=False)
    assert first.join(card_of(0)) == []
    assert [card.id for card in second.join(card_of(1))] == [0]
    there = corner(at, 0)
    members = json.loads(there.get("members"))
    for forged in (members["card/0"], base64.b64encode(card_of(1).encode()).decode(), "!", "abc", "é", ""):
        there.set("members", json.dumps({**members, "card/1": forged}))
        with pytest.raises(TamperedError, match="card/1"):
            first.members()
    first.leave(0)
    assert list(json.loads(there.get("members"))) == ["card/1"]


def test_a_dynamic_group_shares_a_secret_as_long_as_one_is_there() -> None:
    at = store()
    first, second = (Meeting(at, 2.0, is_static=False, rank=rank) for rank in range(2))
    secret = first.find_secret()
    assert second.find_secret() == secret
    for rank, meeting in enumerate((first, second)):
        meeting.seal_with(secret)
        meeting.join(card_of(rank))
    first.leave(0)
    assert Meeting(at, 2.0, is_static=False, rank=2).find_secret() == secret
    second.leave(1)
    assert json.loads(corner(at, 0).get("members")) == {}


@pytest.mark.parametrize("is_static", [True, False])
def test_workers_of_another_store_have_another_secret(is_static: bool, tmp_path: Path) -> None:
    """Also where a client of the store leads them to the secret of another group of this user."""
    stores = [dist.FileStore(str(tmp_path / name)) for name in ("one", "two")]
    found: list[JobSecret] = []
    for at in stores:
        meeting = Meeting(at, 2.0, is_static=is_static, rank=0)
        found.append(meeting.share_secret(0) if is_static else meeting.find_secret())
    assert found[0] != found[1]
    again = Meeting(stores[1], 2.0, is_static=is_static, rank=1)
    if is_static:
        place = corner(stores[0], 1).get("secret")
        corner(stores[1], 1).set("secret", place)
        assert again.share_secret(1) == found[1], "both secrets come of one that this process exposes"
    else:
        assert again.find_secret() == found[1]


@pytest.mark.parametrize("key", ["secret", "members", "epoch"])
def test_values_without_end_are_not_decoded(key: str) -> None:
    long = "[" + "0," * (3 << 20) + "0]"
    if key == "secret":
        at = store()
        corner(at, 1).set("secret", long)
        with pytest.raises(TamperedError, match="'secret' in the store has 6,291,459 bytes"):
            Meeting(at, 2.0, is_static=True, rank=1).share_secret(1)
        return
    at = store()
    corner(at, 0).set(key, long)
    with pytest.raises(TamperedError, match=f"'{key}' in the store has 6,291,459 bytes"):
        Meeting(at, 2.0, is_static=False, rank=1).find_secret()


def test_one_without_a_secret_does_not_join_those_who_were_given_one() -> None:
    at = store()
    meet(at, 0, is_static=False).join(card_of(0))
    with pytest.raises(ConfigError, match="were given a secret"):
        Meeting(at, 2.0, is_static=False, rank=1).find_secret()

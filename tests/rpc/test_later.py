"""Messages that can wait: they go with the next one, or when they are due."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from weft.rpc.later import SOME_TIME_SECS, SOON_SECS, Later

PARTS = [b"ended"]


def notice() -> list[bytes]:
    return PARTS


class Info:
    id = 7


class Peer:
    def __init__(self) -> None:
        self.info = Info()
        self.deferred = deque[Any]()
        self.trailing = deque[Any]()


class Links:
    def __init__(self) -> None:
        self.sent: list[bool] = []  # whether quietly
        self.parts: list[Any] = []

    def send(self, peer_id: int, parts: Any, *, is_answer: bool, is_quiet: bool = False) -> None:
        self.sent.append(is_quiet)
        self.parts.append(parts)


def make() -> tuple[Any, Any, list[float], Links]:
    links, notes = Links(), list[float]()
    later: Any = Later(links, notes.append)  # pyright: ignore[reportArgumentType]
    return later, Peer(), notes, links


def test_what_is_due_goes_and_what_is_not_stays() -> None:
    later, peer, notes, links = make()
    later.add(peer, notice, SOME_TIME_SECS)
    (due,) = notes
    assert later.send_due(due - 0.001) == due
    assert links.sent == []
    assert later.send_due(due) == float("inf")
    assert links.sent == [False]


def test_the_earliest_decides() -> None:
    later, peer, notes, links = make()
    later.add(peer, notice, SOME_TIME_SECS)
    later.add(peer, notice, SOON_SECS)
    later.add(peer, notice, SOME_TIME_SECS)
    assert notes[1] < notes[0]
    assert notes[2] == notes[1]
    later.send_due(notes[1])
    assert links.sent == [True, True, False]  # one wakes the peer for all


def test_what_went_with_another_message_is_not_due_any_more() -> None:
    later, peer, notes, links = make()
    later.add(peer, notice, SOON_SECS)
    later.send_before(peer)
    later.add(peer, notice, SOME_TIME_SECS)
    assert notes[1] > notes[0]
    assert later.send_due(notes[0]) == notes[1]
    assert links.sent == [True]


def test_what_goes_behind_a_message_wakes_nobody_once_more() -> None:
    later, peer, _, links = make()
    later.add(peer, notice, SOME_TIME_SECS, is_behind=True)
    later.add(peer, notice, SOME_TIME_SECS, is_behind=True)
    later.send_before(peer)
    assert links.sent == []
    later.send_behind(peer, [b"call"], is_answer=False)
    assert links.parts == [[b"call"], PARTS, PARTS]
    assert links.sent == [False, True, True]


def test_a_message_with_nothing_behind_it_wakes_its_peer_itself() -> None:
    later, peer, _, links = make()
    later.send_behind(peer, [b"call"], is_answer=False)
    assert links.sent == [False]


def test_what_was_to_go_behind_a_message_that_can_not_be_sent_goes_later() -> None:
    later, peer, notes, links = make()
    numbered = [[bytes([number])] for number in range(3)]
    for parts in numbered:
        later.add(peer, lambda parts=parts: parts, SOME_TIME_SECS, is_behind=True)
    send, links.send = links.send, fail
    with pytest.raises(ValueError, match="too large"):
        later.send_behind(peer, [b"call"], is_answer=False)
    links.send = send
    later.send_due(notes[0])
    assert links.parts == numbered


def fail(*_: Any, **__: Any) -> None:
    raise ValueError("too large")


def test_what_goes_behind_goes_when_it_is_due() -> None:
    later, peer, notes, links = make()
    later.add(peer, notice, SOME_TIME_SECS, is_behind=True)
    assert later.send_due(notes[0]) == float("inf")
    assert links.sent == [False]


def test_what_goes_behind_a_message_is_written_when_that_has_gone() -> None:
    later, peer, _, links = make()
    sent_before: list[int] = []

    def write() -> list[bytes]:
        sent_before.append(len(links.sent))
        return PARTS

    later.add(peer, write, SOME_TIME_SECS, is_behind=True)
    assert sent_before == []
    later.send_behind(peer, [b"call"], is_answer=False)
    assert sent_before == [1]

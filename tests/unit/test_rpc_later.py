"""Messages that can wait: they go with the next one, or when they are due."""

from __future__ import annotations

from collections import deque
from typing import Any

from weft.rpc.later import SOME_TIME_SECS, SOON_SECS, Later
from weft.rpc.wire import Kind, Message

NOTICE = Message(Kind.CONTROL, 0, 0, 0, b"ended")


class Info:
    id = 7


class Peer:
    def __init__(self) -> None:
        self.info = Info()
        self.deferred = deque[Any]()


class Links:
    def __init__(self) -> None:
        self.sent: list[bool] = []  # whether quietly

    def send(self, peer_id: int, parts: Any, *, is_answer: bool, is_quiet: bool) -> None:
        self.sent.append(is_quiet)


def make() -> tuple[Any, Any, list[float], Links]:
    links, notes = Links(), list[float]()
    later: Any = Later(links, notes.append)  # pyright: ignore[reportArgumentType]
    return later, Peer(), notes, links


def test_what_is_due_goes_and_what_is_not_stays() -> None:
    later, peer, notes, links = make()
    later.add(peer, NOTICE, SOME_TIME_SECS)
    (due,) = notes
    assert later.send_due(due - 0.001) == due
    assert links.sent == []
    assert later.send_due(due) == float("inf")
    assert links.sent == [False]


def test_the_earliest_decides() -> None:
    later, peer, notes, links = make()
    later.add(peer, NOTICE, SOME_TIME_SECS)
    later.add(peer, NOTICE, SOON_SECS)
    later.add(peer, NOTICE, SOME_TIME_SECS)
    assert notes[1] < notes[0]
    assert notes[2] == notes[1]
    later.send_due(notes[1])
    assert links.sent == [False] * 3


def test_what_went_with_another_message_is_not_due_any_more() -> None:
    later, peer, notes, links = make()
    later.add(peer, NOTICE, SOON_SECS)
    later.send(peer, is_quiet=True)
    later.add(peer, NOTICE, SOME_TIME_SECS)
    assert notes[1] > notes[0]
    assert later.send_due(notes[0]) == notes[1]
    assert links.sent == [True]

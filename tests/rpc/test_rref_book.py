"""The book of RRefs: what keeps one alive that travels to its owner."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from weft.rpc.owned import GlobalId
from weft.rpc.packing import Cargo
from weft.rpc.rref import RRef
from weft.rpc.rref_book import RRefBook
from weft.rpc.workers import WorkerInfo

USER, OWNER = 0, 1
CALL = 7


class Side:
    """A worker that writes down what it tells."""

    def __init__(self, own_id: int) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.agent: Any = SimpleNamespace(info=WorkerInfo("worker", own_id), drop_rref=lambda *_: None)
        self.book = self.agent.book = RRefBook(own_id, 0, self.tell, self.tell, lambda _: False, list.clear)

    def tell(self, worker_id: int, notice: tuple[Any, ...]) -> None:
        self.told.append((worker_id, notice[0]))


@pytest.fixture
def user() -> Side:
    return Side(USER)


@pytest.fixture
def owner() -> Side:
    return Side(OWNER)


def make_rref(user: Side, owner: Side) -> RRef[Any]:
    rref_id, fork_id = user.book.new_id(), user.book.new_id()
    owner.book.create(rref_id, fork_id, USER)
    return RRef.of_other(user.agent, WorkerInfo("owner", OWNER), rref_id, fork_id)


def test_a_call_to_the_owner_keeps_it_until_the_answer(user: Side, owner: Side) -> None:
    rref, cargo = make_rref(user, owner), Cargo(OWNER, is_answered=True)
    user.book.fork(rref, cargo)
    user.book.await_answer(CALL, cargo.homeward)
    is_alive = weakref.ref(rref)
    del rref
    gc.collect()
    assert is_alive() is not None
    user.book.on_answer(CALL + 1)
    assert is_alive() is not None
    user.book.on_answer(CALL)
    assert is_alive() is None


def test_the_owner_of_what_came_in_a_call_says_nothing_but_its_answer(user: Side, owner: Side) -> None:
    cargo = Cargo(OWNER, is_answered=True)
    user.book.fork(make_rref(user, owner), cargo)
    arrived = Cargo(OWNER, list(cargo.forks))
    fork, owned = owner.book.claim(arrived, 0)
    assert owned is not None
    owner.book.arrived(RRef.of_owned(owner.agent, owned), fork, arrived)
    assert owner.told == []


def test_the_owner_of_what_could_not_be_unpacked_says_nothing_but_its_answer(user: Side, owner: Side) -> None:
    cargo = Cargo(OWNER, is_answered=True)
    user.book.fork(make_rref(user, owner), cargo)
    owner.book.give_back(Cargo(OWNER, list(cargo.forks)))
    assert owner.told == []


def test_the_owner_of_what_came_in_an_answer_accepts_it(user: Side, owner: Side) -> None:
    rref, cargo = make_rref(user, owner), Cargo(OWNER)
    user.book.fork(rref, cargo)
    assert cargo.homeward == []
    arrived = Cargo(OWNER, list(cargo.forks))
    fork, owned = owner.book.claim(arrived, 0)
    assert owned is not None
    owner.book.arrived(RRef.of_owned(owner.agent, owned), fork, arrived)
    assert owner.told == [(USER, "accept")]
    is_alive = weakref.ref(rref)
    del rref
    assert is_alive() is not None
    user.book.on_accept(OWNER, GlobalId(*fork[2]))
    assert is_alive() is None


def test_one_that_goes_to_a_third_worker_waits_for_its_word(user: Side, owner: Side) -> None:
    rref, cargo = make_rref(user, owner), Cargo(2, is_answered=True)
    user.book.fork(rref, cargo)
    assert cargo.homeward == []


def test_an_owner_that_is_gone_keeps_nothing(user: Side, owner: Side) -> None:
    rref, cargo = make_rref(user, owner), Cargo(OWNER, is_answered=True)
    user.book.fork(rref, cargo)
    user.book.await_answer(CALL, cargo.homeward)
    is_alive = weakref.ref(rref)
    del rref
    user.book.on_lost(OWNER)
    assert is_alive() is None
    user.book.on_answer(CALL)  # one that was on its way


def test_a_call_that_was_not_sent_keeps_nothing(user: Side, owner: Side) -> None:
    rref, cargo = make_rref(user, owner), Cargo(OWNER, is_answered=True)
    user.book.fork(rref, cargo)
    user.book.await_answer(CALL, cargo.homeward)
    is_alive = weakref.ref(rref)
    del rref
    user.book.undo(cargo)
    user.book.on_answer(CALL)
    assert is_alive() is None

"""What every call does on its way through the door: be counted, be watched, be started.

collectives.py, messages.py and objects.py say what is called; this file launches it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from weft.comm.blame import explain, late_error
from weft.comm.call import Call, Watcher, call_site, door_feature, is_aside
from weft.comm.desync import watchers_in_force
from weft.comm.graph_capture import check_engine
from weft.comm.group import state_of
from weft.comm.handle import Handle
from weft.comm.simulated import check_one_rank
from weft.comm.transforms import are_movable
from weft.errors import UnsupportedError

Tensors = Sequence[torch.Tensor]
USER = "user"  # the feature of calls that no feature makes


class _PlainTicket:
    """A call that nobody watches. It does not keep its group: that may be destroyed while it is under way."""

    __slots__ = ("_buffers", "_group", "_number", "words")

    def __init__(self, group: ProcessGroup, number: int, words: str, buffers: object) -> None:
        self._group = weakref.ref(group)
        self._number = number
        self._buffers = buffers  # held until the handle lets go of the ticket
        self.words = words

    def explain(self, error: BaseException) -> BaseException:
        group = self._group()
        return error if group is None else explain(error, group, self._number, self.words)

    def late(self, timeout_secs: float) -> BaseException:
        group = self._group()
        if group is None:
            return TimeoutError(
                f"{self.words} was not done within {timeout_secs:g} s; its group is destroyed."
            )
        return late_error(group, self._number, self.words, timeout_secs)

    def waits(self, works: Sequence[dist.Work]) -> None:
        pass

    def ended(self, error: BaseException | None, end_secs: float) -> None:
        pass


class _WatchedTicket(_PlainTicket):
    """A call that watchers follow to its end."""

    __slots__ = ("_begun", "_call", "_mutex")

    def __init__(self, call: Call) -> None:
        super().__init__(call.group, call.number, call.words(), None)
        self._call = call
        self._begun: list[Watcher] = []
        self._mutex = threading.Lock()

    def start(self, watchers: Sequence[Watcher]) -> None:
        for watcher in watchers:
            self._begun.append(watcher)
            watcher.started(self._call)

    def waits(self, works: Sequence[dist.Work]) -> None:
        if not all(work.is_completed() for work in works):
            self.stands_since(time.perf_counter())

    def stands_since(self, start_secs: float) -> None:
        """The rank does nothing else from this time on, unless the thread is one beside its own."""
        if self._call.stand.start_secs is None and not is_aside():
            self._call.stand.start_secs = start_secs

    def ended(self, error: BaseException | None, end_secs: float) -> None:
        with self._mutex:  # whoever hears of it second returns when it has been told
            while self._begun:
                self._begun.pop().finished(self._call, error, end_secs)


def check_movable(tensors: Tensors) -> None:
    """Raise for tensors of torch.func's transforms, which have no memory that could be moved."""
    if not are_movable(tensors):
        raise UnsupportedError(
            "collectives can't move tensors inside vmap, torch.func.grad or another transform of "
            "torch.func, nor batched gradients (is_grads_batched, vectorize=True). Loop instead."
        )


def launch_call(
    op: str,
    group: ProcessGroup,
    feature: str,
    start: Callable[[], Any],
    result: Any,
    inputs: Tensors,
    outputs: Tensors,
    detail: str = "",
    *,
    is_collective: bool = True,
    label: str = "",
) -> Handle[Any]:
    """Start a collective, or a message, and hand out its Handle.

    `start` calls torch.distributed and returns a Work, a list of them, or None when
    the call was done at once. `inputs` are what the rank gives, `outputs` what it gets.
    `detail` is what else must agree, in words; `label` what it is about, for records.
    """
    check_movable(inputs)
    check_engine(op, inputs, group)
    if feature != USER:
        check_one_rank(f"{feature} ({op})")
    state = state_of(group)
    # Messages concern two ranks, so they are counted apart: the others would fall behind.
    number = next(state.numbers if is_collective else state.message_numbers)
    watchers = watchers_in_force()
    if not watchers:
        ticket = _PlainTicket(group, number, op, (inputs, outputs))
        works = _start(start, ticket, feature)
        return Handle(works, result, ticket) if works else Handle.done(result)
    call = Call(
        op, feature, group, number, tuple(inputs), tuple(outputs), detail, site=call_site(), label=label
    )
    watched = _WatchedTicket(call)
    try:
        watched.start(watchers)
        begun_secs = time.perf_counter()
        works = _start(start, watched, feature)
    except BaseException as error:
        watched.ended(error, time.perf_counter())
        raise
    if not works:
        if len(state.ranks) > 1:
            watched.stands_since(begun_secs)
        watched.ended(None, time.perf_counter())
        return Handle.done(result)
    return Handle(works, result, watched)


def _start(start: Callable[[], Any], ticket: _PlainTicket, feature: str) -> list[dist.Work]:
    token = door_feature.set(feature)
    try:
        started = start()
    except RuntimeError as error:
        explained = ticket.explain(error)
        if explained is error:
            raise
        raise explained from error
    finally:
        door_feature.reset(token)
    if started is None:
        return []
    return started if isinstance(started, list) else [started]

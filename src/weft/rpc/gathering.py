"""Gathering an object from each of several workers, over RPC: what barriers and shutdown are made of.

Everyone sends its object to the leader, the worker with the smallest name; the leader sends all of them back.
The n-th gathering of the same workers is one gathering, whichever thread of a worker takes part in it.

A worker that dies fails the gathering on every other one: those who see it die, and those who are told by the
leader.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weft.errors import PeerError, PeerTimeoutError
from weft.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from weft.rpc.message_forms import need
from weft.rpc.peers import Peer

if TYPE_CHECKING:
    from weft.rpc.agent import Agent


# How long after its timeout a gathering may still send its result or its failure to the workers.
_LAST_WORD_SECS = 1.0


class Gathering:
    """One gathering, as one of its workers sees it."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.objects: dict[str, Any] = {}
        self.error: BaseException | None = None
        self.is_over = threading.Event()

    def fail(self, error: BaseException) -> None:
        """End it with an error."""
        if not self.is_over.is_set():
            self.error = error
            self.is_over.set()


class Gatherings:
    """The gatherings of one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._turns: Counter[str] = Counter()
        self._open: dict[str, Gathering] = {}
        agent.when_lost.append(self._on_lost)

    def begin(self, names: set[str]) -> tuple[str, Gathering]:
        """Take part in the next gathering of these workers; its name and itself."""
        with self._lock:
            crowd = " ".join(sorted(names))
            sequence_id = f"{crowd} #{self._turns[crowd]}"
            self._turns[crowd] += 1
        gathering = self._find(sequence_id)
        gathering.names = names
        peers = [self._agent.directory.find(name) for name in sorted(names)]
        for peer in sorted(
            peers, key=lambda peer: peer.has_left
        ):  # the dead are to blame before those who left
            self._agent.introduce(peer)  # whoever dies must be noticed
            self._on_lost(peer)
        return sequence_id, gathering

    def end(self, sequence_id: str) -> None:
        """Forget a gathering."""
        with self._lock:
            self._open.pop(sequence_id, None)

    def _find(self, sequence_id: str) -> Gathering:
        with self._lock:
            return self._open.setdefault(sequence_id, Gathering())

    def add(self, sequence_id: str, name: str, obj: Any, names: set[str]) -> None:
        """On the leader: take a worker's object."""
        gathering = self._find(sequence_id)
        with self._lock:
            gathering.objects[name] = obj
            if names == gathering.objects.keys():
                gathering.is_over.set()

    def complete(self, sequence_id: str, objects: dict[str, Any]) -> None:
        """On the others: take all objects."""
        gathering = self._find(sequence_id)
        gathering.objects = objects
        gathering.is_over.set()

    def fail(self, sequence_id: str, error: BaseException) -> None:
        """End a gathering with an error."""
        self._find(sequence_id).fail(error)

    def _on_lost(self, peer: Peer) -> None:
        if peer.lost is None:
            return
        name = peer.info.name
        for gathering in list(self._open.values()):
            if name not in gathering.names:
                continue
            # One that has left was through with all gatherings that it is needed for.
            is_needed = name == min(gathering.names) or (
                self._agent.info.name == min(gathering.names) and name not in gathering.objects
            )
            if is_needed or not peer.has_left:
                gathering.fail(peer.lost_error("A gathering (barrier, shutdown)"))


def gather(
    agent: Agent,
    obj: Any,
    names: set[str],
    timeout: float,
    to_leader: Callable[..., None],
    to_followers: Callable[..., None],
) -> dict[str, Any]:
    """Everyone's object, by the worker's name. `to_leader` and `to_followers` are what is called on the
    others.
    """
    leader = min(names)
    is_limited = timeout not in (UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT)
    call_secs = agent.timeout_secs if timeout == UNSET_RPC_TIMEOUT else timeout
    deadline = time.monotonic() + timeout if is_limited else float("inf")
    sequence_id, gathering = agent.gatherings.begin(names)
    is_leader = agent.info.name == leader
    try:
        if gathering.error is not None:
            raise gathering.error  # somebody is known to be dead
        if is_leader:
            agent.gatherings.add(sequence_id, leader, obj, names)
        else:
            arguments = (sequence_id, agent.info.name, obj, names)
            agent.caller.call_async(leader, to_leader, arguments, {}, call_secs, is_internal=True).wait()
        # The leader times out at the same moment, and then reports which workers are missing.
        left_secs = deadline - time.monotonic() + (0.0 if is_leader else _LAST_WORD_SECS)
        with agent.pool.blocking():
            is_over = gathering.is_over.wait(max(0.0, left_secs) if is_limited else None)
        if gathering.error is not None:
            raise gathering.error
        if not is_over:
            missing = sorted(names - gathering.objects.keys()) if is_leader else [leader]
            raise PeerTimeoutError(
                f"timed out in _all_gather after {timeout:.2f} seconds: {', '.join(missing)} had not "
                "answered.",
                [agent.directory.find(name).info.id for name in missing],
            )
        if is_leader:
            left_secs = max(_LAST_WORD_SECS, deadline - time.monotonic())
            _spread(agent, sequence_id, gathering, left_secs if is_limited else call_secs, to_followers)
        return gathering.objects
    except BaseException as error:
        if is_leader:
            _spread_failure(agent, sequence_id, names - {leader}, error)
        if gathering.error is not None and error is not gathering.error:
            raise gathering.error from error  # the leader gave up: this is why
        raise
    finally:
        agent.gatherings.end(sequence_id)


def _spread(
    agent: Agent,
    sequence_id: str,
    gathering: Gathering,
    call_secs: float,
    to_followers: Callable[..., None],
) -> None:
    arguments = (sequence_id, gathering.objects)
    futures = {
        name: agent.caller.call_async(name, to_followers, arguments, {}, call_secs, is_internal=True)
        for name in sorted(gathering.names - {agent.info.name})
    }
    errors: dict[str, Exception] = {}
    for name, future in futures.items():
        try:
            future.wait()
        except Exception as error:
            errors[name] = error
    if errors:
        first = next(iter(errors.values()))
        raise PeerError(
            f"Followers {list(errors)} timed out in _all_gather after {call_secs:.2f} seconds, or failed. "
            f"The first exception is {first}",
            [agent.directory.find(name).info.id for name in errors],
        ) from first


def _spread_failure(agent: Agent, sequence_id: str, names: set[str], error: BaseException) -> None:
    """Tell those who wait for the leader that nothing will come."""
    text, ranks = str(error), getattr(error, "ranks", ())
    for name in names:
        if agent.directory.find(name).lost is None:
            agent.caller.call_async(
                name,
                fail_gathering,
                (sequence_id, text, ranks, isinstance(error, PeerTimeoutError)),
                {},
                _LAST_WORD_SECS,
                is_internal=True,
            )


def fail_gathering(sequence_id: str, text: str, ranks: tuple[int, ...], is_late: bool) -> None:
    """On the others: the leader has given up."""
    from weft.rpc import registry

    is_right = type(sequence_id) is str and type(text) is str and type(is_late) is bool
    need(
        is_right and type(ranks) is tuple and all(type(rank) is int for rank in ranks),
        "the end of a gathering",
    )
    registry.current_agent().gatherings.fail(
        sequence_id, (PeerTimeoutError if is_late else PeerError)(text, ranks)
    )

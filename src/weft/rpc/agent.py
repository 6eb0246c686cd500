"""The agent: a worker's end of every call.

Calls go out in calling.py, what other workers ask for is served in serving.py. Links move
the messages, the pool hears them, the book counts RRefs, the clock sees to timeouts.

Failure: a worker that is gone is an error for each call that needs it, at once; one that is slow, when the
timeout is over. A call is answered once and never sent twice.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from weft import first_use, rank_thread
from weft.errors import PeerError, StateError
from weft.local.segment import SegmentName
from weft.rpc import registry, tracking
from weft.rpc.calling import Caller
from weft.rpc.calls import Answer, Call, CallTable
from weft.rpc.clock import Clock
from weft.rpc.constants import UNSET_RPC_TIMEOUT
from weft.rpc.directory import Destination, Directory
from weft.rpc.gathering import Gatherings
from weft.rpc.later import SOME_TIME_SECS, SOON_SECS, Later
from weft.rpc.links import Links
from weft.rpc.notices import write_notice
from weft.rpc.options import AgentOptions, check_secs
from weft.rpc.owned import GlobalId
from weft.rpc.packing import Packer
from weft.rpc.peers import Peer
from weft.rpc.pool import Pool
from weft.rpc.rref import rebuild_rref
from weft.rpc.rref_book import RRefBook
from weft.rpc.secret import derive_keys
from weft.rpc.serving import Server
from weft.rpc.tensors import TensorPost
from weft.rpc.wire import Kind, encode_parts
from weft.rpc.workers import Card, WorkerInfo
from weft.trust import JobSecret

logger = logging.getLogger(__name__)
_DOUBT_SECS = 0.1  # how long a link may be down before its worker is gone: a goodbye may be on its way
_JOIN_SECS = 5.0
_LEAVE_SECS = 10.0
_DROP_SECS = 0.01  # so late at most an owner hears of RRefs that are gone


class Agent:
    """One worker's agent. `look_up(name_or_id)` finds the card of a worker that joined later, if any may."""

    def __init__(
        self,
        info: WorkerInfo,
        epoch: int,
        secret: JobSecret,
        options: AgentOptions,
        look_up: Callable[[str | int], Card | None] | None,
    ) -> None:
        is_late_group = look_up is not None
        self.info = info
        self.epoch = epoch
        self.options = options
        self.timeout_secs = options.timeout_secs
        self.is_ended = False
        self.calls = CallTable()
        self.post = TensorPost(info.id, hides_gaps=options.allow is not None)
        # A worker that takes a dead one's place in a late group must not give out its ids again.
        first_id = secrets.randbits(62) if is_late_group else 0
        self.book = RRefBook(info.id, first_id, self.tell, self.tell_later, self.is_lost, self.let_go)
        # Whether or not this process uses it: a peer may call in a context of distributed autograd.
        first_use.load("dist_autograd")
        self.tracker = None if tracking.make_tracker is None else tracking.make_tracker(self)
        self.packer = Packer(
            self.post, options.allow, self.book.give_back, self.book.undo, rebuild_rref, self.tracker
        )
        self.directory = Directory(info, options.device_maps, look_up or (lambda _: None))
        self.peers = self.directory.peers
        self.when_lost: list[Callable[[Peer], None]] = []
        # Of a dynamic group; joining.py sets them.
        self.leave_group: Callable[[float], bool] | None = None
        self.list_members: Callable[[], list[Card]] | None = None
        self._introducing = threading.Lock()
        self._ending = threading.Lock()
        self._is_ending = False
        self._scan_at = float("inf")
        self._drop_at = 0.0
        self._dropped: deque[tuple[int, GlobalId, GlobalId]] = deque()
        self.links = Links(info.id, derive_keys(secret), options.listen, self._on_link_lost)
        self._later = Later(self.links, lambda deadline: self.clock.note(deadline))
        self.server = Server(self)
        self.pool = Pool(
            self.links,
            self.server.accept,
            partial(registry.serving, self, rank_thread.rank_world()),
            lambda: self.clock.note(0.0),
            options.num_threads,
        )
        self.clock = Clock(self._time_out)
        self.caller = Caller(self)
        self.gatherings = Gatherings(self)

    def is_lost(self, worker_id: int) -> bool:
        """Whether a worker is gone."""
        peer = self.peers.get(worker_id)
        return peer is not None and peer.lost is not None

    def start(self) -> None:
        """Begin to serve."""
        self.pool.start()
        self.clock.start()

    # Peers

    def introduce(self, peer: Peer) -> None:
        """Open the link to a peer, if there is none, and say there who this worker is."""
        if peer.is_linked:
            return
        with self._introducing:
            if peer.is_linked or peer.lost is not None:
                return
            self.links.open(peer.info.id, self.directory.address_of(peer))
            try:
                ring = tuple(self.links.offer_ring(peer.info.id)) if peer.calling.is_same_host else None
                card = self.peers[self.info.id].card.encode()
                self._send(peer, Kind.CONTROL, 0, write_notice(("hello", card, ring)))
            except BaseException:
                self.links.drop(peer.info.id)
                raise
            peer.is_linked = True  # from now on others may send

    def reach(self, peer: Peer) -> None:
        """Wait until the link to a peer is up. Raises PeerError when it can't be."""
        self.introduce(peer)
        why = self.links.wait_up(peer.info.id)
        if why is not None:
            raise PeerError(
                f"worker '{peer.info.name}' (id {peer.info.id}) can't be reached: {why}.", [peer.info.id]
            )

    def use_ring(self, peer: Peer) -> None:
        """Go on through shared memory: the peer has opened the ring that this worker offered."""
        neighbours = [other for other in list(self.peers.values()) if other.calling.is_same_host]
        # Workers that are threads of one process share an interpreter: who looks stops the others.
        are_processes = len({other.card.bell[0] for other in neighbours}) == len(neighbours)
        has_cores = len(neighbours) <= len(os.sched_getaffinity(0))
        self.pool.look_before_sleep(is_on=are_processes, has_cores=has_cores)
        self.links.write_ring(peer.info.id, SegmentName(*peer.card.bell), self.write(("to ring",)))

    def _send(
        self, peer: Peer, kind: Kind, call_id: int, body: bytes, buffers: list[memoryview] | None = None
    ) -> None:
        parts = encode_parts(kind, self.info.id, call_id, self.epoch, body, buffers or ())
        is_answer = kind is Kind.RESULT or kind is Kind.FAILURE
        if peer.trailing:
            self._later.send_behind(peer, parts, is_answer=is_answer)
        else:
            self.links.send(peer.info.id, parts, is_answer=is_answer)

    def send(
        self, peer: Peer, kind: Kind, call_id: int, body: bytes, buffers: list[memoryview] | None = None
    ) -> None:
        """Send a message to a peer. Raises PeerError when it is gone."""
        if peer.lost is not None:
            raise peer.gone_error("a message")
        if self.is_ended:  # or this is a child that was forked: the rings are its parent's
            raise self.ended_error()
        if not peer.is_linked:
            self.introduce(peer)
        if peer.deferred:
            self._later.send_before(peer)
        self._send(peer, kind, call_id, body, buffers)

    def defer(self, peer: Peer, call_id: int, body: bytes) -> None:
        """Answer a call that nobody waits for just now: with the next message to that peer, or soon."""
        parts = encode_parts(Kind.RESULT, self.info.id, call_id, self.epoch, body, ())
        self._later.add(peer, lambda: parts, SOON_SECS)

    def tell_later(self, worker_id: int, notice: tuple[Any, ...]) -> None:
        """Tell another worker something right behind the next message to it, or soon."""
        peer = self.peers.get(worker_id)
        if peer is not None and peer.lost is None and not self.is_ended:
            self._later.add(peer, lambda: self.write(notice), SOME_TIME_SECS, is_behind=True)

    def write(self, notice: tuple[Any, ...]) -> list[bytes | memoryview]:
        """The parts of a message with a notice."""
        return encode_parts(Kind.CONTROL, self.info.id, 0, self.epoch, write_notice(notice), ())

    def tell(self, worker_id: int, notice: tuple[Any, ...]) -> None:
        """Tell another worker's book something; nothing is done when that worker is gone."""
        peer = self.peers.get(worker_id)  # not looked up: nothing here may wait for a store
        try:
            if peer is not None:
                self.send(peer, Kind.CONTROL, 0, write_notice(notice))
        except (PeerError, StateError):
            logger.debug("worker %s is gone; it was to hear %s", worker_id, notice)

    def let_go(self, things: list[Any]) -> None:
        """Drop what users' finalizers may belong to: on the pool, where they may wait."""
        if things:
            self.pool.submit(things.clear)

    # Answers

    def resolve_timeout(self, timeout: float) -> float:
        """Seconds for a call; 0 for none."""
        if timeout == UNSET_RPC_TIMEOUT:
            return self.timeout_secs
        return check_secs(timeout, f"timeout (in a call; {UNSET_RPC_TIMEOUT} for the default)")

    def take(self, call_id: int) -> Call | None:
        """Take a call out of the table, to answer it."""
        call = self.calls.take(call_id)
        if call is not None:
            self._count_out(call)
        return call

    def _take_all(self, chosen: Callable[[Call], bool]) -> list[Call]:
        calls = self.calls.take_all(chosen)
        for call in calls:
            self._count_out(call)
        return calls

    def _count_out(self, call: Call) -> None:
        if not call.is_internal:  # weft's own are not counted in
            self.peers[call.to.id].leave()

    def give_answer(self, call_id: int, answer: Answer) -> None:
        """Answer a call from another thread than the pool's."""
        call = self.take(call_id)
        if call is not None:
            self._answer(call, answer)

    def _answer(self, call: Call, answer: Answer) -> None:
        job = call.answer(answer)
        if job is not None and self.is_ended:
            job()  # there is no pool any more
        elif job is not None:
            self.pool.submit(job)

    def ended_error(self) -> StateError:
        """What a caller sees whose own worker ends."""
        return StateError(f"RPC was shut down on worker '{self.info.name}' while this call had no answer.")

    def open_answer(self, answer: Answer) -> Any:
        """What an answer holds: a value to return, or an exception to raise."""
        if isinstance(answer, BaseException):
            raise answer
        value = self.packer.unpack(answer.body, answer.buffers, self.peers[answer.sender].calling)
        if answer.kind is Kind.FAILURE:
            raise self.packer.rebuild_failure(value)
        return value

    def _time_out(self) -> float | None:
        now = time.monotonic()
        if now >= self._scan_at:
            for call in self._take_all(lambda call: call.deadline is not None and call.deadline <= now):
                self._answer(call, call.timeout_error())
            self._scan_at = float("inf")  # before the look: what is noted meanwhile is seen, or lowers it
            self.note_deadline(self.calls.next_deadline() or float("inf"))
        if self._dropped and now >= self._drop_at:
            self._tell_drops()
        next_due = self._later.send_due(now)
        next_look = self.pool.look_after()
        if next_look is None:
            self.post.trim()
        drop_at = self._drop_at if self._dropped else float("inf")
        wake_at = min(self._scan_at, next_look or float("inf"), drop_at, next_due)
        return None if wake_at == float("inf") else wake_at

    def note_deadline(self, deadline: float) -> None:
        """Make sure that calls are looked through at a deadline."""
        self._scan_at = min(self._scan_at, deadline)
        self.clock.note(deadline)

    # How it stands

    @property
    def is_static(self) -> bool:
        """Whether the group has a size that was given."""
        return self.list_members is None

    @property
    def is_idle(self) -> bool:
        """Whether no call of this worker's, and none that it serves, is unfinished."""
        return not self.calls.num_open and not self.pool.num_busy

    def describe_open(self) -> str:
        """The unfinished calls, for an error."""
        return self.calls.describe() or f"{self.pool.num_busy} calls of other workers run here"

    def get_worker_info(self, to: Destination | None = None) -> WorkerInfo:
        """The name and id of a worker; of this one where none is given."""
        return self.info if to is None else self.directory.find(to).info

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Everyone who is there."""
        if self.list_members is not None:
            for card in self.list_members():
                self.directory.add(card)
        peers = [peer for _, peer in sorted(self.peers.items())]
        return [peer.info for peer in peers if self.is_static or not peer.has_left]

    def get_debug_info(self) -> dict[str, str]:
        """Numbers for the curious, under torch's names."""
        return {
            "agent.thread_pool_size": str(self.options.num_threads),
            "agent.num_idle_threads": str(self.pool.num_threads - self.pool.num_busy),
            "agent.client_active_calls": str(self.calls.num_open),
            "agent.server_active_calls": str(self.pool.num_busy),
            **({} if self.tracker is None else self.tracker.debug_info()),
        }

    # Workers that go

    def _on_link_lost(self, peer_id: int, why: str, was_up: bool) -> None:
        peer = self.peers[peer_id]

        def decide() -> None:
            if self.peers.get(peer_id) is peer:  # and not one that has taken its place
                peer.was_reached = was_up
                self.lose(peer_id, why)

        # A worker that leaves says goodbye and closes its links: the goodbye may be heard second.
        self.clock.put_later(time.monotonic() + _DOUBT_SECS, decide)

    def lose(self, peer_id: int, why: str, *, has_left: bool = False) -> None:
        """Give a worker up: everything that needs it is an error from now on."""
        peer = self.peers.get(peer_id)
        if peer is None or self.is_ended or not peer.lose(why, has_left=has_left):
            return
        for call in self._take_all(lambda call: call.to.id == peer_id):
            self._answer(call, peer.lost_error(call.what))
        self.links.drop(peer_id)
        self.book.on_lost(peer_id)
        self.post.release_peer(peer_id)
        if self.tracker is not None:
            self.tracker.on_lost(peer_id)
        for hear in list(self.when_lost):
            hear(peer)

    def drop_rref(self, owner_id: int, rref_id: GlobalId, fork_id: GlobalId) -> None:
        """Tell an owner that an RRef is gone. May be called by the garbage collector, at any moment."""
        if not self.is_ended:
            if not self._dropped:
                self._drop_at = time.monotonic() + _DROP_SECS
            self._dropped.append((owner_id, rref_id, fork_id))
            self.clock.note(self._drop_at)

    def _tell_drops(self) -> None:
        """Tell owners of the RRefs that are gone, many at a time."""
        drops: dict[int, list[tuple[GlobalId, GlobalId]]] = {}
        while self._dropped:
            owner_id, rref_id, fork_id = self._dropped.popleft()
            drops.setdefault(owner_id, []).append((rref_id, fork_id))
        for owner_id, gone in drops.items():
            self.book.drop_users(owner_id, gone)

    # The end

    def end(self, failure: str | None = None, leave_secs: float = _LEAVE_SECS) -> bool:
        """Leave: say goodbye, stop serving, end every thread. Open calls are answered with an error.

        `failure` says why this worker did not leave by itself. Returns False when it is still on the group's
        list, because the store of a dynamic group did not answer for `leave_secs`.
        """
        with self._ending:
            if self._is_ending:
                return True
            self._is_ending = True
        has_left = self.leave_group is None or self.leave_group(leave_secs)
        self.clock.stop()
        self._tell_drops()
        for peer in list(self.peers.values()):
            if peer.lost is None and peer.info != self.info and self.links.is_open(peer.info.id):
                self.tell(peer.info.id, ("bye", failure))
        self.is_ended = True
        registry.remove(self)
        self.links.stop()
        for call in self._take_all(lambda call: True):
            self._answer(call, self.ended_error())
        self.book.close()
        if self.tracker is not None:
            self.tracker.close()
        self.pool.join(_JOIN_SECS)
        self.pool.finish_backlog()
        self.links.close()
        self.post.close()
        return has_left

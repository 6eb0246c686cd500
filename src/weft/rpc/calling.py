"""Calls to other workers: packed, sent, and waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from weft.errors import PeerError, PeerTimeoutError, StateError
from weft.rpc.calls import AsyncCall, Call, CallFuture, CreationCall, SyncCall
from weft.rpc.constants import UNSET_RPC_TIMEOUT
from weft.rpc.directory import Destination
from weft.rpc.notices import REMOTE_IDS, write_notice
from weft.rpc.owned import GlobalId, OwnedValue
from weft.rpc.packing import Packed
from weft.rpc.peers import Peer
from weft.rpc.rref import RRef
from weft.rpc.tensors import Route
from weft.rpc.tracking import here
from weft.rpc.wire import Kind

if TYPE_CHECKING:
    from weft.rpc.agent import Agent


class Caller:
    """Makes the calls of one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def call_sync(
        self,
        to: Destination,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        timeout: float,
    ) -> Any:
        """Call a function on a worker and wait for what it returns or raises."""
        peer = self._agent.directory.find(to)
        timeout_secs = self._agent.resolve_timeout(timeout)
        call = SyncCall(peer.info, lambda: f"rpc_sync of {_name_of(func)}", timeout_secs)
        if peer.lost is not None:
            raise peer.gone_error(call.what)
        packed = self._pack(peer, call, func, args, kwargs)
        return self._wait(call, lambda: self._post(peer, call, Kind.CALL, packed))

    def call_async(
        self,
        to: Destination,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        timeout: float,
        *,
        is_internal: bool = False,
    ) -> CallFuture:
        """Call a function on a worker; a future of what it returns or raises."""
        peer = self._agent.directory.find(to)
        agent = self._agent
        timeout_secs = agent.resolve_timeout(timeout)
        future = CallFuture(agent.pool.blocking, agent.pool.wait_for, agent.open_answer)
        what = lambda: f"rpc_async of {_name_of(func)}"  # noqa: E731
        call = AsyncCall(peer.info, what, timeout_secs, future, agent.open_answer)
        call.is_internal = is_internal
        self._post(peer, call, Kind.CALL, self._pack(peer, call, func, args, kwargs))
        return future

    def call_remote(
        self,
        to: Destination,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        timeout: float,
    ) -> RRef[Any]:
        """Call a function on a worker; an RRef to what it returns."""
        peer = self._agent.directory.find(to)
        rref_id, fork_id = self._agent.book.new_id(), self._agent.book.new_id()
        timeout_secs = self._agent.resolve_timeout(timeout)
        what = lambda: f"remote of {_name_of(func)}"  # noqa: E731
        call = CreationCall(peer.info, what, timeout_secs, self._agent.pool.blocking)
        if peer.info.id == self._agent.info.id:
            owned = self._agent.book.create(rref_id, None, peer.info.id)
            rref = RRef.of_owned(self._agent, owned)
            # One that fails, or runs out of time, is on no list: nothing else would settle and release it.
            call.when_failed = lambda error: self._settle(owned, error)
        else:
            rref = RRef.of_other(self._agent, peer.info, rref_id, fork_id)
            self._agent.book.add_user(rref)
        rref.created_by(call)
        ids = REMOTE_IDS.pack(rref_id.local_id, fork_id.local_id)
        try:
            self._post(peer, call, Kind.REMOTE, self._pack(peer, call, func, args, kwargs), ids)
        except BaseException:
            if rref.owned is not None:
                self._agent.book.release_unheld(rref.owned)
            raise
        return rref

    def _settle(self, owned: OwnedValue, error: BaseException) -> None:
        """See to a value of this worker's own that won't be made."""
        owned.set(error=StateError(f"OwnerRRef({owned.id}): RRef creation via rpc.remote() failed: {error}"))
        self._agent.book.release_unheld(owned)

    def fetch(self, rref: RRef[Any], timeout: float) -> Any:
        """A copy of the value of another worker's RRef."""
        peer = self._agent.directory.find(rref.owner().id)
        timeout_secs = rref.limit_wait(self._agent.resolve_timeout(timeout))
        call = SyncCall(peer.info, lambda: f"to_here of {rref}", timeout_secs)
        if peer.lost is not None:
            raise peer.gone_error(call.what)
        self._enter(peer, call)
        context_id = self._context_id()
        if context_id and self._agent.tracker is not None:
            self._agent.tracker.on_call(context_id, peer.calling)
        notice = write_notice(("fetch", rref.rref_id, context_id))
        try:
            return self._wait(call, lambda: self._post_call(peer, call, Kind.CONTROL, notice, []))
        except PeerTimeoutError:
            rref.check_usable("to_here()")  # the function that makes it may have run out of time, not this
            raise

    def ask_all(
        self, func: Callable[..., Any], args_by_worker: Mapping[int, tuple[Any, ...]], what: str
    ) -> list[Any]:
        """Call one of weft's own functions on several workers at once; what they returned."""
        timeout_secs = self._agent.resolve_timeout(UNSET_RPC_TIMEOUT)
        asked: list[tuple[SyncCall, Callable[[], None]]] = []
        for worker_id, args in args_by_worker.items():
            peer = self._agent.directory.find(worker_id)
            call = SyncCall(peer.info, what, timeout_secs)
            call.is_internal = True
            asked.append((call, self.pack(call, peer, func, args)))
        for _, send in asked[1:]:
            send()
        return [self._wait(call, None if place else send) for place, (call, send) in enumerate(asked)]

    def pack(
        self,
        call: Call,
        peer: Peer,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        route: Route | None = None,
    ) -> Callable[[], None]:
        """Pack a call of weft's own, which sees to its answer itself; what sends it."""
        packed = self._pack(peer, call, func, args, {}, route)
        return lambda: self._post(peer, call, Kind.CALL, packed)

    def _enter(self, peer: Peer, call: Call) -> None:
        if not call.is_internal:
            limit, blocking = self._agent.options.max_in_flight, self._agent.pool.blocking
            peer.enter(limit, call, blocking)

    def _pack(
        self,
        peer: Peer,
        call: Call,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        route: Route | None = None,
    ) -> Packed:
        """Count a call in, and pack it. Raises for what can't be packed."""
        self._enter(peer, call)
        try:
            context_id = 0 if call.is_internal else self._context_id()
            return self._agent.packer.pack_call(func, args, kwargs, route or peer.calling, context_id)
        except BaseException:
            if not call.is_internal:
                peer.leave()
            raise

    def _post(self, peer: Peer, call: Call, kind: Kind, packed: Packed, ids: bytes = b"") -> None:
        """Send a call that is packed. A dead peer is the call's answer."""
        body = ids + packed.body if ids else packed.body
        is_sent, homeward = False, packed.cargo.homeward if packed.cargo is not None else ()
        try:
            is_sent = self._post_call(peer, call, kind, body, packed.buffers, homeward)
        finally:
            if not is_sent:
                self._agent.packer.withdraw(packed)
                self._agent.book.on_answer(call.id)
        if is_sent:
            self._agent.packer.note_sent(packed)

    def _post_call(
        self,
        peer: Peer,
        call: Call,
        kind: Kind,
        body: bytes,
        buffers: list[memoryview],
        homeward: Sequence[GlobalId] = (),
    ) -> bool:
        """Send a call that is packed; False when it was answered with an error instead."""
        self._agent.calls.add(call)
        if homeward:
            self._agent.book.await_answer(call.id, homeward)
        try:
            # The peer may be found dead at any time: from now on that answers the call.
            self._agent.send(peer, kind, call.id, body, buffers)
        except PeerError as error:
            # A link that broke is closed before its worker is known to be lost.
            is_found_dead = not isinstance(error, PeerTimeoutError) and (
                peer.lost is not None or peer.is_linked
            )
            self._agent.give_answer(call.id, peer.gone_error(call.what) if is_found_dead else error)
            return False
        except BaseException:
            self._agent.take(call.id)
            raise
        if peer.lost is not None:
            self._agent.give_answer(call.id, peer.lost_error(call.what))
        if self._agent.is_ended:
            self._agent.give_answer(call.id, self._agent.ended_error())
        deadline = call.deadline
        if deadline is not None:
            self._agent.note_deadline(deadline)
        return True

    def _context_id(self) -> int:
        """The context of distributed autograd that a call of this thread belongs to; 0 for none."""
        context_id, tracker = here.context_id, self._agent.tracker
        if not context_id or tracker is None or not torch.is_grad_enabled():
            return 0
        return context_id if tracker.is_open(context_id) else 0

    def _wait(self, call: SyncCall, send: Callable[[], object] | None = None) -> Any:
        if not self._agent.pool.wait_for(call, send) and self._agent.take(call.id) is not None:
            raise call.timeout_error()
        if call.reply is None:  # somebody took it to answer it just as its time was over
            call.wait()
        assert call.reply is not None
        return self._agent.open_answer(call.reply)


def _name_of(func: Callable[..., Any]) -> str:
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or repr(func)
    module = getattr(func, "__module__", None)
    return f"{module}.{name}" if module else str(name)

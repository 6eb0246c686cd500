"""What other workers ask for: calls, values of RRefs, and notices of the book.

`accept` looks at a message on the thread that heard it and must not wait: notices are acted on there, in the
order in which they came; whatever runs users' code, packing and unpacking included, is returned as a job.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from weft.errors import StateError
from weft.local.segment import SegmentName
from weft.rpc.functions import is_async
from weft.rpc.notices import REMOTE_IDS, read_notice
from weft.rpc.owned import GlobalId, OwnedValue
from weft.rpc.packing import PACKED_NONE, Packed
from weft.rpc.peers import Peer
from weft.rpc.tracking import here
from weft.rpc.wire import Kind, Message, WireError, decode_message
from weft.rpc.workers import Card

if TYPE_CHECKING:
    from weft.rpc.agent import Agent

logger = logging.getLogger(__name__)
Job = Callable[[], None]


class Server:
    """Serves what an agent hears."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._notices: dict[str, Callable[..., None]] = {
            "drop": agent.book.on_drop,
            "fork": agent.book.on_fork,
            "forked": agent.book.on_forked,
            "accept": agent.book.on_accept,
        }
        if agent.tracker is not None:
            self._notices.update(agent.tracker.notices)

    def accept(self, parts: Sequence[bytes | memoryview]) -> Job | None:
        """Take one message; what is to be done for it, if it can't be done here."""
        agent = self._agent
        try:
            message = decode_message(parts)
            if message.epoch != agent.epoch:
                raise WireError("it belongs to another group of workers")
            if message.kind is Kind.CONTROL:
                return self._accept_notice(message)
            sender = self._find_sender(message)
            if sender is None:
                return None
            if message.kind is Kind.CALL:
                return lambda: self._serve_call(message, sender)
            if message.kind is Kind.REMOTE:
                return self._accept_remote(message, sender)
            agent.book.on_answer(message.call_id)
            call = agent.take(message.call_id)
            return (lambda: self._discard(message)) if call is None else call.answer(message)
        except Exception:
            # Only a peer that holds the secret gets here: a bug, or an older version of weft.
            logger.exception("weft.rpc on %s: a message was not understood and is dropped", agent.info)
            return None

    def _find_sender(self, message: Message) -> Peer | None:
        """Who sent a message; None for a worker that was given up. Raises for one that is not known.

        Answers go to this worker, not to one that took its place meanwhile.
        """
        peer = self._agent.peers.get(message.sender)
        if peer is None:
            raise StateError(f"a message of worker {message.sender}, which has not introduced itself")
        if peer.lost is None:
            return peer
        if not peer.was_told and not peer.has_left:
            # Its link here still works, the one to it does not. It must not wait for answers.
            peer.was_told = True
            self._agent.links.send_last(self._agent.directory.address_of(peer), self._agent.write(("lost",)))
        return None

    # Notices

    def _accept_notice(self, message: Message) -> Job | None:
        agent, sender_id = self._agent, message.sender
        name, *arguments = read_notice(message.body, is_fenced=agent.packer.fence is not None)
        if name == "hello":
            text, ring = arguments
            card = Card.decode(text, sender_id, "its first message")
            known = agent.peers.get(card.id)
            self._check_card(card, known)
            if known is not None and known.card != card:
                agent.lose(card.id, "another worker has taken its place")
            peer = agent.directory.add(card)
            # So that each of the two notices when the other one dies.
            agent.introduce(peer)
            if ring is None or ring[0] != card.pid:  # memory of another process than it says it is
                return None
            if agent.links.accept_ring(sender_id, SegmentName(*ring)):
                agent.tell(sender_id, ("ring",))
        elif name == "ring":
            agent.use_ring(agent.peers[sender_id])
        elif name == "to ring":
            agent.links.read_ring(sender_id)
        elif name == "fetch":
            sender = self._find_sender(message)
            if sender is not None:
                rref_id, context_id = arguments
                return self._accept_fetch(message, sender, GlobalId(*rref_id), context_id)
        elif name == "bye":
            (failure,) = arguments
            why = "it has shut down (rpc.shutdown)" if failure is None else str(failure)
            agent.lose(sender_id, why, has_left=failure is None)
        elif name == "lost":
            agent.lose(sender_id, "it lost its link to this worker")
        elif self._find_sender(message) is not None:
            ids = [GlobalId(*part) if isinstance(part, tuple) else part for part in arguments]
            self._notices[name](sender_id, *ids)
        return None

    def _check_card(self, card: Card, known: Peer | None) -> None:
        """Raise WireError for a card that no worker of this group sends.

        In a group of fixed size all cards are known, and sealed; workers of another one may come anew.
        """
        if card.id == self._agent.info.id:
            raise WireError("a worker that has this worker's own id")
        if self._agent.is_static and (known is None or known.card != card):
            raise WireError(f"worker {card.id} has another card than the one it left in the store")

    def _accept_fetch(self, message: Message, sender: Peer, rref_id: GlobalId, context_id: int) -> Job | None:
        owned = self._agent.book.find(rref_id)
        if owned is None:
            error = StateError(
                f"OwnerRRef({rref_id}) is not there any more: {self._agent.info} has dropped it."
            )
            return lambda: self._reply_failure(message, sender, error)

        def reply() -> None:
            if owned.error is not None:
                self._reply_failure(message, sender, owned.error)
            else:
                self._reply(message, sender, owned.value, context_id)

        if owned.is_set:
            return reply
        # Its own job then: the thread that sets the value has an answer of its own to give.
        owned.when_set(lambda: self._agent.pool.submit(reply))
        return None

    # Calls

    def _serve_call(self, message: Message, sender: Peer) -> None:
        if self._agent.is_ended:
            return  # what has not begun when the worker ends does not begin
        try:
            context_id, result, future = self._run(message, message.body, sender)
        except BaseException as error:
            self._reply_failure(message, sender, error)
            return
        if future is None:
            is_alone = type(result) is torch.Tensor and sys.getrefcount(result) <= _NUM_ALONE
            self._reply(message, sender, result, context_id, is_given_up=is_alone)
        else:
            future.add_done_callback(lambda done: self._reply_future(message, sender, done))

    def _run(
        self, message: Message, body: bytes | memoryview, sender: Peer
    ) -> tuple[int, Any, torch.futures.Future[Any] | None]:
        """Run what a message asks for: its context, and its result or the future of it."""
        packer = self._agent.packer
        function, args, kwargs = packer.unpack_call(body, message.buffers, sender.replying, self._settle)
        context_id = packer.context_of(body)
        outer, here.context_id = here.context_id, context_id
        try:
            result = function(*args, **kwargs)
        finally:
            here.context_id = outer
        if not is_async(function):
            return context_id, result, None
        if not isinstance(result, torch._C.Future):
            raise StateError(
                "Functions decorated with @rpc.async_function must return a torch.futures.Future object, "
                f"but got {type(result)} from {getattr(function, '__qualname__', function)}."
            )
        return context_id, None, cast("torch.futures.Future[Any]", result)

    def _settle(self, rrefs: list[Any]) -> None:
        """A function starts when the owners of its RRefs know of them, as in torch."""
        with self._agent.pool.blocking():
            self._agent.book.wait_confirmed(rrefs)

    def _accept_remote(self, message: Message, sender: Peer) -> Job:
        # The value is on the books before its maker runs: what comes next may already ask for it.
        rref_id, fork_id = (
            GlobalId(message.sender, number) for number in REMOTE_IDS.unpack_from(message.body)
        )
        is_own = message.sender == self._agent.info.id
        owned = self._agent.book.create(rref_id, None if is_own else fork_id, message.sender)
        return lambda: self._serve_remote(message, sender, owned)

    def _serve_remote(self, message: Message, sender: Peer, owned: OwnedValue) -> None:
        if self._agent.is_ended:
            return
        try:
            _, result, future = self._run(message, memoryview(message.body)[REMOTE_IDS.size :], sender)
        except BaseException as error:
            self._finish_remote(message, sender, owned, (None, error))
            return
        if future is None:
            self._finish_remote(message, sender, owned, (result, None))
        else:
            future.add_done_callback(lambda done: self._finish_remote(message, sender, owned, _outcome(done)))

    def _finish_remote(
        self, message: Message, sender: Peer, owned: OwnedValue, outcome: tuple[Any, BaseException | None]
    ) -> None:
        value, error = outcome
        if error is not None:
            self._log(error)
        elif isinstance(value, torch._C.Future):
            value, error = (
                None,
                StateError("Can not pickle torch.futures.Future: it was returned by a function."),
            )
        owned.set(value, error)
        self._agent.book.release_unheld(owned)
        self._agent.defer(sender, message.call_id, PACKED_NONE)

    # Answers

    def _reply_future(self, message: Message, sender: Peer, future: torch.futures.Future[Any]) -> None:
        value, error = _outcome(future)
        if error is not None:
            self._reply_failure(message, sender, error)
        else:
            self._reply(message, sender, value, self._agent.packer.context_of(message.body))

    def _reply(
        self, message: Message, sender: Peer, value: Any, context_id: int, *, is_given_up: bool = False
    ) -> None:
        try:
            packed = self._agent.packer.pack(value, sender.replying, context_id, is_given_up=is_given_up)
        except BaseException as error:
            self._reply_failure(message, sender, error)
            return
        self._send(message, sender, Kind.RESULT, packed)

    def _reply_failure(self, message: Message, sender: Peer, error: BaseException) -> None:
        self._log(error)
        packer = self._agent.packer
        failure = packer.describe_failure(error, self._agent.info)
        self._send(message, sender, Kind.FAILURE, packer.pack(failure, sender.replying))

    def _log(self, error: BaseException) -> None:
        # The caller hears of it too; but nobody may be waiting for its answer.
        text = "".join(traceback.format_exception(error))
        logger.warning("weft.rpc: a call failed on %s:\n%s", self._agent.info, text)

    def _send(self, message: Message, sender: Peer, kind: Kind, packed: Packed) -> None:
        agent = self._agent
        try:
            agent.send(sender, kind, message.call_id, packed.body, packed.buffers)
        except Exception:
            # It is gone, or this worker ends: nobody is there to be told.
            agent.packer.withdraw(packed)
            logger.debug("an answer to worker %s was not sent", message.sender, exc_info=True)
            return
        agent.packer.note_sent(packed)

    def _discard(self, message: Message) -> None:
        """Let go of an answer that nobody waits for: what it refers to is given back."""
        try:
            self._agent.packer.unpack(
                message.body, message.buffers, self._agent.peers[message.sender].calling
            )
        except Exception:
            logger.debug("a late answer could not be unpacked", exc_info=True)


def _count_alone() -> int:
    """How many references there are to what one local variable has."""
    alone = object()
    return sys.getrefcount(alone)


_NUM_ALONE = _count_alone()


def _outcome(future: torch.futures.Future[Any]) -> tuple[Any, BaseException | None]:
    try:
        return future.value(), None
    except BaseException as error:
        return None, error

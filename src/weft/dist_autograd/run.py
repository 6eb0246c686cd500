"""One worker's part of one distributed backward.

The engine of autograd runs once on every worker that takes part, from the roots (on the worker that called
backward) and from what was sent. Gradients for another worker are collected and go when all that this part
owes it are there, when the engine has nothing else to do, or with the answer to the message that began this
part. So a part sends all it has before it waits.

A part begins with the first gradients that come. The message that began it is answered when all of it is
done, and all that it began itself: the root is answered last.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from weft.autograd import run_engine
from weft.dist_autograd import messages
from weft.dist_autograd.context import DistAutogradContext
from weft.dist_autograd.cuts import RecvCut, root_gradient, second_start
from weft.dist_autograd.graph import Reached
from weft.dist_autograd.landing import Landing
from weft.dist_autograd.messages import Batch, Grads, flatten_batch, read_batch
from weft.dist_autograd.running import at_work
from weft.dist_autograd.starts import Start, Starts, are_leaves, are_unwatched, starts_of
from weft.errors import PeerTimeoutError
from weft.rpc.calls import LOOK_AGAIN, Answer, Call, Waiter
from weft.rpc.constants import UNSET_RPC_TIMEOUT
from weft.rpc.failures import Failure

if TYPE_CHECKING:
    from weft.rpc.agent import Agent
    from weft.rpc.tensors import Route
    from weft.rpc.workers import WorkerInfo

_Way = tuple[int, bool]  # a worker's id, and whether it gets answers
_GRACE_SECS = 1.0  # a worker that waits for gradients in vain shall be the first to say so


class Abandoned(Exception):
    """This part can't go on; the run's failure says why."""


class _Delivery(Call):
    """Gradients on their way to another worker. The answer says that its part is done."""

    is_internal = True

    def __init__(self, run: Run, to: WorkerInfo) -> None:
        # Without a timeout: whoever waits in vain for gradients says so, and can say which.
        super().__init__(to, "gradients of a backward", 0)
        self._run = run

    def answer(self, answer: Answer) -> None:
        self._run.on_answer(self, answer)


class Run:
    """A part of a backward. `number` is the backward's, the same on every worker."""

    def __init__(
        self, agent: Agent, context: DistAutogradContext, number: int, *, retain_graph: bool, is_exact: bool
    ) -> None:
        self.agent = agent
        self.context = context
        self.number = number
        self.landing = Landing(context)
        self.failure: tuple[int, Failure] | None = None  # the worker's id, and what happened there
        self._retain_graph = retain_graph
        self._is_exact = is_exact
        self._lock = threading.Lock()
        self._reached = Reached()
        self._taking_part: set[int] = set()  # numbers of what was sent, where that is known exactly
        self._arrived: dict[int, Grads] = {}
        self._outgoing: dict[_Way, tuple[Route, Batch]] = {}
        self._num_owed: dict[_Way, int] = {}  # messages whose gradients this part will give away
        self._starter: _Way = (-1, True)
        self._deliveries: set[_Delivery] = set()  # without an answer
        self._answers: deque[tuple[_Delivery, Answer]] = deque()
        self._waiter: Waiter | None = None
        self.has_begun = False  # somebody executes it

    # What nodes of the graph ask for

    def give_away(self, cut: RecvCut, grads: Grads) -> None:
        """Gradients of tensors that came from another worker are there."""
        key = (cut.route.peer_id, cut.route.is_answer)
        with self._lock:
            batch = self._outgoing.setdefault(key, (cut.route, []))[1]
            batch.append((cut.number, grads))
            num_owed = self._num_owed[key] = self._num_owed.get(key, 0) - 1
            is_ready = not num_owed and key != self._starter and _is_on_cpu(batch)
            self._wake()
        if is_ready:
            # What is left to do here, and the wait for other ranks, need not keep that worker waiting.
            _do_all(self._pack_outgoing(key))

    def take_arrived(self, number: int) -> Grads:
        """The gradients of tensors that were sent. Waits for them."""
        self._wait_arrived(number)
        return self._arrived.pop(number)

    def _wait_arrived(self, number: int) -> None:
        if number in self._arrived:
            return
        peer_id = self.context.sent[number].peer_id
        if self.agent.is_lost(peer_id):  # before this backward began
            raise self.agent.peers[peer_id].lost_error("its part of a backward")
        self._wait_until(lambda: number in self._arrived, number)

    # What comes in

    def put(self, batch: Batch) -> bool:
        """Gradients have come; whether they are the first, so that this part is to be executed."""
        with self._lock:
            self._arrived.update(batch)
            is_first, self.has_begun = not self.has_begun, True
            self._wake()
            return is_first

    def on_answer(self, delivery: _Delivery, answer: Answer) -> None:
        """A delivery is answered. It is opened by the thread that executes this part."""
        with self._lock:
            self._answers.append((delivery, answer))
            self._wake()

    def fail(self, worker_id: int, failure: Failure) -> bool:
        """End this part, since a worker's has failed; False when that was known. Must not wait."""
        with self._lock:
            if self.failure is not None:
                return False
            self.failure = (worker_id, failure)
            self._wake()
            return True

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.answer(LOOK_AGAIN)

    # Finding out what takes part

    def reach(self, nodes: Sequence[Any]) -> dict[int, list[int]]:
        """Go on from nodes of the graph: which numbers of which workers take part through them."""
        found: dict[int, list[int]] = {}
        with self._lock:
            for cut in self._reached.add(nodes):
                cut.check_context(self.context.id)
                found.setdefault(cut.route.peer_id, []).append(cut.number)
                way = (cut.route.peer_id, cut.route.is_answer)
                self._num_owed[way] = self._num_owed.get(way, 0) + 1
        return found

    def reach_sent(self, numbers: Sequence[int]) -> dict[int, list[int]]:
        """The same from what was sent, for what was not known to take part."""
        with self.context.lock:
            new = [number for number in numbers if number not in self._taking_part]
            self._taking_part.update(new)
            for number in new:
                self.context.check_sent(number, self.agent.info)
            tokens = [self.context.token_of(number) for number in new]
        nodes = [token.grad_fn for token in tokens if token.grad_fn is not None]
        return self.reach([node for node in nodes if not are_leaves(node)])

    # Execution

    def execute(
        self,
        roots: Sequence[torch.Tensor] = (),
        gradients: Sequence[torch.Tensor | None] = (),
        starter_id: int = -1,
    ) -> Batch:
        """Run this part. Returns what is left for the worker that began it; all else is done then."""
        self._starter = (starter_id, True)
        tokens = self.context.tokens(self._taking_part if self._is_exact else None)
        is_profiled: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        starts = Starts(tokens, self._arrived, is_profiled=is_profiled)
        if self._is_exact:
            self.reach([node for node in starts.first if are_leaves(node)])
        else:
            self.reach([*(root.grad_fn for root in roots), *starts.first])
        starts.settle(self._reached)
        try:
            self._run_first(roots, gradients, starts)
            if starts.late:
                self._run_late(starts)
        except BaseException:
            self.landing.settle(has_failed=True)
            raise
        self.landing.settle(has_failed=False)
        left = self._outgoing.pop(self._starter, None)
        if left is not None and (self._outgoing or self._deliveries or self._answers):
            # Others may need what follows from it before they are done.
            self._outgoing[self._starter] = left
            left = None
        if self._deliveries or self._outgoing or self._answers or self.failure is not None:
            self._wait_until(lambda: not self._deliveries)
        if not self._retain_graph:
            with self.context.lock:
                for number in tokens:
                    self.context.sent.pop(number, None)
        return [] if left is None else left[1]

    def _run_first(
        self,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        starts: Starts,
    ) -> None:
        if starts.waiting:
            self._reached.let_wait(list(starts.waiting.values()))
        self.landing.prepare(self._reached.leaves)
        with at_work(self) as more:
            own = [starts.tokens[number] for number in starts.waiting] + more
            self._run_engine(
                [*roots, *own],
                [*gradients, *([root_gradient()] * len(own))],
                self._take_starts(starts.arrived),
            )

    def _run_late(self, starts: Starts) -> None:
        """Go on with leaves whose gradients come from elsewhere, when they have come."""
        late = starts.late_leaves()
        leaves = [leaf for group in late.values() for leaf in group]
        are_bare = are_unwatched(leaves)
        if not are_bare:
            self.landing.prepare(dict.fromkeys(leaves))
        for number in late:
            self._wait_arrived(number)
        pairs = [
            (leaf, grad)
            for number, group in late.items()
            for leaf, grad in zip(group, self._arrived.pop(number), strict=True)
            if grad is not None
        ]
        if are_bare and self.landing.take(pairs):
            return
        if are_bare:
            self.landing.prepare(leaves)
        found = [(GradientEdge(leaf, 0), grad) for leaf, grad in pairs]
        with at_work(self) as more:
            self._run_engine(more, [root_gradient()] * len(more), found)

    def _take_starts(self, nodes: Mapping[int, Any]) -> list[Start]:
        """Where the engine starts for gradients that have arrived, by the numbers of what was sent."""
        return [
            start for number, node in nodes.items() for start in starts_of(node, self._arrived.pop(number))
        ]

    def _run_engine(
        self,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        starts: list[Start],
    ) -> None:
        self.landing.expect(starts)
        if len(starts) == 1 and not roots:
            starts.append(second_start())
        edges, grads = [edge for edge, _ in starts], [grad for _, grad in starts]
        if roots or edges:
            run_engine(roots, gradients, edges, grads, retain_graph=self._retain_graph)

    def _wait_until(self, is_done: Callable[[], bool], number: int | None = None) -> None:
        timeout_secs = self.agent.resolve_timeout(UNSET_RPC_TIMEOUT)
        if timeout_secs and number is None:
            timeout_secs += _GRACE_SECS
        while True:
            self._open_answers()
            sends = self._pack_outgoing()
            with self._lock:
                has_news = self.failure is not None or self._answers or self._outgoing
                is_over = is_done()
                if not has_news and not is_over:
                    waiter = self._waiter = Waiter(time.monotonic() + (timeout_secs or float("inf")))
                else:
                    waiter = None
            if waiter is not None:
                if not self.agent.pool.wait_for(waiter, lambda sends=sends: _do_all(sends)):
                    raise self._timeout_error(number, timeout_secs)
                continue
            _do_all(sends)
            if self.failure is not None:
                raise Abandoned
            if not has_news:
                return

    def _pack_outgoing(self, only: _Way | None = None) -> list[Callable[[], None]]:
        """Pack what there is for other workers, or for one; what sends it."""
        sends: list[Callable[[], None]] = []
        for key in list(self._outgoing) if only is None else [only]:
            with self._lock:
                found = self._outgoing.pop(key, None)
                if found is None:
                    continue  # another thread has it
                route, batch = found
                peer = self.agent.directory.find(route.peer_id)
                delivery = _Delivery(self, peer.info)
                self._deliveries.add(delivery)
            options = (self._retain_graph, self._is_exact)
            args = (self.context.id, self.number, *options, self.agent.info.id, *flatten_batch(batch))
            sends.append(self.agent.caller.pack(delivery, peer, messages.take_gradients, args, route))
        return sends

    def _open_answers(self) -> None:
        while self._answers:
            delivery, answer = self._answers.popleft()
            failure, *flat = self.agent.open_answer(answer)
            with self._lock:
                self._deliveries.discard(delivery)
                self._arrived.update(read_batch(flat))
            if failure is not None:
                self.fail(*failure)

    def _timeout_error(self, number: int | None, timeout_secs: float) -> PeerTimeoutError:
        if number is None:
            workers = sorted({delivery.to.name for delivery in self._deliveries})
            what = f"workers {', '.join(workers)} to do their parts"
            return PeerTimeoutError(self._timeout_text(what, timeout_secs))
        with self.context.lock:
            sent = self.context.sent.get(number)
        peer_id = -1 if sent is None else sent.peer_id
        what = (
            f"the gradients of tensors that it sent to worker {peer_id}. If what became of them there is not "
            "used for the loss they never come: give exact=True to backward"
        )
        return PeerTimeoutError(self._timeout_text(what, timeout_secs), [peer_id])

    def _timeout_text(self, what: str, timeout_secs: float) -> str:
        return (
            f"RPC ran for more than set timeout ({timeout_secs * 1000:g} ms) and will now be marked with an "
            f"error: the backward of context {self.context.id} on worker {self.agent.info} waited for {what}."
        )

    def note_error(self, error: BaseException) -> bool:
        """Note that this worker's part has failed; False when another one's had before."""
        return self.fail(self.agent.info.id, self.agent.packer.describe_failure(error, self.agent.info))


def _is_on_cpu(batch: Batch) -> bool:
    """Whether all gradients can be packed by any thread: none is one of a GPU's stream."""
    return all(grad is None or grad.is_cpu for _, grads in batch for grad in grads)


def _do_all(sends: Sequence[Callable[[], None]]) -> None:
    for send in sends:
        send()

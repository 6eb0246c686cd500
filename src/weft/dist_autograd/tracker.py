"""A worker's contexts, and what messages do to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from weft.dist_autograd import messages
from weft.dist_autograd.context import Contexts, DistAutogradContext
from weft.dist_autograd.cuts import RecvCut, recorded, tie_received
from weft.dist_autograd.messages import Batch
from weft.dist_autograd.run import Abandoned, Run
from weft.errors import BackwardError, StateError, WeftError
from weft.rpc.failures import Failure
from weft.rpc.tensors import Route
from weft.rpc.tracking import Stub

if TYPE_CHECKING:
    from weft.rpc.agent import Agent

_ENDED = "context ended"
_FAILED = "backward failed"
_REACHED = "context reached"
_FINDING = "finding out what takes part in a backward (exact=True)"


class GraphTracker:
    """Distributed autograd on one worker."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.contexts = Contexts(agent.info.id)
        self._left: list[DistAutogradContext] = []  # contexts that have ended, to be dropped
        # What other workers tell; heard where nothing may wait.
        self.notices: Mapping[str, Callable[..., None]] = {
            _ENDED: self._on_ended,
            _FAILED: self._on_failed,
            _REACHED: self._on_reached,
        }

    # Messages

    def on_call(self, context_id: int, route: Route) -> None:
        """Note which worker a context comes to."""
        context = self.contexts.join(context_id)
        if context is not None:
            _note_peer(context, route)

    def on_send(
        self,
        context_id: int,
        tensors: Sequence[torch.Tensor],
        route: Route,
        *,
        is_given_up: bool = False,
    ) -> Stub | None:
        """Note the tensors of a message that need gradients. Cut the graph, or leave that to `on_sent`."""
        context = self.contexts.join(context_id)
        if context is None:
            return None
        _note_peer(context, route)
        places = tuple([place for place, tensor in enumerate(tensors) if tensor.requires_grad])
        if not places:
            return None
        needy = [tensors[place] for place in places]
        return context.add_sent(route.peer_id, needy, are_given_up=is_given_up), places

    def on_sent(self, context_id: int, stub: Stub) -> None:
        """Cut the graph behind the tensors of a message that has been sent."""
        context = self.contexts.find(context_id)
        if context is not None:
            context.cut(stub[0])

    def on_withdraw(self, context_id: int, stub: Stub) -> None:
        """Forget a cut whose message was not sent."""
        context = self.contexts.find(context_id)
        if context is not None:
            with context.lock:
                context.sent.pop(stub[0], None)

    def on_receive(
        self, context_id: int, stub: Stub | None, tensors: Sequence[torch.Tensor], route: Route
    ) -> Sequence[torch.Tensor]:
        """Make tensors that came over a cut the outputs of a node."""
        self._left.clear()
        context = self.contexts.join(context_id)
        if context is not None:
            _note_peer(context, route)
        if stub is None:
            return tensors
        number, places = stub
        needy = [tensors[place] for place in places]
        if context is None:  # it has ended: they are leaves, as outside of any
            for tensor in needy:
                tensor.requires_grad_()
            return tensors
        tied, node = tie_received(RecvCut(context_id, number, route), needy)
        context.add_received(node)
        received = list(tensors)
        for place, tensor in zip(places, tied, strict=True):
            received[place] = tensor
        return received

    def is_open(self, context_id: int) -> bool:
        """Whether a message's context is one of this worker's, or becomes one now."""
        return self.contexts.join(context_id) is not None

    # The end of contexts

    def end(self, context_id: int, but: int = -1) -> DistAutogradContext | None:
        """End a context, here and wherever it went, `but` on one worker; what there was of it here."""
        context = self.contexts.end(context_id)
        if context is not None:
            self._fail_runs(context)
            for peer_id in context.called - {but, self._agent.info.id}:
                self._agent.tell_later(peer_id, (_ENDED, context_id))
        return context

    def _on_ended(self, sender_id: int, context_id: int) -> None:
        context = self.end(context_id, but=sender_id)
        if context is not None and context.is_large:
            self._agent.let_go([context])
        elif context is not None:
            self._left.append(context)

    def _fail_runs(self, context: DistAutogradContext) -> None:
        """End what goes on in a context that ends: nobody will send it what it waits for."""
        for run in list(context.runs.values()):
            error = StateError(f"dist_autograd: context {context.id} ended while a backward went on in it.")
            run.fail(self._agent.info.id, self._agent.packer.describe_failure(error, self._agent.info))

    def _on_reached(self, sender_id: int, context_id: int) -> None:
        """A worker has a context of this one's from a worker that is gone, and won't hear of its end."""
        context = self.contexts.find(context_id)
        if context is None:
            self._agent.tell(sender_id, (_ENDED, context_id))
        else:
            context.called.add(sender_id)

    # Backward

    def backward(
        self,
        context: DistAutogradContext,
        roots: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        *,
        retain_graph: bool,
        is_exact: bool,
    ) -> None:
        """Run a backward that begins here. Returns when all workers have done their parts."""
        number = self.contexts.new_run_id()
        run = self._open_run(context, number, retain_graph=retain_graph, is_exact=is_exact)
        assert run is not None
        run.put([])
        try:
            if is_exact:
                self._find_parts(run, retain_graph, run.reach([root.grad_fn for root in roots]))
            recorded(run.execute, roots, gradients)  # of the nodes that are added
        except Exception as error:
            self._fail(run, error)
            explained = self._explain(run, error)
            raise explained from explained.__cause__
        except BaseException as error:
            self._fail(run, error)
            raise
        finally:
            _close_run(run)

    def _explain(self, run: Run, error: Exception) -> BaseException:
        """What the caller of backward sees."""
        assert run.failure is not None
        worker_id, failure = run.failure
        is_own = worker_id == self._agent.info.id and not isinstance(error, Abandoned)
        cause = error if is_own else self._agent.packer.rebuild_failure(failure)
        if isinstance(cause, WeftError):
            return cause
        explained = BackwardError(f"Error on Node {worker_id}: {cause}", [worker_id])
        explained.__cause__ = cause
        return explained

    def _open_run(
        self, context: DistAutogradContext, number: int, *, retain_graph: bool, is_exact: bool
    ) -> Run | None:
        """This worker's part of a backward; None when that has ended."""
        with context.lock:
            if number in context.ended_runs:
                return None
            run = context.runs.get(number)
            if run is None:
                run = Run(self._agent, context, number, retain_graph=retain_graph, is_exact=is_exact)
                context.runs[number] = run
            return run

    def take_gradients(
        self, context_id: int, number: int, options: tuple[bool, bool], starter_id: int, batch: Batch
    ) -> tuple[tuple[int, Failure] | None, Batch]:
        """Take gradients for a part of a backward, and execute it if they are the first."""
        retain_graph, is_exact = options
        context = self.contexts.get(context_id)
        run = self._open_run(context, number, retain_graph=retain_graph, is_exact=is_exact)
        if run is None and context.ended_runs.get(number):
            return None, []  # it has failed; whoever sent this will hear of it
        for sent_number, _ in batch:
            context.check_sent(sent_number, self._agent.info)
        if run is None or not run.put(batch):
            return None, []
        try:
            left = run.execute(starter_id=starter_id)
        except BaseException as error:
            self._fail(run, error)
            return run.failure, []
        finally:
            _close_run(run)
        return None, left

    def find_part(
        self, context_id: int, number: int, retain_graph: bool, asker_id: int, numbers: Sequence[int]
    ) -> list[int]:
        """Find out what takes part in a backward through what this worker has sent; what of the asker's."""
        context = self.contexts.get(context_id)
        run = self._open_run(context, number, retain_graph=retain_graph, is_exact=True)
        if run is None:
            return []
        return self._find_parts(run, retain_graph, run.reach_sent(numbers), asker_id)

    def _find_parts(
        self, run: Run, retain_graph: bool, found: Mapping[int, Sequence[int]], asker_id: int = -1
    ) -> list[int]:
        """Go on from what was found, by worker, until nothing is. Returns what the asker is to go on from."""
        own_id, for_asker = self._agent.info.id, list[int]()
        while found:
            for_asker += found.get(asker_id, ())
            next_numbers = [*found.get(own_id, ())]
            asked = {
                peer_id: (run.context.id, run.number, retain_graph, own_id, *numbers)
                for peer_id, numbers in found.items()
                if peer_id not in (asker_id, own_id)
            }
            for numbers in self._agent.caller.ask_all(messages.find_part, asked, _FINDING):
                next_numbers += numbers
            found = run.reach_sent(next_numbers)
        return for_asker

    # Failure

    def _fail(self, run: Run, error: BaseException) -> None:
        if not isinstance(error, Abandoned):
            run.note_error(error)
        assert run.failure is not None
        self._spread(run.context, run.number, *run.failure)

    def _spread(
        self, context: DistAutogradContext, number: int, worker_id: int, failure: Failure, but: int = -1
    ) -> None:
        for peer_id in context.neighbours - {self._agent.info.id, but}:
            self._agent.tell(peer_id, (_FAILED, context.id, number, worker_id, list(failure)))

    def _on_failed(
        self, sender_id: int, context_id: int, number: int, worker_id: int, words: list[Any]
    ) -> None:
        context = self.contexts.find(context_id)
        if context is None:
            return
        headline, text, body = words
        failure: Failure = (headline, text, body)
        with context.lock:
            run = context.runs.get(number)
            if run is None and number in context.ended_runs:
                return
            context.ended_runs[number] = True
        if run is None:
            self._spread(context, number, worker_id, failure, but=sender_id)
        else:
            self._fail_open(run, worker_id, failure, but=sender_id)

    def _fail_open(self, run: Run, worker_id: int, failure: Failure, but: int) -> None:
        """End a part that this worker does not execute on this thread, and tell the others."""
        if run.fail(worker_id, failure):
            self._spread(run.context, run.number, worker_id, failure, but)
        if not run.has_begun:
            _close_run(run)

    def on_lost(self, peer_id: int) -> None:
        """A worker is gone: what needs it fails, and its contexts end."""
        for context in self.contexts.all():
            if peer_id in context.neighbours:
                for run in list(context.runs.values()):
                    error = self._agent.peers[peer_id].lost_error("its part of a backward")
                    failure = self._agent.packer.describe_failure(error, self._agent.info)
                    self._fail_open(run, self._agent.info.id, failure, but=peer_id)
            creator_id = context.id >> 48
            if creator_id == peer_id:
                self._on_ended(peer_id, context.id)
            elif peer_id in context.neighbours and creator_id != self._agent.info.id:
                self._agent.tell(creator_id, (_REACHED, context.id))

    def close(self) -> None:
        """This worker ends: nothing goes on."""
        for context in self.contexts.all():
            self._fail_runs(context)
            self.contexts.end(context.id)

    def debug_info(self) -> dict[str, str]:
        """Numbers for the curious, under torch's names."""
        contexts = self.contexts.all()
        num_runs = sum(run.has_begun for context in contexts for run in list(context.runs.values()))
        return {"num_current_backward_passes": str(num_runs), "num_autograd_contexts": str(len(contexts))}


def _note_peer(context: DistAutogradContext, route: Route) -> None:
    context.neighbours.add(route.peer_id)
    if not route.is_answer:
        context.called.add(route.peer_id)


def _close_run(run: Run) -> None:
    with run.context.lock:
        run.context.runs.pop(run.number, None)
        run.context.ended_runs[run.number] = run.failure is not None


def tracker_here(agent: Agent) -> GraphTracker:
    """The tracker of an agent."""
    tracker = agent.tracker
    if type(tracker) is not GraphTracker:
        raise StateError("RPC was initialized before weft.dist_autograd was imported.")
    return tracker

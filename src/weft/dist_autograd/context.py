"""A context: what one worker keeps of a forward over several workers, until its gradients are used."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weft.autograd import Unsynced
from weft.dist_autograd.cuts import cut_sent
from weft.errors import StateError
from weft.tensors import holder_count

if TYPE_CHECKING:
    from weft.dist_autograd.run import Run

_NUM_ENDED = 4096  # contexts whose end is remembered: messages of theirs may still come


@dataclass(slots=True)
class Sent:
    """Tensors that were sent to another worker, or to this one.

    Invariant: one of `tensors` and `token` is there. With a token the graph behind them is cut. Where nothing
    that is done meanwhile can change that graph, the message goes first.
    """

    peer_id: int
    tensors: Sequence[torch.Tensor] | None
    token: torch.Tensor | None = None


class DistAutogradContext:
    """One worker's part of a context."""

    def __init__(self, context_id: int) -> None:
        self.id = context_id
        self.lock = threading.Lock()
        self.grads: dict[torch.Tensor, torch.Tensor] = {}
        self.unsynced: dict[Unsynced, Any] = {}  # what strategies have not reduced yet
        self.sent: dict[int, Sent] = {}  # by number, in the order in which they were sent
        self.received: dict[int, Any] = {}  # nodes, in the order in which they came
        self.called: set[int] = set()  # workers that this one has called
        self.neighbours: set[int] = set()  # these, and those that have called it
        self.runs: dict[int, Run] = {}
        self.ended_runs: dict[int, bool] = {}  # by number: whether it has failed
        self._numbers = itertools.count(1)
        self._num_received = itertools.count()

    def add_sent(self, peer_id: int, tensors: Sequence[torch.Tensor], *, are_given_up: bool = False) -> int:
        """Note tensors that are about to be sent; the number they go under."""
        number = next(self._numbers)
        with self.lock:
            self.sent[number] = Sent(peer_id, tensors)
            if not all(tensor.is_leaf or (are_given_up and _is_unseen(tensor)) for tensor in tensors):
                self.token_of(number)
        return number

    def cut(self, number: int) -> None:
        """Cut the graph behind tensors that were sent, as it is now, unless that is done."""
        with self.lock:
            if number in self.sent:
                self.token_of(number)

    def tokens(self, numbers: Container[int] | None = None) -> dict[int, torch.Tensor]:
        """The tokens of what was sent, under some numbers or all. Each holds the graph behind it."""
        with self.lock:
            chosen = [number for number in self.sent if numbers is None or number in numbers]
            return {number: self.token_of(number) for number in chosen}

    def token_of(self, number: int) -> torch.Tensor:
        """The token of what was sent under a number. The lock is held."""
        sent = self.sent[number]
        if sent.token is None:
            assert sent.tensors is not None
            sent.token, sent.tensors = cut_sent(number, sent.tensors), None
        return sent.token

    def check_sent(self, number: int, worker: object) -> None:
        """Raise where the graph of what was sent under a number is no longer there."""
        if number not in self.sent:
            raise StateError(
                f"dist_autograd: backward came to tensors that worker {worker} sent in context {self.id} for "
                "a second time. Give retain_graph=True to the first backward."
            )

    @property
    def is_large(self) -> bool:
        """Whether it holds more than a few nodes of the graph."""
        return bool(self.grads or self.sent or self.unsynced or self.runs)

    def add_received(self, node: Any) -> None:
        """Keep the node of tensors that were received."""
        self.received[next(self._num_received)] = node

    # Under torch's names

    def _context_id(self) -> int:
        return self.id

    def _send_functions(self) -> dict[int, Any]:
        return {number: token.grad_fn for number, token in self.tokens().items()}

    def _recv_functions(self) -> dict[int, Any]:
        return dict(self.received)

    def _known_worker_ids(self) -> set[int]:
        return set(self.called)


def _is_unseen(tensor: torch.Tensor) -> bool:
    """Whether nobody can write to a tensor that was given up, or to a view of it, and so change its graph."""
    return not tensor._is_view() and holder_count(tensor) == 1 and not weakref.getweakrefcount(tensor)


class Contexts:
    """The contexts of one worker."""

    def __init__(self, worker_id: int) -> None:
        self._worker_id = worker_id
        self._lock = threading.Lock()
        self._contexts: dict[int, DistAutogradContext] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._ids = itertools.count((worker_id << 48) + 1)
        self._run_ids = itertools.count((worker_id << 48) + 1)

    @property
    def max_id(self) -> int:
        """The largest id that a context of this worker can have."""
        return (self._worker_id << 48) | ((1 << 48) - 1)

    def new(self) -> DistAutogradContext:
        """Make a context with an id that no other one has, on any worker."""
        context = DistAutogradContext(next(self._ids))
        with self._lock:
            self._contexts[context.id] = context
        return context

    def new_run_id(self) -> int:
        """A number for a backward that begins here, which no other one has."""
        return next(self._run_ids)

    def find(self, context_id: int) -> DistAutogradContext | None:
        """A context that is open here."""
        return self._contexts.get(context_id)

    def get(self, context_id: int) -> DistAutogradContext:
        """A context that must be open here."""
        context = self._contexts.get(context_id)
        if context is None:
            raise StateError(
                f"Could not find autograd context with id: {context_id}. It has ended, or never was."
            )
        return context

    def join(self, context_id: int) -> DistAutogradContext | None:
        """A context that a message belongs to, made where it is new here; None when it has ended."""
        context = self._contexts.get(context_id)
        if context is not None:
            return context
        with self._lock:
            if context_id in self._ended or context_id >> 48 == self._worker_id:
                return self._contexts.get(context_id)
            return self._contexts.setdefault(context_id, DistAutogradContext(context_id))

    def end(self, context_id: int) -> DistAutogradContext | None:
        """Take a context out; None when it is not here."""
        with self._lock:
            self._ended[context_id] = None
            if len(self._ended) > _NUM_ENDED:
                self._ended.popitem(last=False)
            return self._contexts.pop(context_id, None)

    def all(self) -> list[DistAutogradContext]:
        """Those that are open."""
        with self._lock:
            return list(self._contexts.values())

"""Where the engine starts in one worker's part of a backward, beside the roots: at what was sent.

    gradients have arrived    at the tensors that were sent, with their gradients
    not yet, leaves           when they are there, after the engine's run: nothing else waits for them
    not yet, others           at Send, which waits (cuts.py)
    only for some tensors     at Send too, so that it hands on that there is none for the others
    in a profile              at Send, so that it is shown

Leaves that the run comes to from elsewhere too are treated as others, since autograd adds up what comes from
several sides; so are those with hooks of their own, which may be for several tensors, and those that a
strategy reduces. Late leaves that nobody watches need no engine. Where their nodes have hooks it runs again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from weft.autograd import has_hooks, has_tensor_hooks
from weft.data_parallel.arrivals import hooks_of
from weft.dist_autograd.graph import Reached
from weft.dist_autograd.messages import Grads
from weft.fsdp.param import is_unsharded_param

Start = tuple[GradientEdge, torch.Tensor]


class Starts:
    """The nodes of what was sent, by number, with what is to be done at each.

    `tokens` are held: without its token a node is not to be used.
    """

    def __init__(
        self, tokens: Mapping[int, torch.Tensor], arrived: Mapping[int, Grads], *, is_profiled: bool = False
    ) -> None:
        self.tokens = tokens
        self.arrived: dict[int, Any] = {}
        self.waiting: dict[int, Any] = {}
        self.late: dict[int, Any] = {}  # leaves, for the second run
        for number, token in tokens.items():
            node, grads = token.grad_fn, arrived.get(number)
            if node is None:
                continue  # leaves that don't need gradients any more
            if is_profiled:
                self.waiting[number] = node
            elif grads is None and are_leaves(node):
                self.late[number] = node
            elif grads is None or any(grad is None for grad in grads):
                self.waiting[number] = node
            else:
                self.arrived[number] = node

    @property
    def first(self) -> list[Any]:
        """The nodes from which the first run goes, as far as that is known."""
        return [*self.arrived.values(), *self.waiting.values()]

    def settle(self, reached: Reached) -> None:
        """Let those late leaves wait in the engine's run that must. `reached`: by that run, so far."""
        moved = list(self.late.items())
        while moved:
            moved = [
                (number, node)
                for number, node in self.late.items()
                if any(reached.has(leaf) or not _is_plain(leaf.variable) for leaf in _leaves_of(node))
            ]
            for number, node in moved:
                self.waiting[number] = self.late.pop(number)
                reached.add([node])
        if len(self.waiting) > 1:
            self.waiting = dict(sorted(self.waiting.items()))  # the order in which they were sent

    def late_leaves(self) -> dict[int, list[Any]]:
        """The nodes that add to the gradients of late leaves, by number."""
        return {number: _leaves_of(node) for number, node in self.late.items()}


def are_unwatched(leaves: Sequence[Any]) -> bool:
    """Whether nodes of leaves differ, and nobody has hooks on them."""
    return len(set(leaves)) == len(leaves) and not any(has_hooks(leaf) for leaf in leaves)


def starts_of(node: Any, grads: Iterable[torch.Tensor | None]) -> list[Start]:
    """Where the engine starts for the gradients of what was sent."""
    pairs = zip(node.next_functions, grads, strict=True)
    # A leaf that needs no gradient any more has no node.
    return [(GradientEdge(*edge), grad) for edge, grad in pairs if edge[0] is not None and grad is not None]


def are_leaves(node: Any) -> bool:
    """Whether all that was sent are leaves."""
    return all(getattr(leaf, "variable", None) is not None for leaf, _ in node.next_functions)


def _leaves_of(node: Any) -> list[Any]:
    return [leaf for leaf, _ in node.next_functions]


def _is_plain(variable: torch.Tensor) -> bool:
    return not hooks_of(variable) and not has_tensor_hooks(variable) and not is_unsharded_param(variable)

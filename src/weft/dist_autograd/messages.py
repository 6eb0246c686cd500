"""What workers ask each other during a backward. Served by RPC like any call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from weft.rpc import registry
from weft.rpc.message_forms import is_word, need

if TYPE_CHECKING:
    from weft.dist_autograd.tracker import GraphTracker


Grads = tuple[torch.Tensor | None, ...]
Batch = list[tuple[int, Grads]]  # gradients by the number under which the tensors were sent


def flatten_batch(batch: Batch) -> tuple[Any, ...]:
    """A batch with all its gradients side by side, which is how they travel fastest."""
    flat: list[Any] = []
    for number, grads in batch:
        flat += number, len(grads), *grads
    return tuple(flat)


def read_batch(flat: Sequence[Any]) -> Batch:
    """The batch that was flattened. One gradient that came for several tensors is now each one's own."""
    batch: Batch = []
    at = 0
    while at < len(flat):
        need(is_word(flat[at]) and at + 1 < len(flat) and is_word(flat[at + 1], len(flat)), "gradients")
        end = at + 2 + flat[at + 1]
        need(end <= len(flat) and all(_is_gradient(grad) for grad in flat[at + 2 : end]), "gradients")
        batch.append((flat[at], tuple(flat[at + 2 : end])))
        at = end
    ids = [id(grad) for _, grads in batch for grad in grads if grad is not None]
    return batch if len(set(ids)) == len(ids) else _parted(batch)


def _is_gradient(value: object) -> bool:
    return value is None or isinstance(value, torch.Tensor)


def _parted(batch: Batch) -> Batch:
    seen: set[int] = set()

    def own(grad: torch.Tensor | None) -> torch.Tensor | None:
        is_taken = grad is not None and id(grad) in seen
        seen.add(id(grad))
        return grad.clone() if grad is not None and is_taken else grad

    return [(number, tuple([own(grad) for grad in grads])) for number, grads in batch]


def _tracker() -> GraphTracker:
    tracker: Any = registry.current_agent().tracker
    return tracker


def take_gradients(
    context_id: int, number: int, retain_graph: bool, is_exact: bool, starter_id: int, *flat: Any
) -> tuple[Any, ...]:
    """Take gradients of tensors that this worker sent, a batch. The first begin its part of the backward.

    `is_exact`: what takes part is known. Returns what went wrong, if something did, and gradients for the
    caller, a batch too.
    """
    is_right = is_word(context_id) and is_word(number) and is_word(starter_id)
    need(is_right and type(retain_graph) is bool and type(is_exact) is bool, "a part of a backward")
    failure, left = _tracker().take_gradients(
        context_id, number, (retain_graph, is_exact), starter_id, read_batch(flat)
    )
    return failure, *flatten_batch(left)


def find_part(
    context_id: int, number: int, retain_graph: bool, asker_id: int, *numbers: int
) -> tuple[int, ...]:
    """Note that what this worker sent under these numbers takes part in a backward, and what follows.

    Returns the numbers of what the asker has sent and takes part thereby.
    """
    is_right = is_word(context_id) and is_word(number) and is_word(asker_id)
    need(is_right and type(retain_graph) is bool and all(map(is_word, numbers)), "a part of a backward")
    return tuple(_tracker().find_part(context_id, number, retain_graph, asker_id, numbers))

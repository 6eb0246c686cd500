"""What workers ask each other during a backward. Served by RPC like any call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.rpc import registry

if TYPE_CHECKING:
    from weft.dist_autograd.run import Batch
    from weft.dist_autograd.tracker import GraphTracker


def _tracker() -> GraphTracker:
    tracker: Any = registry.current_agent().tracker
    return tracker


def take_gradients(
    context_id: int, number: int, options: tuple[bool, bool], starter_id: int, batch: Batch
) -> tuple[Any, Batch]:
    """Take gradients of tensors that this worker sent. The first ones begin its part of the backward.

    `options`: whether to retain the graph, and whether what takes part is known. Returns what went wrong, if
    something did, and gradients for the caller.
    """
    return _tracker().take_gradients(context_id, number, options, starter_id, batch)


def find_part(context_id: int, number: int, retain_graph: bool, numbers: list[int]) -> None:
    """Note that what this worker sent under these numbers takes part in a backward, and what follows."""
    _tracker().find_part(context_id, number, retain_graph, numbers)

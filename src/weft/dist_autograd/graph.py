"""A look through autograd's graph: which leaves and which received tensors a backward will come to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from weft.autograd import run_last
from weft.dist_autograd.cuts import RecvCut, cut_of, is_anchor
from weft.errors import UnsupportedError

_REENTRANT = "CheckpointFunctionBackward"


class Reached:
    """What a backward comes to from nodes that are added one after the other."""

    def __init__(self) -> None:
        self.leaves: list[Any] = []  # nodes that add to a leaf's gradient
        self._nodes: set[Any] = set()

    def add(self, starts: Iterable[Any]) -> list[RecvCut]:
        """Go on from these nodes. Returns the cuts that were not reached before."""
        seen, cuts = self._nodes, list[RecvCut]()
        pending = [node for node in starts if node is not None]
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            following = node.next_functions
            if not following:
                self._add_leaf(node)
                continue
            cut = cut_of(node)
            if cut is not None:
                cuts.append(cut)
                continue
            if type(node).__name__ == _REENTRANT:
                raise _reentrant_error()
            for parent, _ in following:
                if parent is not None and parent not in seen:
                    pending.append(parent)
        return cuts

    def has(self, node: Any) -> bool:
        """Whether a node was reached."""
        return node in self._nodes

    def _add_leaf(self, node: Any) -> None:
        variable = getattr(node, "variable", None)
        if variable is not None and not is_anchor(variable):
            self.leaves.append(node)

    def let_wait(self, nodes: Sequence[Any]) -> None:
        """Let the engine come to nodes that wait after all that was reached, to the last of them first."""
        run_last(nodes, self._nodes)


def _reentrant_error() -> UnsupportedError:
    return UnsupportedError(
        "dist_autograd: a reentrant checkpoint hides parameters until it runs, so their gradients could not "
        "go into the context. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
    )

"""The parameters' places in autograd's graph, asked for when arrivals alone don't tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from weft.autograd import accumulation_node, is_reachable, will_run


class ParameterNodes:
    """The nodes that add to the parameters' gradients."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self._kept: dict[int, Any] = {}  # a node lives as long as somebody holds it

    def _nodes(self) -> dict[int, Any]:
        for index, param in enumerate(self._params):
            if param.requires_grad and index not in self._kept:
                self._kept[index] = accumulation_node(param)
        return self._kept

    def find_unused(self) -> list[int]:
        """Those that the backward under way won't come to."""
        nodes = self._nodes()
        return [
            index for index in range(len(self._params)) if index not in nodes or not will_run(nodes[index])
        ]

    def are_only_looked_at(self, roots: Iterable[Any]) -> bool:
        """Whether a backward without arrivals went through parameters all the same, or could not reach any.

        So it is with `torch.autograd.grad`, which asks for other gradients, and where all are frozen. A
        rank whose graph holds none of its parameters has used none, and must take part for those that have.
        """
        if not any(param.requires_grad for param in self._params):
            return True
        return is_reachable(roots, self._nodes().values())

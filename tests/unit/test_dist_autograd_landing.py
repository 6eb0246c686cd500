"""Gradients that came for leaves which nobody watches, and the end of a worker's part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.autograd import accumulation_node
from weft.dist_autograd.context import DistAutogradContext
from weft.dist_autograd.landing import Landing
from weft.dist_autograd.run import Abandoned, Run


def test_gradients_for_leaves_are_taken_as_they_are() -> None:
    context = DistAutogradContext(1)
    leaves = [torch.ones(3, requires_grad=True) for _ in range(2)]
    grads = [torch.full((3,), 2.0), torch.full((3,), 3.0)]
    landing = Landing(context)
    assert landing.take([(accumulation_node(leaf), grad) for leaf, grad in zip(leaves, grads, strict=True)])
    landing.settle(has_failed=False)
    assert all(context.grads[leaf] is grad for leaf, grad in zip(leaves, grads, strict=True))
    assert all(leaf.grad is None for leaf in leaves)


@pytest.mark.parametrize(
    "unfit", [torch.ones(3, dtype=torch.float64), torch.ones(1), torch.ones(3, device="meta")]
)
def test_none_is_taken_where_one_is_not_as_its_leaf(unfit: torch.Tensor) -> None:
    context = DistAutogradContext(1)
    leaves = [torch.ones(3, requires_grad=True) for _ in range(2)]
    landing = Landing(context)
    pairs = [(accumulation_node(leaves[0]), torch.ones(3)), (accumulation_node(leaves[1]), unfit)]
    assert not landing.take(pairs)
    landing.settle(has_failed=False)
    assert not context.grads


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_part_with_nothing_left_to_wait_for_ends_as_the_backward_does(has_failed: bool) -> None:
    agent: Any = SimpleNamespace(resolve_timeout=lambda _: 0)  # pyright: ignore[reportUnknownLambdaType]
    run = Run(agent, DistAutogradContext(1), 1, retain_graph=False, is_exact=False)
    if has_failed:
        assert run.fail(1, ("it", "broke", None))
        with pytest.raises(Abandoned):
            run.execute()
    else:
        assert run.execute() == []

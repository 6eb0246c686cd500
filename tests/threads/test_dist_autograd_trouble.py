"""Errors, contexts side by side, and optimizers, between workers that are threads of one process."""

from __future__ import annotations

import pytest

from tests.dist_autograd_bodies import failing, optimizing, sharing
from tests.rpc_bodies.running import Body, on_threads


@pytest.mark.parametrize("body", [*failing.BODIES, *failing.WEFT_ONLY])
def test_failing(body: Body) -> None:
    on_threads(body)


@pytest.mark.parametrize("body", sharing.WEFT_ONLY)
def test_sharing(body: Body) -> None:
    on_threads(body)


@pytest.mark.parametrize("body", [*optimizing.BODIES, *optimizing.WEFT_ONLY])
def test_optimizing(body: Body) -> None:
    on_threads(body)

"""Backward, its hooks and its two ways to count, between workers that are threads of one process."""

from __future__ import annotations

import pytest

from tests.dist_autograd_bodies import exact, hooks, late_hooks, passes
from tests.rpc_bodies.running import Body, on_threads


@pytest.mark.parametrize("body", passes.BODIES)
def test_passes(body: Body) -> None:
    on_threads(body)


@pytest.mark.parametrize("body", exact.WEFT_ONLY)
def test_exact(body: Body) -> None:
    on_threads(body)


@pytest.mark.parametrize("body", exact.SHORT_TIMEOUT)
def test_fast_counting_waits(body: Body) -> None:
    on_threads(body, rpc_timeout=exact.WAIT_SECS)


@pytest.mark.parametrize("body", [*hooks.BODIES, *late_hooks.WEFT_ONLY])
def test_hooks(body: Body) -> None:
    on_threads(body)

"""Tied weights, shared modules, groups in groups, groups of several modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fsdp_bodies import sharing
from tests.fsdp_bodies.running import on_threads


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("body", sharing.BODIES)
def test_two_ranks(body: Callable[..., None], reshard: bool | int | None) -> None:
    on_threads(body, 2, reshard)


@pytest.mark.parametrize("body", sharing.BODIES)
def test_four_ranks_that_reshard_to_two(body: Callable[..., None]) -> None:
    on_threads(body, 4, 2)

"""Buffers that the group allocates, and calls that it refuses, ranks as processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.local_bodies import allocated, refusals
from weft.testing.pool import shared_pool

pytestmark = pytest.mark.full


def run(body: Callable[..., None], *args: Any, ranks: int, backend: str = "weft") -> None:
    shared_pool(ranks).run(body, args=args, backend=backend, timeout=60)


@pytest.mark.parametrize("body", allocated.BODIES)
def test_allocated(body: Callable[[], None]) -> None:
    run(body, ranks=3)


@pytest.mark.parametrize("body", refusals.BODIES)
def test_refusals(body: Callable[[], None]) -> None:
    run(body, ranks=2)


@pytest.mark.parametrize("what", refusals.WRONG)
def test_arguments_that_cannot_work(what: str) -> None:
    run(refusals.refused, what, ranks=2)


@pytest.mark.parametrize("what", refusals.WRONG_AT_THE_DOOR)
def test_arguments_that_cannot_work_at_the_door(what: str) -> None:
    run(refusals.refused_at_the_door, what, ranks=2)

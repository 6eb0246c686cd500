"""Activation checkpointing with fully_shard, of both kinds, inside, around and beside its hooks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fsdp_bodies import checkpointing
from tests.fsdp_bodies.running import on_threads

REENTRANT = pytest.mark.parametrize("use_reentrant", [False, True])


@REENTRANT
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("body", checkpointing.BODIES)
def test_two_ranks(body: Callable[..., None], reshard: bool | int | None, use_reentrant: bool) -> None:
    on_threads(body, 2, reshard, use_reentrant)


@REENTRANT
@pytest.mark.parametrize("body", checkpointing.BODIES)
def test_four_ranks_that_reshard_to_two(body: Callable[..., None], use_reentrant: bool) -> None:
    on_threads(body, 4, 2, use_reentrant)

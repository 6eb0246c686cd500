"""Training with fully_shard equals a single process, whatever is resharded and however it is wrapped."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fsdp_bodies import training
from tests.fsdp_bodies.models import RESHARDS
from tests.fsdp_bodies.running import on_threads

Reshard = bool | int | None


@pytest.mark.parametrize(("ranks", "reshard"), [(2, True), (2, False), (4, 2), (4, None)])
@pytest.mark.parametrize("body", training.LONG)
def test_thirty_steps_of_adam(body: Callable[..., None], ranks: int, reshard: Reshard) -> None:
    on_threads(body, ranks, reshard)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("reshard", RESHARDS)
@pytest.mark.parametrize("body", training.BODIES)
def test_training(body: Callable[..., None], reshard: Reshard, ranks: int) -> None:
    on_threads(body, ranks, reshard)


@pytest.mark.parametrize("reshard", [True, False, None])
def test_a_world_of_one(reshard: Reshard) -> None:
    on_threads(training.each_wrapping, 1, reshard)

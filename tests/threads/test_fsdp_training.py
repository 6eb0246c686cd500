"""Training with fully_shard equals a single process, whatever is resharded and however it is wrapped."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fsdp_bodies import training
from tests.fsdp_bodies.running import on_threads

Reshard = bool | int | None


@pytest.mark.parametrize(("ranks", "reshard"), [(2, True), (2, False), (2, None), (4, 2)])
def test_thirty_steps_of_adam(ranks: int, reshard: Reshard) -> None:
    on_threads(training.transformer, ranks, reshard)


@pytest.mark.parametrize(("ranks", "reshard"), [(2, None), (4, True)])
def test_thirty_steps_of_adam_with_uneven_shards(ranks: int, reshard: Reshard) -> None:
    on_threads(training.transformer_with_an_odd_vocabulary, ranks, reshard)


@pytest.mark.parametrize(("ranks", "reshard"), [(2, True), (2, None), (4, 2)])
@pytest.mark.parametrize("body", training.BODIES)
def test_training(body: Callable[..., None], ranks: int, reshard: Reshard) -> None:
    on_threads(body, ranks, reshard)


@pytest.mark.parametrize("reshard", [True, False, None])
def test_a_world_of_one(reshard: Reshard) -> None:
    on_threads(training.each_wrapping, 1, reshard)

"""fully_shard on ranks that are processes, over gloo and the local group.

Bodies of one kind run in one job, one after the other: starting a group costs more than most of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.fsdp_bodies import divergence, hybrid, seed, training
from weft.testing.pool import shared_pool

Reshard = bool | int | None

BACKENDS = pytest.mark.parametrize("backend", ["weft", "gloo"])
RANKS = pytest.mark.parametrize("ranks", [2, 4])


def run(body: Callable[..., None], ranks: int, backend: str, *args: Any) -> None:
    shared_pool(ranks).run(body, args=args, backend=backend, timeout=90, collective_timeout=20)


def run_all(bodies: Sequence[Callable[..., None]], *args: Any) -> None:
    for body in bodies:
        body(*args)


def unused() -> None:
    for reshard in seed.RESHARDS:
        seed.unused_forward_output(reshard)
        seed.unused_forward_module(reshard)


def all_containers() -> None:
    for container in seed.CONTAINERS:
        seed.containers(container)


@BACKENDS
@RANKS
@pytest.mark.parametrize("body", [unused, all_containers, seed.hooks_run_once, seed.optimizer_in_backward])
def test_backward_through_sharded_modules(body: Callable[[], None], ranks: int, backend: str) -> None:
    run(body, ranks, backend)


@BACKENDS
@pytest.mark.parametrize(("ranks", "reshard"), [(2, True), (4, 2)])
def test_thirty_steps_of_adam(ranks: int, reshard: Reshard, backend: str) -> None:
    run(training.transformer, ranks, backend, reshard)


@BACKENDS
@pytest.mark.parametrize(("ranks", "reshard"), [(2, None), (4, False)])
def test_training(ranks: int, reshard: Reshard, backend: str) -> None:
    run(run_all, ranks, backend, training.BODIES, reshard)


@BACKENDS
@pytest.mark.parametrize(("ranks", "reshard"), [(2, False), (2, None), (4, True), (4, 2)])
def test_divergence(ranks: int, reshard: Reshard, backend: str) -> None:
    run(run_all, ranks, backend, divergence.BODIES, reshard)


@BACKENDS
def test_hybrid(backend: str) -> None:
    run(run_all, 4, backend, hybrid.BODIES)

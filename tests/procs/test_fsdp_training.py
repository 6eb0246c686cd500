"""fully_shard on ranks that are processes, over gloo and the local group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fsdp_bodies import divergence, hybrid, seed, training
from weft.testing.pool import shared_pool

BACKENDS = pytest.mark.parametrize("backend", ["weft", "gloo"])
TRAINING = [training.each_wrapping, training.large_layers, training.many_tiny_layers]


def run(body: Callable[..., None], ranks: int, backend: str, *args: Any) -> None:
    shared_pool(ranks).run(body, args=args, backend=backend, timeout=60, collective_timeout=15)


@BACKENDS
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("reshard", seed.RESHARDS)
def test_unused_outputs_and_modules(ranks: int, reshard: bool | int, backend: str) -> None:
    run(seed.unused_forward_output, ranks, backend, reshard)
    run(seed.unused_forward_module, ranks, backend, reshard)


@BACKENDS
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("container", seed.CONTAINERS)
def test_containers_of_activations(ranks: int, container: str, backend: str) -> None:
    run(seed.containers, ranks, backend, container)


@BACKENDS
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", [seed.hooks_run_once, seed.optimizer_in_backward])
def test_hooks_after_accumulation(body: Callable[[], None], ranks: int, backend: str) -> None:
    run(body, ranks, backend)


@BACKENDS
@pytest.mark.parametrize(("ranks", "reshard"), [(2, True), (2, None), (4, False), (4, 2)])
@pytest.mark.parametrize("body", [*training.LONG, *TRAINING])
def test_training(body: Callable[..., None], ranks: int, reshard: bool | int | None, backend: str) -> None:
    run(body, ranks, backend, reshard)


@BACKENDS
@pytest.mark.parametrize(("ranks", "reshard"), [(2, None), (4, True)])
@pytest.mark.parametrize("body", divergence.BODIES)
def test_divergence(body: Callable[..., None], ranks: int, reshard: bool | int | None, backend: str) -> None:
    run(body, ranks, backend, reshard)


@BACKENDS
@pytest.mark.parametrize("body", hybrid.BODIES)
def test_hybrid(body: Callable[[], None], backend: str) -> None:
    run(body, 4, backend)

"""Unused outputs and modules, containers of activations, hooks, the optimizer in backward."""

from __future__ import annotations

import pytest

from tests.fsdp_bodies import seed
from tests.fsdp_bodies.running import on_threads

RANKS = pytest.mark.parametrize("ranks", [2, 4])
RESHARD = pytest.mark.parametrize("reshard", seed.RESHARDS)


@RANKS
@RESHARD
def test_unused_forward_output(ranks: int, reshard: bool | int) -> None:
    on_threads(seed.unused_forward_output, ranks, reshard)


@RANKS
@RESHARD
def test_unused_forward_module(ranks: int, reshard: bool | int) -> None:
    on_threads(seed.unused_forward_module, ranks, reshard)


@RANKS
@pytest.mark.parametrize("container", seed.CONTAINERS)
def test_containers_of_activations(ranks: int, container: str) -> None:
    on_threads(seed.containers, ranks, container)


@RANKS
def test_hooks_after_accumulation_run_once(ranks: int) -> None:
    on_threads(seed.hooks_run_once, ranks)


@RANKS
def test_the_optimizer_in_backward_gives_the_same_bits(ranks: int) -> None:
    on_threads(seed.optimizer_in_backward, ranks)

"""Gradients of any placements clipped as one vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.fsdp_bodies.running import on_threads
from tests.optimizer_bodies import clip

PLACEMENTS = st.sampled_from([Shard(0), Shard(1), Replicate(), Partial(), Partial("avg")])
SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 6))


def on_mesh(name: str, num_axes: int) -> st.SearchStrategy[Any]:
    return st.tuples(st.just(name), st.lists(PLACEMENTS, min_size=num_axes, max_size=num_axes), SHAPES)


DRAWN = st.one_of(
    st.tuples(st.just("plain"), st.just(()), SHAPES),
    on_mesh("dp", 1),
    on_mesh("tp", 1),
    on_mesh("all", 1),
    on_mesh("dp tp", 2),
)


@pytest.mark.parametrize("body", clip.BODIES)
def test_clip(body: Callable[[], None]) -> None:
    on_threads(body, 4)


@settings(max_examples=25, deadline=None)
@given(st.lists(DRAWN, min_size=1, max_size=8), st.sampled_from(clip.ORDERS))
def test_random_mixtures(drawn: list[Any], order: float) -> None:
    on_threads(clip.random_mixture, 4, drawn, order)

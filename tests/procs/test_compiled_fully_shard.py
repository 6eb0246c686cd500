"""Compiled models under fully_shard on process-ranks, against eager ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.compile_bodies import sharded, sharded_edges, sharded_over_split
from weft.testing.pool import shared_pool

GROUPS = pytest.mark.parametrize("group", ["gloo", "weft"])


@GROUPS
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_steps(backend: str, group: str) -> None:
    shared_pool(2).run(sharded.steps, args=(backend,), backend=group, timeout=150)


@pytest.mark.parametrize(("cap_mb", "group"), [(None, "gloo"), (0.0, "weft")])
def test_inductor(cap_mb: float | None, group: str) -> None:
    shared_pool(2).run(sharded.with_inductor, args=(cap_mb,), backend=group, timeout=240)


def test_custom_root_with_inductor() -> None:
    shared_pool(2).run(sharded.custom_with_inductor, backend="gloo", timeout=240)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_over_tensor_parallel(backend: str) -> None:
    shared_pool(4).run(sharded_over_split.steps, args=(backend,), backend="gloo", timeout=150)


@pytest.mark.parametrize("body", [*sharded.BODIES, *sharded_edges.BODIES])
def test_models(body: Callable[[], None]) -> None:
    shared_pool(2).run(body, backend="gloo", timeout=150)

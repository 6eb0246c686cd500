"""The hooks' tests of the contract on process-ranks, against a single process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.data_parallel_bodies import seed_hooks
from tests.data_parallel_bodies.libraries import weft_only
from weft.testing.pool import shared_pool

QUANTIZED = [
    pytest.param(body, marks=weft_only("can't quantize on the CPU")) for body in seed_hooks.QUANTIZED_BODIES
]


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", [*seed_hooks.BODIES, *QUANTIZED])
def test_hook(body: Callable[[], None], ranks: int, backend: str) -> None:
    shared_pool(ranks).run(body, backend=backend, timeout=60)

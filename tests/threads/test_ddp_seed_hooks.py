"""The hooks' tests of the contract on thread-ranks, against a single process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import weft
from tests.data_parallel_bodies import seed_hooks
from tests.data_parallel_bodies.libraries import weft_only

QUANTIZED = [
    pytest.param(body, marks=weft_only("can't quantize on the CPU")) for body in seed_hooks.QUANTIZED_BODIES
]


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", [*seed_hooks.BODIES, *QUANTIZED])
def test_hook(body: Callable[[], None], ranks: int, backend: str) -> None:
    weft.launch(body, ranks=ranks, kind="thread", backend=backend, timeout=60)

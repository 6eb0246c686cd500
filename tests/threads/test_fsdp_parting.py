"""Ranks that use different modules, together with everything else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fsdp_bodies import parting
from tests.fsdp_bodies.running import on_threads


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", parting.BODIES)
def test_parting(body: Callable[..., None], ranks: int) -> None:
    on_threads(body, ranks)

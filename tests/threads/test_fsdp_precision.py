"""Mixed precision, several dtypes in one group, frozen parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fsdp_bodies import precision
from tests.fsdp_bodies.running import on_threads


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", precision.BODIES)
def test_precision(body: Callable[..., None], ranks: int) -> None:
    on_threads(body, ranks)

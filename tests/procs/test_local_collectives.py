"""The local group, ranks as processes: every collective gives what one process computes by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.local_bodies import dense, forms, layouts, messages
from weft.testing.pool import shared_pool

pytestmark = pytest.mark.full


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", [*dense.BODIES, *layouts.BODIES, *messages.BODIES, *forms.BODIES])
def test_collective(body: Callable[[], None], ranks: int) -> None:
    shared_pool(ranks).run(body, backend="weft", timeout=60)


@pytest.mark.parametrize("body", [*dense.GLOO_BODIES, *messages.BODIES, *forms.BODIES])
def test_gloo_agrees(body: Callable[[], None]) -> None:
    shared_pool(4).run(body, backend="gloo", timeout=20)

"""The local group, ranks as threads: every collective gives what one process computes by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import weft
from tests.local_bodies import dense, forms, layouts, messages


@pytest.mark.filterwarnings("ignore:.*coalesced.* will be deprecated:FutureWarning")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("body", [*dense.BODIES, *layouts.BODIES, *messages.BODIES, *forms.BODIES])
def test_collective(body: Callable[[], None], ranks: int) -> None:
    weft.launch(body, ranks=ranks, kind="thread", backend="weft", timeout=60)

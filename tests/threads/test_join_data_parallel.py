"""DDP and ZeRO under Join, on rank-threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import weft
from tests.join_bodies.data_parallel import BODIES


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_body(body: Callable[[], None], ranks: int) -> None:
    weft.launch(body, ranks=ranks, kind="thread", timeout=30)

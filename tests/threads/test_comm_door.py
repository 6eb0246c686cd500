"""The one door, ranks as threads: every function, its handle, its record and its check."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import weft
from tests.local_bodies import door, recording

BODIES = [
    *door.BODIES,
    door.late_ranks_are_named,
    *recording.BODIES,
    *recording.DESYNC_BODIES,
]


@pytest.mark.parametrize("body", BODIES)
def test_on_the_local_group(body: Callable[[], None]) -> None:
    weft.launch(body, ranks=3, kind="thread", backend="weft", timeout=60)

"""The one door, ranks as processes, on the local group and on gloo."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

import weft
from tests.local_bodies import door, recording
from weft.testing.pool import shared_pool

BODIES = [
    *door.BODIES,
    door.dropped_handles_warn,
    door.late_ranks_are_named,
    *recording.BODIES,
    *recording.DESYNC_BODIES,
]


@pytest.mark.parametrize("backend", ["weft", "gloo"])
@pytest.mark.parametrize("body", BODIES)
def test_on(backend: str, body: Callable[[], None]) -> None:
    shared_pool(3).run(body, backend=backend, timeout=20)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["weft", "gloo"])
def test_the_environment_turns_the_check_on(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DESYNC_CHECK", "1")
    weft.launch(recording.desync_of_every_kind, ranks=2, backend=backend, timeout=60)
    assert os.environ["WEFT_DESYNC_CHECK"] == "1"

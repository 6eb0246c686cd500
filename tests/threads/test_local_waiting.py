"""Ranks that wait, leave, fail or are many, as threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import weft
from tests.local_bodies import leaving, waiting


def run(body: Callable[[], Any], ranks: int) -> list[Any]:
    return weft.launch(body, ranks=ranks, kind="thread", backend="weft", timeout=60)


@pytest.mark.full
def test_more_ranks_than_cores() -> None:
    run(waiting.every_collective_once, 64)


@pytest.mark.parametrize("body", waiting.BODIES)
def test_waiting(body: Callable[[], None]) -> None:
    run(body, 3)


@pytest.mark.parametrize("body", leaving.BODIES)
def test_leaving(body: Callable[[], str]) -> None:
    assert run(body, 3)[0] == "named it"


@pytest.mark.parametrize(("body", "culprit"), [(leaving.raises, 2), (leaving.raises_in_the_middle, 1)])
def test_the_first_cause_is_told_once(body: Callable[[], None], culprit: int) -> None:
    with pytest.raises(weft.LaunchError) as caught:
        run(body, 3)
    error = caught.value
    assert isinstance(error.__cause__, OSError)
    assert str(error).startswith(f"launch: rank {culprit} of 3 raised OSError: disk full")
    for rank in {0, 1, 2} - {culprit}:
        report = error.failures[rank]
        assert "PeerError" in report
        assert f"rank {culprit}" in report
        assert report.count("disk full") == 1, report

"""Sizes that don't divide by the ranks, and ranks with nothing."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

import weft
from tests.tp_bodies import uneven
from tests.tp_bodies.running import WEFT, on_threads


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", uneven.BODIES)
def test_uneven(body: Callable[..., None], ranks: int) -> None:
    on_threads(body, ranks, WEFT)


def test_rows_that_are_not_cut_in_order() -> None:
    on_threads(uneven.oddly_cut_rows_are_right_or_refused, 2, WEFT)


def test_the_rank_whose_input_is_wrong_is_named() -> None:
    with pytest.raises(weft.LaunchError) as caught:
        on_threads(uneven.one_rank_is_wrong, 4, WEFT)
    report = caught.value.failures[3]
    (line,) = {line for line in report.splitlines() if "Error:" in line and "net2" in line}
    assert "rank 3" in line
    assert {"2", "3"} <= set(re.findall(r"\d+", line.replace("rank 3", "").replace("net2", "")))

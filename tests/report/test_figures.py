"""Where a step's time went, on events made by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.comm import Event
from weft.observe.figures import covered_secs, hidden_share, make_figures, merge


def event(start: float, end: float, wait_start: float | None = None, *, site: str = "a.py:1 in f") -> Event:
    return Event(
        op="all_reduce",
        feature="ddp",
        rank=0,
        group="0",
        group_size=2,
        bytes_in=8,
        bytes_out=8,
        dtype=torch.float32,
        shapes=((2,),),
        detail="sum",
        site=site,
        start_secs=start,
        end_secs=end,
        wait_start_secs=wait_start,
    )


def test_overlapping_collectives_count_once() -> None:
    events = [event(1, 4, 3), event(2, 5, 4.5), event(7, 8)]
    figures = make_figures(3, (0, 10), events, memory_bytes=5, scalars={"loss": 2.0})
    assert (figures.step, figures.secs, figures.memory_bytes, figures.scalars) == (3, 10, 5, {"loss": 2.0})
    assert figures.comm_secs == 5
    assert figures.wait_secs == 1.5
    assert figures.compute_secs == 8.5
    assert figures.bytes_in == 24
    assert figures.hidden_share == pytest.approx(0.7)


def test_what_lies_outside_of_the_step_is_cut_off() -> None:
    figures = make_figures(0, (2, 4), [event(0, 3, 1), event(3.5, 9, 3.75)], memory_bytes=0, scalars={})
    assert (figures.comm_secs, figures.wait_secs) == (1.5, 1.25)


def test_notes_count_for_nothing() -> None:
    figures = make_figures(0, (0, 4), [event(0, 3, site="")], memory_bytes=0, scalars={})
    assert (figures.comm_secs, figures.bytes_in) == (0, 0)
    assert figures.hidden_share == 1.0


def test_a_share_lies_between_nothing_and_all() -> None:
    assert hidden_share(0.0, 0.0) == 1.0
    assert hidden_share(2.0, 0.5) == 0.75
    assert hidden_share(1.0, 1.0000001) == 0.0


INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


@given(INTERVALS, st.integers(0, 20), st.integers(20, 40))
def test_merged_intervals_cover_the_same_points(
    intervals: list[tuple[int, int]], first: int, last: int
) -> None:
    merged = merge(intervals, (first, last))
    points = [point + 0.5 for point in range(first, last)]
    covered = [point for point in points if any(start < point < end for start, end in intervals)]
    assert [point for point in points if any(start < point < end for start, end in merged)] == covered
    assert covered_secs(intervals, (first, last)) == len(covered)
    assert all(one[1] < two[0] for one, two in itertools.pairwise(merged))

"""What ranks say under Join, as numbers: sums are read back, and whatever does not fit is found."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.join.wire import CallDescription, Status, decode_census, decode_description, encode_description

says = st.lists(st.sampled_from(list(Status)), min_size=1, max_size=64)


@given(says)
def test_a_census_counts_what_was_said(said: list[Status]) -> None:
    census = decode_census(sum(said), len(said))
    assert census.step == said.count(Status.STEP)
    assert census.covered == said.count(Status.COVERED)
    assert census.extra == said.count(Status.EXTRA)
    assert census.shadow == said.count(Status.SHADOW)
    assert census.idle == said.count(Status.IDLE)


def test_the_largest_group_fits_an_int64() -> None:
    for say in Status:
        total = say * 32767
        assert total < 1 << 63
        assert decode_census(total, 32767).describe()


def test_a_step_counts_the_active_ranks() -> None:
    assert 3 * Status.STEP + 2 * Status.IDLE == 3


GOOD = [
    {Status.IDLE},
    {Status.STEP},
    {Status.STEP, Status.IDLE},
    {Status.COVERED},
    {Status.COVERED, Status.SHADOW},
    {Status.EXTRA},
    {Status.EXTRA, Status.IDLE},
    {Status.EXTRA, Status.SHADOW},
    {Status.EXTRA, Status.SHADOW, Status.IDLE},
]
KINDS = [set(kinds) for count in range(1, len(Status) + 1) for kinds in itertools.combinations(Status, count)]


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "+".join(say.name for say in sorted(kinds)))
def test_what_can_go_on(kinds: set[Status]) -> None:
    census = decode_census(sum(kinds), len(kinds))
    assert (census.disagreement() is None) == (kinds in GOOD)


def test_only_idle_ranks_end_it() -> None:
    assert decode_census(0, 4).is_over
    assert not decode_census(Status.STEP, 4).is_over


numbers = st.integers(min_value=-1, max_value=1 << 40)
descriptions = st.builds(CallDescription, *[numbers] * 8)


def reduced(vectors: list[list[int]]) -> list[int]:
    return [max(column) for column in zip(*vectors, strict=True)]


@given(descriptions, st.lists(st.booleans(), min_size=1, max_size=8))
def test_a_description_reaches_joined_ranks(description: CallDescription, joined: list[bool]) -> None:
    joined = [*joined, False]
    vectors = [
        encode_description(None if has_joined else description, rank, len(joined))
        for rank, has_joined in enumerate(joined)
    ]
    found, ranks = decode_description(reduced(vectors))
    assert found == description
    assert ranks == [rank for rank, has_joined in enumerate(joined) if has_joined]


@given(descriptions, descriptions)
def test_descriptions_that_differ_are_found(one: CallDescription, other: CallDescription) -> None:
    found, _ = decode_description(reduced([encode_description(one, 0, 2), encode_description(other, 1, 2)]))
    assert found == (one if one == other else None)

"""Who owns which parameter: everybody something, nobody much more than the others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.optimizers.partition import plan_balanced, plan_runs

groups = st.lists(st.lists(st.integers(min_value=0, max_value=1000), max_size=12), min_size=1, max_size=4)
ranks = st.integers(min_value=1, max_value=8)


def loads(sizes: list[list[int]], owners: list[list[int]], num_ranks: int) -> list[int]:
    found = [0] * num_ranks
    for group, its_owners in zip(sizes, owners, strict=True):
        for size, owner in zip(group, its_owners, strict=True):
            found[owner] += size
    return found


@given(groups, ranks)
def test_balanced(sizes: list[list[int]], num_ranks: int) -> None:
    found = loads(sizes, plan_balanced(sizes, num_ranks), num_ranks)
    largest = max((size for group in sizes for size in group), default=0)
    assert max(found) - min(found) <= largest


@given(groups, groups, ranks)
def test_a_group_added_later_moves_nothing(
    sizes: list[list[int]], more: list[list[int]], num_ranks: int
) -> None:
    assert plan_balanced(sizes + more, num_ranks)[: len(sizes)] == plan_balanced(sizes, num_ranks)


@given(groups, ranks)
def test_runs(sizes: list[list[int]], num_ranks: int) -> None:
    owners = plan_runs(sizes, num_ranks)
    in_order = [owner for group in reversed(owners) for owner in reversed(group)]
    assert in_order == sorted(in_order)
    assert all(0 <= owner < num_ranks for owner in in_order)
    found = loads(sizes, owners, num_ranks)
    total = sum(map(sum, sizes))
    largest = max((size for group in sizes for size in group), default=0)
    assert all(load <= total / num_ranks + largest for load in found)


def test_the_largest_goes_first() -> None:
    assert plan_balanced([[1, 8, 5, 4]], 2) == [[0, 0, 1, 1]]

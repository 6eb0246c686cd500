"""Which rank keeps the optimizer state of which parameter. Pure: sizes in, owners out.

Invariant: every rank computes the same owners from the same sizes and order, and groups
that are added later change no owner of a parameter that was there before.
"""

from __future__ import annotations

from collections.abc import Sequence


def plan_balanced(sizes_by_group: Sequence[Sequence[int]], num_ranks: int) -> list[list[int]]:
    """An owner for each parameter: the largest first, each to the rank that has the least."""
    loads = [0] * num_ranks
    owners_by_group: list[list[int]] = []
    for sizes in sizes_by_group:
        owners = [0] * len(sizes)
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            owner = loads.index(min(loads))
            owners[index] = owner
            loads[owner] += sizes[index]
        owners_by_group.append(owners)
    return owners_by_group


def plan_runs(sizes_by_group: Sequence[Sequence[int]], num_ranks: int) -> list[list[int]]:
    """An owner for each parameter, so that neighbours share one: each rank gets a run of about equal size.

    Gradients become ready from the last parameter to the first, so the runs are cut
    in that order, and most of a bucket's parameters have one owner.
    """
    total = sum(sum(sizes) for sizes in sizes_by_group)
    owners_by_group = [[0] * len(sizes) for sizes in sizes_by_group]
    before = 0
    for group in reversed(range(len(sizes_by_group))):
        for index in reversed(range(len(sizes_by_group[group]))):
            size = sizes_by_group[group][index]
            # The rank in whose share the parameter's middle lies.
            middle = 2 * before + size
            owners_by_group[group][index] = min(num_ranks - 1, middle * num_ranks // max(1, 2 * total))
            before += size
    return owners_by_group

"""What ranks tell each other at the end of a forward or backward, as bits of a number. Pure.

A bit for each parameter that got a gradient on the rank, then two for each group: whether the rank has it on
the smaller mesh, and whether it keeps it whole.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Told:
    """One rank's, or what follows from all ranks': used by one of them, small and whole on all."""

    used: int
    small: int
    whole: int

    def pack(self, num_params: int, num_groups: int) -> int:
        """As one number."""
        return self.used | self.small << num_params | self.whole << (num_params + num_groups)

    @classmethod
    def unpack(cls, bits: int, num_params: int, num_groups: int) -> Told:
        """The way back."""
        groups = (1 << num_groups) - 1
        used, rest = bits & ((1 << num_params) - 1), bits >> num_params
        return cls(used, rest & groups, rest >> num_groups & groups)


def combine(told: Sequence[Told]) -> Told:
    """What follows from what each rank told."""
    return Told(
        functools.reduce(operator.or_, (each.used for each in told)),
        functools.reduce(operator.and_, (each.small for each in told)),
        functools.reduce(operator.and_, (each.whole for each in told)),
    )


def bits_of(places: Iterable[int]) -> int:
    """A number with these bits."""
    return sum(1 << place for place in places)

"""What ranks exchange under Join, encoded as numbers. Pure: no group, no device.

Two messages, both all-reduces on the group of the Joinables:

* A *status* is one int64, summed. Each `Status` is a digit of its own, so the sum is a census: how many ranks
  have which. Every rank reads the same census and draws the same conclusion from it.
* A *description* of a call that joined ranks have to make too is a vector of int64,
  taken by its maximum. Active ranks fill it in, joined ranks leave the lowest number. It
  holds each number twice, once negated, so that active ranks that describe different
  calls are noticed; behind it each rank marks whether it has joined.

The digit of STEP is the lowest: as long as ranks agree, the sum of a step's statuses is the
number of active ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from enum import IntEnum

_DIGIT_BITS = 15
_DIGIT = (1 << _DIGIT_BITS) - 1
MAX_GROUP_SIZE = _DIGIT


class Status(IntEnum):
    """What one rank is about to do."""

    IDLE = 0  # joined, between two steps
    STEP = 1  # active, a step begins
    COVERED = 1 << _DIGIT_BITS  # active, next is a call that a hook makes too
    EXTRA = 1 << 2 * _DIGIT_BITS  # active, next is a call that no hook knows
    SHADOW = 1 << 3 * _DIGIT_BITS  # joined, a hook wants to make the next COVERED call


@dataclass(frozen=True, slots=True)
class Census:
    """How many ranks have which status."""

    group_size: int
    step: int
    covered: int
    extra: int
    shadow: int

    @property
    def idle(self) -> int:
        """Joined ranks between two steps."""
        return self.group_size - self.step - self.covered - self.extra - self.shadow

    @property
    def num_active(self) -> int:
        """Ranks that have not joined."""
        return self.step + self.covered + self.extra

    @property
    def is_over(self) -> bool:
        """Whether every rank has joined."""
        return self.idle == self.group_size

    def disagreement(self) -> str | None:
        """Why this can't go on; None if it can."""
        active_kinds = sum(bool(count) for count in (self.step, self.covered, self.extra))
        if active_kinds > 1:
            return "active ranks do not make the same calls in a step."
        if self.shadow and not self.extra and (self.step or not self.covered):
            return (
                "a main hook makes more collectives than a step of the active ranks. Make each main_hook "
                "issue exactly the collectives of one step."
            )
        if self.covered and self.idle:
            return (
                "a step of the active ranks makes more collectives than the main hooks. Make each "
                "main_hook issue exactly the collectives of one step, and give Join every object that "
                "communicates in the loop."
            )
        return None

    def describe(self) -> str:
        """The census, for an error."""
        parts = (
            (self.step, "begin a step"),
            (self.covered, "are at a call of a joinable"),
            (self.extra, "are at a call of the user's"),
            (self.shadow, "have joined and are inside a main hook"),
            (self.idle, "have joined and wait for the next step"),
        )
        return ", ".join(f"{count} {what}" for count, what in parts if count)


def decode_census(total: int, group_size: int) -> Census:
    """Read the sum of the ranks' statuses."""
    digits = [total >> place * _DIGIT_BITS & _DIGIT for place in range(4)]
    return Census(group_size, *digits)


class Flag(IntEnum):
    """Bits of a description."""

    ZEROS = 1  # zeros from joined ranks are right, in a gather too
    OPAQUE = 2  # a call, or a form of it, that can't be made from a description
    OBJECTS = 4  # part of a collective of pickled objects
    FOREIGN = 8  # made by a part of weft that takes part in no Join
    NESTED = 16  # another Join on the same group
    DOOR = 32  # made through weft.comm


LOWEST = -(1 << 63) + 1  # its negation is an int64 too


@dataclass(frozen=True, slots=True)
class CallDescription:
    """One collective, for a rank that isn't in its code. Enumerations are places in shadow.py's tables.

    No collective minds the shape of a tensor, so the number of elements that a rank gives is enough.
    """

    op: int
    reduce_op: int = 0
    dtype: int = 0
    device: int = 0
    root: int = -1  # a rank of the world
    group: int = 0  # a number made of the group's name
    flags: int = 0
    numel: int = 0


_LENGTH = len(fields(CallDescription))


def encode_description(description: CallDescription | None, rank: int, group_size: int) -> list[int]:
    """What the rank gives: its description, or nothing and its mark when it has joined."""
    marks = [0] * group_size
    if description is None:
        marks[rank] = 1
        return [LOWEST] * (2 * _LENGTH) + marks
    numbers = astuple(description)
    return [*numbers, *(-number for number in numbers), *marks]


def decode_description(maxima: Sequence[int]) -> tuple[CallDescription | None, list[int]]:
    """What the active ranks describe, None when they differ; and the joined ranks, of the group."""
    numbers, negated = maxima[:_LENGTH], maxima[_LENGTH : 2 * _LENGTH]
    joined = [rank for rank, mark in enumerate(maxima[2 * _LENGTH :]) if mark]
    if any(number != -other for number, other in zip(numbers, negated, strict=True)):
        return None, joined
    return CallDescription(*numbers), joined

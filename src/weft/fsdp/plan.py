"""In which order the ranks of a mesh gather parameters and reduce gradients. Pure.

A step is a list of operations, one for each collective. The list of the last step is the plan of the next:
every rank works through it in order, so ranks can't disagree, also where one of them doesn't use a module
that another uses. What is not in the plan is agreed on between the ranks (conductor.py) and then put in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

# So many steps in a row may pass without any rank asking for an operation before the plan drops it.
_PATIENCE = 4


class Kind(IntEnum):
    """What an operation does with a group of parameters."""

    GATHER = 0
    REDUCE = 1


@dataclass(frozen=True, slots=True, order=True)
class Operation:
    """One collective: of which group, and what."""

    kind: Kind
    group: int

    @property
    def code(self) -> int:
        """A number above 0 that says the same."""
        return 1 + 2 * self.group + int(self.kind)

    @classmethod
    def of_code(cls, code: int) -> Operation:
        """The operation with this number."""
        group, kind = divmod(code - 1, 2)
        return cls(Kind(kind), group)


@dataclass(frozen=True, slots=True)
class Plan:
    """The operations of a step, and for how many steps nobody has asked for each."""

    operations: tuple[Operation, ...]
    idle: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.operations)

    def find(self, wanted: Operation, start: int) -> int | None:
        """Where the operation comes next, from `start` on."""
        try:
            return self.operations.index(wanted, start)
        except ValueError:
            return None


def first_plan(performed: Sequence[Operation]) -> Plan:
    """The plan for the step after the first: what that one did, with gathers one reduction earlier."""
    operations = gather_early(performed)
    return Plan(operations, (0,) * len(operations))


def gather_early(performed: Sequence[Operation]) -> tuple[Operation, ...]:
    """Put each gather before the reduction that came before it, so that the two overlap.

    The first step gathers a group when it is needed, which is after the group before it was reduced.
    A gather never moves before a gather, so no more than one group more is whole at a time.
    """
    order: list[Operation] = []
    was_passed = False  # the last reduction, by the gather that now stands before it
    for operation in performed:
        is_late = operation.kind is Kind.GATHER and bool(order) and order[-1].kind is Kind.REDUCE
        # Not while the group is whole from its last gathering: before its own reduction, or right after it.
        is_free = all(before.group != operation.group for before in order[-2:])
        if is_late and is_free and not was_passed:
            order.insert(len(order) - 1, operation)
            was_passed = True
        else:
            order.append(operation)
            was_passed = False
    return tuple(order)


def next_plan(plan: Plan, asked_for: Iterable[int], extras: Sequence[tuple[int, Operation]]) -> Plan:
    """The plan for the next step.

    `asked_for` are the places of the plan that some rank has asked for; `extras` what was done besides,
    each with the place before which it was asked for.
    """
    asked = set(asked_for)
    if not extras and len(asked) == len(plan) and not any(plan.idle):
        return plan
    by_place: dict[int, list[Operation]] = {}
    for place, operation in extras:
        by_place.setdefault(min(place, len(plan)), []).append(operation)
    entries: list[tuple[Operation, int]] = []
    for place in range(len(plan) + 1):
        entries += [(operation, 0) for operation in by_place.get(place, ())]
        if place < len(plan):
            idle = 0 if place in asked else plan.idle[place] + 1
            if idle < _PATIENCE:
                entries.append((plan.operations[place], idle))
    return Plan(tuple(op for op, _ in entries), tuple(idle for _, idle in entries))


def choose(wishes: Iterable[Operation]) -> Operation:
    """Which of several wishes is served first: the same on every rank."""
    return min(wishes)

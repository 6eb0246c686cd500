"""Collective order: all ranks of a mesh launch all-gathers and reductions in one order, whatever they run.

A phase is one forward or one backward. Its plan is the list of collectives that the last phase with the same
key performed. A rank that requests a collective first performs everything that the plan has before it; what
it doesn't need itself it does for its peers, with its shards and with zeros for gradients. So ranks that
follow the plan exchange nothing but parameters and gradients.

At the end of a phase the ranks agree: each says that it is done, or which collective it still requests that
the plan doesn't have; all perform that one, until all are done. A rank with such a request first performs the
rest of its plan, so that its peers reach their end and learn of it. The first phase with a key has no plan:
every collective of it is agreed on. The same message carries the rank's status.

Invariant: `OrderPlan` and everything before `CollectiveOrder` is pure, and equal on all ranks. How a group
launches a collective is param_group.py's work.
"""

from __future__ import annotations

import functools
import operator
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from weft import comm
from weft.errors import DesyncError
from weft.fsdp.mesh import FEATURE, DataParallelMesh

# A collective leaves the plan after so many steps in a row in which no rank has requested it.
_MAX_IDLE_STEPS = 4
_MAX_PREFETCHED = 2  # groups that are unsharded before this rank requests them
_INT_BITS = 62  # of a bitmask, in one integer of a message
_NUM_FIXED = 4  # integers of a message before the bitmasks
_UNPLANNED = -2  # the place of what is in no plan


class CollectiveKind(IntEnum):
    """What a collective does with a group of parameters."""

    ALL_GATHER = 0
    REDUCE = 1


@dataclass(frozen=True, slots=True, order=True)
class Collective:
    """One collective of a group, by the group's index in its mesh."""

    kind: CollectiveKind
    group: int

    @property
    def code(self) -> int:
        """The collective as a number above 0."""
        return 1 + 2 * self.group + int(self.kind)

    @classmethod
    def from_code(cls, code: int) -> Collective:
        """The collective with this number."""
        group, kind = divmod(code - 1, 2)
        return cls(CollectiveKind(kind), group)


@dataclass(frozen=True, slots=True)
class OrderPlan:
    """The collectives of a phase, and for how many steps no rank has requested each."""

    collectives: tuple[Collective, ...]
    idle_steps: tuple[int, ...]

    def find(self, wanted: Collective, start: int) -> int | None:
        """The next place of a collective, from `start` on."""
        try:
            return self.collectives.index(wanted, start)
        except ValueError:
            return None


def plan_second_step(performed: Sequence[Collective]) -> OrderPlan:
    """The plan that follows the first phase: what it performed, each all-gather one reduction earlier."""
    collectives = plan_early_all_gathers(performed)
    return OrderPlan(collectives, (0,) * len(collectives))


def plan_early_all_gathers(performed: Sequence[Collective]) -> tuple[Collective, ...]:
    """Put each all-gather before the reduction that precedes it, so that the two overlap.

    The first step unshards a group when it is needed, after the group before it was reduced. An all-gather
    never overtakes another one, so at most one group more is unsharded at a time.
    """
    order: list[Collective] = []
    has_overtaken = False  # the last reduction is overtaken already
    for collective in performed:
        is_late = (
            collective.kind is CollectiveKind.ALL_GATHER
            and bool(order)
            and order[-1].kind is CollectiveKind.REDUCE
        )
        # Not while the group is still unsharded: before its own reduction, or right after it.
        is_resharded = all(before.group != collective.group for before in order[-2:])
        if is_late and is_resharded and not has_overtaken:
            order.insert(len(order) - 1, collective)
            has_overtaken = True
        else:
            order.append(collective)
            has_overtaken = False
    return tuple(order)


def plan_next_step(
    plan: OrderPlan, requested: Iterable[int], unplanned: Sequence[tuple[int, Collective]]
) -> OrderPlan:
    """The plan for the next phase with the same key.

    `requested` are the places of the plan that some rank has requested; `unplanned` is what was performed
    besides, each with the place before which it was requested.
    """
    used = set(requested)
    length = len(plan.collectives)
    if not unplanned and len(used) == length and not any(plan.idle_steps):
        return plan
    by_place: dict[int, list[Collective]] = {}
    for place, collective in unplanned:
        by_place.setdefault(min(place, length), []).append(collective)
    entries: list[tuple[Collective, int]] = []
    for place in range(length + 1):
        entries += [(collective, 0) for collective in by_place.get(place, ())]
        if place < length:
            num_idle = 0 if place in used else plan.idle_steps[place] + 1
            if num_idle < _MAX_IDLE_STEPS:
                entries.append((plan.collectives[place], num_idle))
    return OrderPlan(tuple(one for one, _ in entries), tuple(num_idle for _, num_idle in entries))


@dataclass(frozen=True, slots=True)
class PhaseStatus:
    """End-of-phase status of a rank as bitmasks, or the combined status of all ranks.

    `used` has a bit for each parameter with a gradient: on this rank, or on any. The others have a bit for
    each group: sharded over the post-forward mesh, and unsharded past the phase; on this rank, or on all.
    """

    used: int
    post_forward: int
    unsharded: int

    def encode(self, num_params: int, num_groups: int) -> int:
        """One bitmask of all three."""
        return self.used | self.post_forward << num_params | self.unsharded << (num_params + num_groups)

    @classmethod
    def decode(cls, bits: int, num_params: int, num_groups: int) -> PhaseStatus:
        """The inverse of encode."""
        groups = (1 << num_groups) - 1
        used, rest = bits & ((1 << num_params) - 1), bits >> num_params
        return cls(used, rest & groups, rest >> num_groups & groups)

    @classmethod
    def combine(cls, masks: Sequence[int], num_params: int, num_groups: int) -> PhaseStatus:
        """The status of all ranks, of each rank's encoded one."""
        on_any = cls.decode(functools.reduce(operator.or_, masks), num_params, num_groups)
        on_all = cls.decode(functools.reduce(operator.and_, masks), num_params, num_groups)
        return cls(on_any.used, on_all.post_forward, on_all.unsharded)


def bitmask(places: Iterable[int]) -> int:
    """An integer with these bits set."""
    return sum(1 << place for place in places)


class OrderedGroup(Protocol):
    """A group of parameters, as its collective order sees it."""

    @property
    def is_unsharded_or_pending(self) -> bool:
        """Whether its parameters are unsharded, or an all-gather of them is under way."""
        ...

    @property
    def is_in_graphs(self) -> bool:
        """Whether compiled graphs unshard its parameters."""
        ...

    def start_all_gather(self) -> None:
        """Start to all-gather its parameters, for this rank or for peers."""
        ...

    def drop_prefetched(self) -> None:
        """Reshard parameters that were all-gathered and not used."""
        ...

    def start_reduce(self) -> None:
        """Start to reduce its gradients, for this rank or for peers."""
        ...


@dataclass(eq=False)
class Phase:
    """A forward or backward under way."""

    key: Hashable
    number: int
    plan: OrderPlan | None
    next_place: int = 0  # all places before it are performed
    requested: set[int] = field(default_factory=set[int])  # places of the plan
    last_requested: int = -1  # place of the last all-gather among them
    performed: list[Collective] = field(default_factory=list[Collective])
    unplanned: list[tuple[int, Collective]] = field(default_factory=list[tuple[int, Collective]])
    # All-gathers that this rank has not requested so far: ahead of the last requested one, or passed by.
    prefetched: list[tuple[int, Collective]] = field(default_factory=list[tuple[int, Collective]])

    @property
    def plan_length(self) -> int:
        """The number of collectives in its plan."""
        return 0 if self.plan is None else len(self.plan.collectives)


class CollectiveOrder:
    """The order of the collectives of one mesh."""

    def __init__(
        self,
        dp_mesh: DataParallelMesh,
        groups: Sequence[OrderedGroup],
        num_params: int = 0,
        finish_all_plans: Callable[[], None] = lambda: None,
    ) -> None:
        self._dp_mesh = dp_mesh
        self._groups = groups
        self._num_params = num_params
        self._finish_all_plans = finish_all_plans  # of this mesh and of the model's other ones
        self._plans: dict[Hashable, OrderPlan] = {}
        self._phases: list[Phase] = []
        self._num_phases = 0
        self._unsharded_everywhere = 0  # groups that every rank kept unsharded past the last phase
        self._is_single_rank = dp_mesh.shard_size * dp_mesh.replicate_size == 1

    # Phases

    def begin_phase(self, what: tuple[Hashable, ...], settings: Hashable) -> None:
        """Begin a forward or a backward. What it is and its settings select the plan; equal on all ranks."""
        key = (*what, self._unsharded_everywhere, settings)
        self._num_phases += 1
        self._phases.append(Phase(key, self._num_phases, self._plans.get(key)))

    def end_phase(self, status: PhaseStatus) -> PhaseStatus:
        """Finish the plan, and agree with all ranks that the phase has ended; their combined status."""
        if self._is_single_rank:
            self._phases.pop()
            combined = status
        else:
            combined = self._end_on_all_ranks(self._phases[-1], status)
        self._unsharded_everywhere = combined.unsharded
        return combined

    def _end_on_all_ranks(self, phase: Phase, status: PhaseStatus) -> PhaseStatus:
        sizes = self._num_params, len(self._groups)
        self.finish_plan()
        rows = self._agree(phase, None, status.encode(*sizes))
        self._phases.pop()
        status_start = _NUM_FIXED + _num_ints(phase.plan_length)
        if phase.plan is None:
            self._plans[phase.key] = plan_second_step(phase.performed)
        else:
            masks = [_join_bits(row[_NUM_FIXED:status_start]) for row in rows]
            requested = [
                place for place in range(phase.plan_length) if any(mask >> place & 1 for mask in masks)
            ]
            self._plans[phase.key] = plan_next_step(phase.plan, requested, phase.unplanned)
        return PhaseStatus.combine([_join_bits(row[status_start:]) for row in rows], *sizes)

    def forget_plans(self) -> None:
        """Start over as in the first step. Every rank must."""
        self._phases.clear()
        self._plans.clear()
        self._num_phases = 0

    def drop_phases(self) -> None:
        """Drop what an exception has left unfinished."""
        self._phases.clear()

    # Collectives

    def all_gather(self, group: int) -> None:
        """Start to all-gather parameters that this rank needs, and prefetch what the plan has next."""
        self._perform_request(Collective(CollectiveKind.ALL_GATHER, group))
        self.prefetch_next()

    def reduce(self, group: int) -> None:
        """Start to reduce the gradients that this rank has for the group."""
        self._perform_request(Collective(CollectiveKind.REDUCE, group))

    def use_prefetched(self, group: int) -> None:
        """Count an all-gather as requested that the plan has started already, and prefetch the next."""
        phase = self._phases[-1] if self._phases else None
        if phase is None:
            return
        places = [place for place, collective in phase.prefetched if collective.group == group]
        if places:
            _remove_prefetched(phase, group)
            if places[0] >= 0:
                self._mark_requested(phase, places[0])
        self.prefetch_next()

    def prefetch_next(self) -> None:
        """Start the all-gather that the plan has next, unless one is ahead already."""
        phase = self._phases[-1] if self._phases else None
        if phase is None or phase.plan is None or phase.next_place >= phase.plan_length:
            return
        if any(place > phase.last_requested for place, _ in phase.prefetched):
            return
        collective = phase.plan.collectives[phase.next_place]
        if collective.kind is not CollectiveKind.ALL_GATHER:
            return
        group = self._groups[collective.group]
        # What is unsharded now is all-gathered again for a second use: not before it was resharded.
        if not group.is_unsharded_or_pending and not group.is_in_graphs:
            self._perform_next(phase, is_requested=False)

    def finish_plan(self) -> None:
        """Perform the rest of the plan."""
        phase = self._phases[-1] if self._phases else None
        while phase is not None and phase.next_place < phase.plan_length:
            self._perform_next(phase, is_requested=False)

    def _perform_request(self, request: Collective) -> None:
        if self._is_single_rank or not self._phases:
            self._start(request)
            return
        phase = self._phases[-1]
        place = None if phase.plan is None else phase.plan.find(request, phase.next_place)
        if place is not None:
            while phase.next_place < place:
                self._perform_next(phase, is_requested=False)
            self._perform_next(phase, is_requested=True)
            return
        requested_at = phase.next_place
        if phase.plan is not None:
            self._finish_all_plans()
        self._agree(phase, request, 0, requested_at)

    def _perform_next(self, phase: Phase, *, is_requested: bool) -> None:
        assert phase.plan is not None
        place = phase.next_place
        collective = phase.plan.collectives[place]
        phase.next_place += 1
        self._start(collective)
        phase.performed.append(collective)
        if is_requested:
            self._mark_requested(phase, place)
        elif collective.kind is CollectiveKind.ALL_GATHER:
            phase.prefetched.append((place, collective))
            self._drop_passed(phase)

    def _mark_requested(self, phase: Phase, place: int) -> None:
        assert phase.plan is not None
        collective = phase.plan.collectives[place]
        phase.requested.add(place)
        if collective.kind is CollectiveKind.ALL_GATHER:
            _remove_prefetched(phase, collective.group)
            phase.last_requested = max(phase.last_requested, place)
            self._drop_passed(phase)

    def _drop_passed(self, phase: Phase) -> None:
        """Reshard what was all-gathered for peers, but for the last: this rank may use it out of order."""
        passed = [entry for entry in phase.prefetched if entry[0] < phase.last_requested]
        ahead = [entry for entry in phase.prefetched if entry[0] >= phase.last_requested]
        for entry in (*passed[:-1], *ahead[:-_MAX_PREFETCHED]):
            phase.prefetched.remove(entry)
            self._groups[entry[1].group].drop_prefetched()

    def _start(self, collective: Collective) -> None:
        group = self._groups[collective.group]
        if collective.kind is CollectiveKind.ALL_GATHER:
            group.start_all_gather()
        else:
            group.start_reduce()

    # Agreement

    def _agree(
        self, phase: Phase, request: Collective | None, status: int, requested_at: int = 0
    ) -> list[list[int]]:
        """Perform what some rank requests until this rank's request is done, or no rank has one."""
        num_status_bits = self._num_params + 2 * len(self._groups)
        masks = _split_bits(bitmask(phase.requested), _num_ints(phase.plan_length))
        masks += _split_bits(status, _num_ints(num_status_bits))
        key = zlib.crc32(repr(phase.key).encode())
        head = [phase.number, key, 0 if request is None else request.code, requested_at]
        while True:
            rows = self._exchange([*head, *masks])
            self._check_same_phase(phase, rows)
            places_by_code = {row[2]: row[3] for row in reversed(rows) if row[2]}
            if not places_by_code:
                return rows
            first = min(Collective.from_code(code) for code in places_by_code)  # the same on every rank
            self._start(first)
            phase.performed.append(first)
            if phase.plan is not None:
                phase.unplanned.append((places_by_code[first.code], first))
            if first == request:
                _remove_prefetched(phase, first.group)
                return rows
            if first.kind is CollectiveKind.ALL_GATHER:
                phase.prefetched.append((_UNPLANNED, first))
                self._drop_passed(phase)

    def _exchange(self, row: list[int]) -> list[list[int]]:
        """The rows of all ranks of the mesh, over one of its axes after the other."""
        rows = [row]
        for group in self._dp_mesh.groups:
            flat = [number for part in rows for number in part]
            parts = comm.exchange_rows(flat, group, feature=FEATURE, label="order of collectives")
            rows = [part[at : at + len(row)] for part in parts for at in range(0, len(part), len(row))]
        return rows

    def _check_same_phase(self, phase: Phase, rows: list[list[int]]) -> None:
        if all(row[:2] == rows[0][:2] for row in rows):
            return
        ranks = self._dp_mesh.mesh.mesh.flatten().tolist()
        phases = [tuple(row[:2]) for row in rows]
        usual = max(phases, key=phases.count)
        odd = [rank for rank, seen in zip(ranks, phases, strict=False) if seen != usual]
        raise DesyncError(
            f"fully_shard: the ranks are at different places: this one is at {phase.key!r}, number "
            f"{phase.number} of its forwards and backwards; ranks {odd} are elsewhere (numbers "
            f"{[number for number, _ in phases]}). Every rank must run as many forwards and backwards of the "
            "sharded model, with the same settings; weft.join.Join is for ranks that run out of inputs.",
            odd,
        )


def _remove_prefetched(phase: Phase, group: int) -> None:
    """This rank uses the group: it must not be resharded for having been prefetched."""
    phase.prefetched = [entry for entry in phase.prefetched if entry[1].group != group]


def _num_ints(num_bits: int) -> int:
    return -(-num_bits // _INT_BITS)


def _split_bits(bits: int, num_ints: int) -> list[int]:
    return [(bits >> (_INT_BITS * at)) & ((1 << _INT_BITS) - 1) for at in range(num_ints)]


def _join_bits(ints: Sequence[int]) -> int:
    return sum(part << (_INT_BITS * at) for at, part in enumerate(ints))

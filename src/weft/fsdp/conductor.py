"""Keeps the collectives of one mesh in one order on all its ranks, whatever modules each of them uses.

A phase is a forward or a backward. Its plan is what the last phase of its kind did. A rank that needs an
operation first performs everything that the plan has before it: what it doesn't need itself, it does for
the others, with its shards and with zeros. So ranks that follow the plan send nothing but data.

At its end a phase is settled: each rank says that it is done, or what it still needs and the plan doesn't
have; all then do that together, until all are done. A rank with such a wish first works off its plan, so
the others come to the end and hear of it. The first phase of a kind has no plan, and every operation is
settled. The same message tells which parameters have got a gradient on some rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from weft import comm
from weft.errors import DesyncError
from weft.fsdp.mesh import DataMesh
from weft.fsdp.plan import Kind, Operation, Plan, choose, first_plan, next_plan

_BITS = 62  # of a number in a message
_MOST_AHEAD = 2  # groups that are gathered before they are asked for
_FIXED = 4  # numbers before the bits


class Player(Protocol):
    """A group of parameters, as the conductor sees it."""

    @property
    def is_at_hand(self) -> bool:
        """Whether its parameters are gathered, or about to be."""
        ...

    @property
    def is_in_graphs(self) -> bool:
        """Whether compiled graphs gather its parameters."""
        ...

    def launch_gather(self) -> None:
        """Start to gather its parameters, or help others to."""
        ...

    def drop_ahead(self) -> None:
        """Free parameters that were gathered and not needed."""
        ...

    def launch_reduce(self) -> None:
        """Start to reduce the gradients it has, or help others to."""
        ...


@dataclass(eq=False)
class Phase:
    """One forward or backward under way."""

    key: Hashable
    number: int
    plan: Plan | None
    cursor: int = 0  # what comes before is done
    asked_for: set[int] = field(default_factory=set[int])  # places of the plan
    performed: list[Operation] = field(default_factory=list[Operation])
    extras: list[tuple[int, Operation]] = field(default_factory=list[tuple[int, Operation]])
    last_asked: int = -1  # the last of them
    # Gathered and not asked for, yet: ahead of what was asked for last, or passed by.
    early: list[tuple[int, Operation]] = field(default_factory=list[tuple[int, Operation]])


class Conductor:
    """The order of one mesh's collectives."""

    def __init__(self, data: DataMesh, players: Sequence[Player], serve_all: Callable[[], None]) -> None:
        self._data = data
        self._players = players
        self._serve_all = serve_all  # works off the plans of all meshes
        self._plans: dict[Hashable, Plan] = {}
        self._phases: list[Phase] = []
        self._num_phases = 0
        self.num_bits = 0  # that a rank has to tell at the end; set by whoever uses them
        self._is_alone = data.shard_size * data.replicate_size == 1

    # Phases

    def begin(self, key: Hashable) -> None:
        """A forward or a backward begins. Its key says which plan it follows, the same on all ranks."""
        self._num_phases += 1
        self._phases.append(Phase(key, self._num_phases, self._plans.get(key)))

    def end(self, bits: int = 0) -> list[int]:
        """It ends on this rank; returns when it has ended on all.

        `bits` is what this rank has to tell; returned is what each rank tells.
        """
        phase = self._phases[-1]
        if self._is_alone:
            self._phases.pop()
            return [bits]
        self.serve()
        rows = self._settle(phase, None, bits)
        self._phases.pop()
        num_places = len(phase.plan or ())
        if phase.plan is None:
            self._plans[phase.key] = first_plan(phase.performed)
        else:
            told = [_join_words(row[_FIXED : _FIXED + _num_words(num_places)]) for row in rows]
            asked = [place for place in range(num_places) if any(bits >> place & 1 for bits in told)]
            self._plans[phase.key] = next_plan(phase.plan, asked, phase.extras)
        return [_join_words(row[_FIXED + _num_words(num_places) :]) for row in rows]

    def start_over(self) -> None:
        """Forget all plans. Every rank must."""
        self._phases.clear()
        self._plans.clear()
        self._num_phases = 0

    def drop_phases(self) -> None:
        """Forget what an exception has left unfinished."""
        self._phases.clear()

    # Operations

    def gather(self, group: int) -> None:
        """This rank needs the group's parameters. Starts to gather them, and what comes next."""
        self._perform_wish(Operation(Kind.GATHER, group))
        self.look_ahead()

    def reduce(self, group: int) -> None:
        """This rank has gradients for the group. Starts the reduction."""
        self._perform_wish(Operation(Kind.REDUCE, group))

    def found_ready(self, group: int) -> None:
        """This rank needs the group's parameters, and the plan has gathered them already."""
        phase = self._phases[-1] if self._phases else None
        if phase is None:
            return
        places = [place for place, operation in phase.early if operation.group == group]
        if places:
            self._take_from_early(phase, group)
            if places[0] >= 0:
                self._was_asked(phase, places[0])
        self.look_ahead()

    def _take_from_early(self, phase: Phase, group: int) -> None:
        """It is needed: nobody may free it for having been gathered for others before."""
        phase.early = [entry for entry in phase.early if entry[1].group != group]

    def look_ahead(self) -> None:
        """Start the gathering that the plan has next, unless one is ahead already."""
        phase = self._phases[-1] if self._phases else None
        if phase is None or phase.plan is None or phase.cursor >= len(phase.plan):
            return
        if any(place > phase.last_asked for place, _ in phase.early):
            return
        operation = phase.plan.operations[phase.cursor]
        player = self._players[operation.group]
        # What is whole now is gathered again for a second use: not before it was freed.
        if operation.kind is Kind.GATHER and not player.is_at_hand and not player.is_in_graphs:
            self._step(phase, is_asked=False)

    def serve(self) -> None:
        """Perform what is left of the plan."""
        phase = self._phases[-1] if self._phases else None
        while phase is not None and phase.plan is not None and phase.cursor < len(phase.plan):
            self._step(phase, is_asked=False)

    def _perform_wish(self, wish: Operation) -> None:
        if self._is_alone or not self._phases:
            self._perform(wish)
            return
        phase = self._phases[-1]
        place = None if phase.plan is None else phase.plan.find(wish, phase.cursor)
        if place is not None:
            while phase.cursor < place:
                self._step(phase, is_asked=False)
            self._step(phase, is_asked=True)
            return
        asked_at = phase.cursor
        if phase.plan is not None:
            self._serve_all()
        self._settle(phase, wish, 0, asked_at)

    def _step(self, phase: Phase, *, is_asked: bool) -> None:
        assert phase.plan is not None
        operation = phase.plan.operations[phase.cursor]
        place = phase.cursor
        phase.cursor += 1
        self._perform(operation)
        phase.performed.append(operation)
        if is_asked:
            self._was_asked(phase, place)
        elif operation.kind is Kind.GATHER:
            phase.early.append((place, operation))
            self._drop_passed(phase)

    def _was_asked(self, phase: Phase, place: int) -> None:
        phase.asked_for.add(place)
        assert phase.plan is not None
        if phase.plan.operations[place].kind is Kind.GATHER:
            self._take_from_early(phase, phase.plan.operations[place].group)
            phase.last_asked = max(phase.last_asked, place)
            self._drop_passed(phase)

    def _drop_passed(self, phase: Phase) -> None:
        """Free what was gathered for others, but for the last: this rank may only be in another order."""
        passed = [entry for entry in phase.early if entry[0] < phase.last_asked]
        ahead = [entry for entry in phase.early if entry[0] >= phase.last_asked]
        for entry in (*passed[:-1], *ahead[:-_MOST_AHEAD]):
            phase.early.remove(entry)
            self._players[entry[1].group].drop_ahead()

    def _perform(self, operation: Operation) -> None:
        player = self._players[operation.group]
        if operation.kind is Kind.GATHER:
            player.launch_gather()
        else:
            player.launch_reduce()

    # Agreement

    def _settle(self, phase: Phase, wish: Operation | None, bits: int, asked_at: int = 0) -> list[list[int]]:
        """Do what some rank wishes until this rank's wish is done, or no rank has one."""
        num_places = len(phase.plan or ())
        words = _split_words(sum(1 << place for place in phase.asked_for), _num_words(num_places))
        words += _split_words(bits, _num_words(self.num_bits))
        head = [phase.number, _fingerprint(phase.key), 0 if wish is None else wish.code, asked_at]
        while True:
            rows = self._exchange([*head, *words])
            self._check(phase, rows)
            wishes = {row[2]: row[3] for row in reversed(rows) if row[2]}
            if not wishes:
                return rows
            chosen = choose(Operation.of_code(code) for code in wishes)
            self._perform(chosen)
            phase.performed.append(chosen)
            if phase.plan is not None:
                phase.extras.append((wishes[chosen.code], chosen))
            if chosen == wish:
                self._take_from_early(phase, chosen.group)
                return rows
            if chosen.kind is Kind.GATHER:
                phase.early.append((-2, chosen))  # in no plan
                self._drop_passed(phase)

    def _exchange(self, row: list[int]) -> list[list[int]]:
        rows = [row]
        for group in self._data.groups:
            numbers = [number for part in rows for number in part]
            told = comm.exchange_rows(numbers, group, feature="fsdp", label="order of collectives")
            rows = [part[at : at + len(row)] for part in told for at in range(0, len(part), len(row))]
        return rows

    def _check(self, phase: Phase, rows: list[list[int]]) -> None:
        if all(row[:2] == rows[0][:2] for row in rows):
            return
        ranks = self._data.mesh.mesh.flatten().tolist()
        told = [tuple(row[:2]) for row in rows]
        usual = max(told, key=told.count)
        odd = [rank for rank, said in zip(ranks, told, strict=False) if said != usual]
        raise DesyncError(
            f"fully_shard: the ranks are at different places: this one is at {phase.key!r}, number "
            f"{phase.number} of its forwards and backwards; ranks {odd} are elsewhere (numbers "
            f"{[number for number, _ in told]}). Every rank must run as many forwards and backwards of the "
            "sharded model, with the same settings; weft.join.Join is for ranks that run out of inputs.",
            odd,
        )


def _fingerprint(key: Hashable) -> int:
    return zlib.crc32(repr(key).encode())


def _num_words(num_bits: int) -> int:
    return -(-num_bits // _BITS)


def _split_words(bits: int, num_words: int) -> list[int]:
    return [(bits >> (_BITS * at)) & ((1 << _BITS) - 1) for at in range(num_words)]


def _join_words(words: Sequence[int]) -> int:
    return sum(word << (_BITS * at) for at, word in enumerate(words))

"""The simulated time of one rank: computation on one line, communication on lanes beside it.

A collective begins when the rank has come to it and its lane is free; a wait moves the rank to its end. So
how much communication hides behind computation comes out of the order in which the real code launches and
waits.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from weft.comm.group import state_of
from weft.planning.imagined_group import Move
from weft.planning.machine import Links, Spread, collective_secs


@dataclass(frozen=True)
class StepTime:
    """Where the time of a step goes."""

    total_secs: float
    compute_secs: float
    communication_secs: float  # that collectives are under way
    exposed_secs: float  # that the rank stands still for them, or computes slower

    @property
    def hidden_secs(self) -> float:
        """How much of the communication costs nothing."""
        return max(0.0, self.communication_secs - self.exposed_secs)


class Clock:
    """A Timeline: what collectives take on some links."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._spreads: dict[str, Spread] = {}
        self._free_at: dict[bool, float] = {}  # by whether the lane is within a host
        self._aside_free_at = 0.0
        self._is_aside = False
        self._owed = 0.0
        self.now_secs = 0.0
        self._begun_secs = 0.0
        self._compute_secs = 0.0
        self._communication_secs = 0.0
        self._exposed_secs = 0.0

    def compute(self, secs: float) -> None:
        """The rank computes."""
        self.now_secs += secs
        if not self._is_aside:
            self._compute_secs += secs

    def launched(self, move: Move) -> float:
        """A collective begins as soon as its lane is free; says when it ends."""
        spread = self._spread_of(move)
        secs = collective_secs(self._links, move.op, move.num_bytes, spread)
        if spread.num_ranks > 1:
            self.now_secs += self._links.call_secs
            self._exposed_secs += self._links.call_secs
        begin = max(self.now_secs, self._free_at.get(spread.is_local, 0.0))
        end = self._free_at[spread.is_local] = begin + secs
        self._communication_secs += secs
        stolen = self._links.overlap_cost * secs
        self.now_secs += stolen
        self._exposed_secs += stolen
        return end

    def waited(self, end_secs: float) -> None:
        """The rank stands still until then."""
        if end_secs > self.now_secs:
            if not self._is_aside:
                self._exposed_secs += end_secs - self.now_secs
            self.now_secs = end_secs

    def owed(self, end_secs: float) -> None:
        """It will be waited for when backward ends."""
        self._owed = max(self._owed, end_secs)

    def backward_ends(self) -> None:
        """What was launched for later is waited for."""
        self.waited(self._owed)

    @contextmanager
    def aside(self) -> Generator[None]:
        """What is done in the block happens on another line, behind what was done there before."""
        before, communicated = self.now_secs, self._communication_secs
        self.now_secs = max(before, self._aside_free_at)
        self._is_aside, was_aside = True, self._is_aside
        start = self.now_secs
        try:
            yield
        finally:
            self._is_aside = was_aside
            self._aside_free_at = end = self.now_secs
            computed = max(0.0, end - start - (self._communication_secs - communicated))
            self.now_secs = before
            self.compute(self._links.overlap_cost * computed)  # it takes a core from the rank
            self.owed(end)

    def begin_step(self) -> None:
        """Count from here."""
        self._begun_secs = self.now_secs
        self._compute_secs = self._communication_secs = self._exposed_secs = 0.0

    def step_time(self) -> StepTime:
        """Of the step that was begun last."""
        return StepTime(
            self.now_secs - self._begun_secs,
            self._compute_secs,
            self._communication_secs,
            self._exposed_secs,
        )

    def _spread_of(self, move: Move) -> Spread:
        state = state_of(move.group)
        if state.name not in self._spreads:
            host = state.ranks[0] // self._links.ranks_per_host
            near = sum(rank // self._links.ranks_per_host == host for rank in state.ranks)
            self._spreads[state.name] = Spread(len(state.ranks), near)
        return self._spreads[state.name]

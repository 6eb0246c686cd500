"""Random collectives on several groups until a rank is killed or stopped, at any moment.

Every rank draws the same calls from the same seed. `scripts/kills --of local --kills 50` kills fifty times.
"""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.local.deaths import (
    Sighting,
    end_the_stopped,
    go,
    nothing_left_behind,
    run_to_the_end,
    see,
    sightings,
)
from tests.local.inputs import all_gather_single, me, reduce_scatter_single

RANKS = 4
KILLS_A_RUN = RANKS - 1
TIMEOUT_SECS = 3.0
NOTICED_SECS = 2.0
SLACK_SECS = 2.0
MAX_NUMEL = 1 << 20


def check_full(tensor: torch.Tensor, value: float, what: str) -> None:
    wrong = tensor != value
    assert not wrong.any(), f"rank {me()}: {what}: {int(wrong.sum())} wrong of {tensor.numel()}, want {value}"


class Draw:
    """One random call: on which group, how large, in what memory."""

    def __init__(self, chance: random.Random, group: dist.ProcessGroup) -> None:
        self.group: Any = group  # a group of weft: it has `allocate`
        self.size = group.size()
        self.rank = group.rank()
        self.root = chance.randrange(self.size)
        self.numel = int(2 ** chance.uniform(0, 20))
        self.is_allocated = chance.random() < 0.4
        self.is_async = chance.random() < 0.4
        self.value = chance.randrange(1, 8)

    @property
    def root_in_world(self) -> int:
        return dist.get_global_rank(self.group, self.root)

    def full(self, numel: int, value: float) -> torch.Tensor:
        tensor = self.group.allocate(numel) if self.is_allocated else torch.empty(numel)
        return tensor.fill_(value)

    def done(self, work: dist.Work | None) -> None:
        if work is not None:
            work.wait()


def all_reduce(d: Draw) -> None:
    tensor = d.full(d.numel, d.value + d.rank)
    d.done(dist.all_reduce(tensor, group=d.group, async_op=d.is_async))
    check_full(tensor, d.size * d.value + sum(range(d.size)), "all_reduce")


def broadcast(d: Draw) -> None:
    tensor = d.full(d.numel, d.value + d.rank)
    d.done(dist.broadcast(tensor, d.root_in_world, group=d.group, async_op=d.is_async))
    check_full(tensor, d.value + d.root, "broadcast")


def reduce(d: Draw) -> None:
    tensor = d.full(d.numel, d.value + d.rank)
    d.done(dist.reduce(tensor, d.root_in_world, group=d.group, async_op=d.is_async))
    if d.rank == d.root:
        check_full(tensor, d.size * d.value + sum(range(d.size)), "reduce")


def all_gather(d: Draw) -> None:
    outs = [d.full(d.numel, -1) for _ in range(d.size)]
    d.done(dist.all_gather(outs, d.full(d.numel, d.value + d.rank), group=d.group, async_op=d.is_async))
    for rank, out in enumerate(outs):
        check_full(out, d.value + rank, "all_gather")


def all_gather_into_tensor(d: Draw) -> None:
    out = d.full(d.size * d.numel, -1)
    tensor = d.full(d.numel, d.value + d.rank)
    d.done(all_gather_single(out, tensor, group=d.group, async_op=d.is_async))
    for rank, part in enumerate(out.chunk(d.size)):
        check_full(part, d.value + rank, "all_gather_into_tensor")


def reduce_scatter_tensor(d: Draw) -> None:
    out = d.full(d.numel, -1)
    whole = d.full(d.size * d.numel, d.value + d.rank)
    d.done(reduce_scatter_single(out, whole, group=d.group, async_op=d.is_async))
    check_full(out, d.size * d.value + sum(range(d.size)), "reduce_scatter_tensor")


def gather(d: Draw) -> None:
    outs = [d.full(d.numel, -1) for _ in range(d.size)] if d.rank == d.root else None
    tensor = d.full(d.numel, d.value + d.rank)
    d.done(dist.gather(tensor, outs, d.root_in_world, group=d.group, async_op=d.is_async))
    for rank, out in enumerate(outs or []):
        check_full(out, d.value + rank, "gather")


def scatter(d: Draw) -> None:
    parts = [d.full(d.numel, d.value + rank) for rank in range(d.size)] if d.rank == d.root else None
    out = d.full(d.numel, -1)
    d.done(dist.scatter(out, parts, d.root_in_world, group=d.group, async_op=d.is_async))
    check_full(out, d.value + d.rank, "scatter")


def all_to_all(d: Draw) -> None:
    out = d.full(d.size * d.numel, -1)
    tensor = d.full(d.size * d.numel, d.value + d.rank)
    d.done(dist.all_to_all_single(out, tensor, group=d.group, async_op=d.is_async))
    for rank, part in enumerate(out.chunk(d.size)):
        check_full(part, d.value + rank, "all_to_all_single")


def ring(d: Draw) -> None:
    after = dist.get_global_rank(d.group, (d.rank + 1) % d.size)
    before = dist.get_global_rank(d.group, (d.rank - 1) % d.size)
    out = d.full(d.numel, -1)
    works = [
        dist.isend(d.full(d.numel, d.value + d.rank), after, group=d.group),
        dist.irecv(out, before, group=d.group),
    ]
    for work in works:
        work.wait()
    check_full(out, d.value + (d.rank - 1) % d.size, "ring")


def coalesced(d: Draw) -> None:
    tensors = [d.full(numel, d.value) for numel in (d.numel, 3, d.numel)]
    with dist._coalescing_manager(group=d.group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=d.group)
    for tensor in tensors:
        check_full(tensor, d.size * d.value, "coalesced all_reduce")


def objects(d: Draw) -> None:
    every = [None] * d.size
    dist.all_gather_object(every, (d.rank, "x" * d.value), group=d.group)
    assert every == [(rank, "x" * d.value) for rank in range(d.size)], every


def barrier(d: Draw) -> None:
    d.done(dist.barrier(d.group, async_op=d.is_async))


CALLS: list[Callable[[Draw], None]] = [
    all_reduce,
    broadcast,
    reduce,
    all_gather,
    all_gather_into_tensor,
    reduce_scatter_tensor,
    gather,
    scatter,
    all_to_all,
    ring,
    coalesced,
    objects,
    barrier,
]


def survive(folder: Path, seed: int) -> None:
    """On every rank: rounds of random calls, each until its victim is gone."""
    chance = random.Random(seed)
    order = chance.sample(range(RANKS), KILLS_A_RUN)
    members = list(range(RANKS))
    rounds = []
    for victim in order:
        left = [rank for rank in members if rank != victim]
        # The victim is in every group: in another one, somebody could wait in vain for a rank that lives,
        # has seen the death elsewhere and gone on to the next round.
        choices = [members, members[::-1], [victim, chance.choice(left)]]
        # A group doesn't inherit the default group's timeout.
        groups = [dist.new_group(chosen, timeout=timedelta(seconds=TIMEOUT_SECS)) for chosen in choices]
        rounds.append((victim, groups))
        members = left
    for victim, groups in rounds:
        how = chance.choice(["kill", "kill", "stop"])
        delay_secs = chance.uniform(0, 0.3)
        calls = random.Random(chance.random())
        dist.barrier(groups[0])
        if me() == victim:
            threading.Timer(delay_secs, go, (folder, how)).start()
        see(folder, victim, f"{how}, seed {seed}", lambda g=groups, c=calls: call_for_ever(g, c))
    end_the_stopped(folder)


def call_for_ever(groups: list[dist.ProcessGroup], chance: random.Random) -> None:
    """Make the same random calls as every other rank, until one raises."""
    while True:
        call, group = chance.choice(CALLS), chance.choice(groups)
        draws = chance.random()
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            call(Draw(random.Random(draws), group))


def check_run(seen: list[Sighting]) -> None:
    """Fail unless each victim was named by everyone who was left."""
    victims = list(dict.fromkeys(s.victim for s in seen))
    assert len(victims) == KILLS_A_RUN, f"victims: {victims}"
    for i, victim in enumerate(victims):
        left = sorted(set(range(RANKS)) - set(victims[: i + 1]))
        assert sorted(s.rank for s in seen if s.victim == victim) == left
    for sighting in seen:
        assert sighting.victim in sighting.ranks, sighting
        waited_secs = sighting.raised_secs - sighting.died_secs
        if sighting.what.startswith("kill"):
            assert sighting.error == "PeerError", sighting
            assert sighting.ranks == [sighting.victim], sighting
            assert waited_secs < NOTICED_SECS, sighting
        else:
            # Whose own time is not up yet hears of it from those whose time is.
            assert sighting.error in ("PeerTimeoutError", "PeerError"), sighting
            assert waited_secs < TIMEOUT_SECS + SLACK_SECS, sighting


def run_seed(seed: int) -> list[Sighting]:
    """One run of four ranks, of which three go. Raises with the seed."""
    with tempfile.TemporaryDirectory() as name:
        folder, error = Path(name), None
        try:
            with nothing_left_behind():
                error = run_to_the_end(
                    survive, (folder, seed), ranks=RANKS, backend="weft", collective_timeout=TIMEOUT_SECS
                )
            seen = sightings(folder)
            check_run(seen)
        except Exception as failure:
            failure.add_note(f"chaos with seed {seed}; the run ended with: {error}")
            raise
        return seen


def main(kills: int, seed: int) -> None:
    """Kill this many ranks, stop some besides, and say how it went."""
    killed = 0
    while killed < kills:
        seen = run_seed(seed)
        killed += len({sighting.victim for sighting in seen if sighting.what.startswith("kill")})
        slowest = max((s.raised_secs - s.died_secs for s in seen if s.what.startswith("kill")), default=0.0)
        print(f"{killed} of {kills} kills of ranks; seed {seed}'s slowest noticed in {slowest:.2f} s")
        seed += 1

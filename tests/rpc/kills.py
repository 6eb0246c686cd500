"""Workers that are killed at a random moment of a storm of calls: right answers or named errors, no hang.

Each round starts from its own number, so a round that failed can be run again:
scripts/kills --of rpc --kills 3 --seed 17.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch

import weft
from tests.rpc import acts
from tests.rpc.crew import Crew, MemberGone
from tests.rpc.remote_functions import Counter, add, give, is_freed
from tests.rpc.workers import WEFT, wait_until
from weft import rpc

CALL_SECS = 20.0  # a call that takes this long hangs
NOTICED_SECS = 4.0  # two, and two for a machine that has other things to do
WORLD_SIZE = 3
KILLS_A_WORLD = WORLD_SIZE - 1


class WrongAnswer(Exception):
    """A call came back with another call's answer, or a damaged one."""


def check(is_right: object, what: str) -> None:
    if not is_right:
        raise WrongAnswer(what)


def use_sync(to: str, i: int) -> None:
    check(rpc.rpc_sync(to, add, (i, 1), timeout=CALL_SECS) == i + 1, "sync")


def use_many(to: str, i: int) -> None:
    futures = [rpc.rpc_async(to, add, (i, j), timeout=CALL_SECS) for j in range(20)]
    check([future.wait() for future in futures] == [i + j for j in range(20)], "async")


def use_tensor(to: str, i: int) -> None:
    numel = [3, 5000, 60_000, 400_000][i % 4]
    got = rpc.rpc_sync(to, give, (torch.full((numel,), float(i)),), timeout=CALL_SECS)
    check(got.shape == (numel,) and bool((got == i).all()), f"tensor of {numel}")


def use_rref(to: str, i: int) -> None:
    rref = rpc.remote(to, Counter, (i,), timeout=CALL_SECS)
    check(rref.rpc_sync(timeout=CALL_SECS).bump(2) == i + 2, "proxy")
    check(rref.to_here(timeout=CALL_SECS).value == i + 2, "to_here")


def use_rref_of_mine(to: str, i: int) -> None:
    mine = rpc.RRef(Counter(i))
    check(rpc.rpc_sync(to, read_counter, (mine,), timeout=CALL_SECS) == i, "an RRef of mine")


def read_counter(rref: Any) -> int:
    return rref.to_here(timeout=CALL_SECS).value


def use_nested(to: str, i: int) -> None:
    back = rpc.get_worker_info().name
    check(rpc.rpc_sync(to, call_back, (back, i), timeout=CALL_SECS) == i + 1, "nested")


def call_back(to: str, i: int) -> int:
    return rpc.rpc_sync(to, add, (i, 1), timeout=CALL_SECS)


USES: list[Callable[[str, int], None]] = [
    use_sync,
    use_many,
    use_tensor,
    use_rref,
    use_rref_of_mine,
    use_nested,
]


def storm(to: str, seed: int) -> tuple[int, list[str], list[int], float]:
    """Use the other until it is gone: how often it went right; the error's types, its ranks, and when."""
    chance = random.Random(seed)
    num_right = 0
    while True:
        use = chance.choice(USES)
        try:
            use(to, num_right)
        except WrongAnswer:
            raise
        except weft.PeerError as error:
            if isinstance(error, weft.PeerTimeoutError) or to not in str(error):
                raise
            return num_right, [type(error).__name__], list(error.ranks), time.monotonic()
        num_right += 1


def hold_for(to: str, key: str) -> None:
    """Have the other hold an RRef to a value of mine, of which I keep nothing."""
    rpc.rpc_sync(to, acts.receive_held, (key, rpc.RRef(acts.make_tracked(key))), timeout=CALL_SECS)


def check_storms(storms: dict[int, Future[Any]], victim_rank: int, died: float) -> float:
    """Every one of the others has named the victim, soon. How long the slowest took."""
    slowest = 0.0
    for rank, future in storms.items():
        _num_right, kinds, ranks, raised = future.result(CALL_SECS * 2)
        slowest = max(slowest, raised - died)
        assert kinds == ["PeerError"], f"worker{rank}: {kinds}"
        assert ranks == [victim_rank], f"worker{rank} blames {ranks}, not {victim_rank}"
        assert raised - died < NOTICED_SECS, f"worker{rank} noticed after {raised - died:.1f} s"
    return slowest


def kill_in_worlds(seed: int) -> tuple[int, float]:
    """A world of its own: all storm the victim and it storms one of them; then the next victim."""
    chance = random.Random(seed)
    slowest = 0.0
    with Crew(WORLD_SIZE) as crew:
        crew.join()
        living = list(range(WORLD_SIZE))
        for _ in range(KILLS_A_WORLD):
            victim = chance.choice(living)
            living.remove(victim)
            storms = {rank: crew[rank].begin(storm, f"worker{victim}", chance.random()) for rank in living}
            theirs = crew[victim].begin(storm, f"worker{chance.choice(living)}", chance.random())
            threading.Event().wait(chance.uniform(0, 0.25))
            died = time.monotonic()
            crew[victim].kill()
            slowest = max(slowest, check_storms(storms, victim, died))
            with suppress(MemberGone):
                theirs.result(CALL_SECS)
            for rank in living:
                for other in living:
                    assert crew[rank].do(acts.call, other, add, 1, 2) == 3
    return KILLS_A_WORLD, slowest


class LateGroup:
    """Two workers that stay, and one guest after another that joins, is stormed, and is killed."""

    def __init__(self) -> None:
        self.crew = Crew(2)
        self.init_method = self.crew.meeting("tcp")
        for rank in range(2):
            self.crew[rank].do(acts.join, f"worker{rank}", rank, None, self.init_method)
        self.num_guests = 0

    def kill_guest(self, seed: int) -> float:
        """One guest's life; how long the slowest of the two took to notice its end."""
        chance = random.Random(seed)
        self.num_guests += 1
        # Of every other one the name and the id have been used before.
        rank = 2 + self.num_guests % 2
        name = f"guest{rank}"
        guest = self.crew.add()
        guest.do(acts.join, name, rank, None, self.init_method)
        key = f"held in round {self.num_guests}"
        self.crew[0].do(hold_for, name, key)
        storms = {home: self.crew[home].begin(storm, name, chance.random()) for home in range(2)}
        guest.begin(storm, "worker1", chance.random())
        threading.Event().wait(chance.uniform(0, 0.25))
        died = time.monotonic()
        guest.kill()
        slowest = check_storms(storms, rank, died)
        wait_until(
            lambda: self.crew[0].do(acts.call, "worker0", is_freed, WEFT, key), "freed, its holder being dead"
        )
        assert self.crew[0].do(acts.call, "worker1", add, 1, 2) == 3
        assert self.crew[1].do(acts.call, "worker0", add, 1, 2) == 3
        return slowest

    def close(self) -> None:
        self.crew.close()


def kill_guests(number: int, seed: int) -> float:
    """So many guests of one group."""
    group = LateGroup()
    try:
        return max(group.kill_guest(seed + i) for i in range(number))
    finally:
        group.close()


def main(kills: int, first_seed: int) -> None:
    """Kill this many workers and say how it went."""
    began, killed, seed = time.monotonic(), 0, first_seed
    while killed < kills:
        try:
            if seed % 2 == 0:
                num_kills, slowest = kill_in_worlds(seed)
            else:
                num_kills = min(10, kills - killed)
                slowest = kill_guests(num_kills, seed * 1000)
        except BaseException as error:
            error.add_note(
                f"in round {seed}: run it alone with scripts/kills --of rpc --kills 1 --seed {seed}"
            )
            raise
        killed += num_kills
        print(
            f"{killed} of {kills} kills of RPC workers, {time.monotonic() - began:.0f} s; "
            f"round {seed}'s slowest noticed in {slowest:.2f} s"
        )
        seed += 1

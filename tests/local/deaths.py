"""Bodies for ranks that end, stop or stand still, and what the others saw of it.

In one run several ranks go, one after another: the round's groups hold those that are
still there, the round's victim is the last of them. A run that loses a rank returns no
results, so what a survivor sees it writes into a file.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.local.inputs import all_gather_single, me, num_ranks
from weft.launcher.pool import RankPool

Collective = Callable[[Any, int], object]
MARK = "WEFT_TEST_MARK"


@dataclass(frozen=True)
class Sighting:
    """What one survivor saw of one victim."""

    rank: int
    victim: int
    what: str
    error: str  # the type's name
    ranks: list[int]
    message: str
    entered_secs: float
    raised_secs: float
    died_secs: float


def write_death(folder: Path, victim: int) -> None:
    """Say when it is: the victim does so right before it goes."""
    partial = folder / f"death.{victim}.part"
    partial.write_text(f"{time.monotonic()!r} {os.getpid()}")
    partial.rename(folder / f"death.{victim}")


def read_death(folder: Path, victim: int) -> float:
    """When the victim went; it did, or the caller would not ask."""
    while True:
        try:
            return float((folder / f"death.{victim}").read_text().split()[0])
        except FileNotFoundError:
            os.sched_yield()


def go(folder: Path, how: str) -> None:
    """End the calling rank's process, or stop it."""
    write_death(folder, me_of_process())
    os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


def end_the_stopped(folder: Path) -> None:
    """Kill every victim. The launcher would, but only after its grace."""
    for path in folder.glob("death.?"):
        with suppress(ProcessLookupError):
            os.kill(int(path.read_text().split()[1]), signal.SIGKILL)


def me_of_process() -> int:
    return int(os.environ["RANK"])


def see(folder: Path, victim: int, what: str, call: Callable[[], object]) -> None:
    """Fail unless the call raises a weft error; write down which."""
    entered = time.monotonic()
    try:
        call()
    except weft.PeerError as error:
        seen = error
        raised = time.monotonic()
    else:
        raise AssertionError(f"rank {me()}: {what} returned, without rank {victim}")
    sighting = Sighting(
        me(),
        victim,
        what,
        type(seen).__name__,
        list(seen.ranks),
        str(seen),
        entered,
        raised,
        read_death(folder, victim),
    )
    (folder / f"sighting.{victim}.{me()}").write_text(json.dumps(asdict(sighting)))


def sightings(folder: Path) -> list[Sighting]:
    """What all survivors of a run saw, victim by victim."""
    paths = sorted(folder.glob("sighting.*"))
    return sorted((Sighting(**json.loads(path.read_text())) for path in paths), key=lambda s: s.died_secs)


# What survivors wait in: `v` is the victim, a rank of the group and of the world.
COLLECTIVES: dict[str, Collective] = {
    "all_reduce": lambda g, v: dist.all_reduce(torch.ones(5), group=g),
    "large all_reduce": lambda g, v: dist.all_reduce(torch.ones(1_000_000), group=g),
    "allocated all_reduce": lambda g, v: dist.all_reduce(g.allocate(1_000_000), group=g),
    "async all_reduce": lambda g, v: dist.all_reduce(torch.ones(5), group=g, async_op=True).wait(),
    "broadcast": lambda g, v: dist.broadcast(torch.ones(100_000), v, group=g),
    "barrier": lambda g, v: dist.barrier(g),
    "recv": lambda g, v: dist.recv(torch.ones(5), v, group=g),
    "large recv": lambda g, v: dist.recv(torch.ones(1_000_000), v, group=g),
    "recv from anyone": lambda g, v: dist.recv(torch.ones(5), None, group=g),
    "all_to_all_single": lambda g, v: dist.all_to_all_single(
        torch.ones(g.size() * 1000), torch.ones(g.size() * 1000), group=g
    ),
    "all_gather_into_tensor": lambda g, v: all_gather_single(
        torch.ones(g.size() * 50_000), torch.ones(50_000), group=g
    ),
    "all_gather_object": lambda g, v: dist.all_gather_object([None] * g.size(), "x", group=g),
}


def repeat(collective: Collective, group: dist.ProcessGroup, victim: int, times: int) -> None:
    """Call it until it raises. To one that it had arrived at a dead rank may have given all it had to."""
    for _ in range(times):
        collective(group, victim)


def go_one_by_one(folder: Path, how: str, whats: list[str], timeout_secs: float, *, in_it: bool) -> None:
    """The last rank goes, before a collective or (`in_it`) while it waits in one; then the one before it."""
    timeout = timedelta(seconds=timeout_secs)  # a group doesn't inherit the default group's
    groups = [dist.new_group(list(range(num_ranks() - i)), timeout=timeout) for i in range(len(whats))]
    for i, (what, group) in enumerate(zip(whats, groups, strict=True)):
        victim = num_ranks() - 1 - i
        dist.all_reduce(torch.ones(100_000), group=group)  # the groups of those who are left still work
        if me() == victim:
            if in_it:
                # It waits for the others, who do not come before it is gone: the timer goes off in the wait.
                threading.Timer(0.1, go, (folder, how)).start()
                COLLECTIVES[what](group, 0)
            go(folder, how)
            raise AssertionError("went on after it was to stop")  # the launcher kills it stopped
        if in_it:
            read_death(folder, victim)
        see(folder, victim, what, partial(repeat, COLLECTIVES[what], group, victim, 2 if in_it else 1))
        # Once known, it is known: the group refuses at once, and says the same.
        with pytest.raises(weft.PeerError) as caught:
            dist.all_reduce(torch.ones(3), group=group)
        assert victim in caught.value.ranks, caught.value
    raise RuntimeError("as was to be seen")


@contextmanager
def nothing_left_behind():
    """Fail if the block leaves a process or shared memory behind."""
    before = set(os.listdir("/dev/shm"))
    os.environ[MARK] = mark = uuid.uuid4().hex
    try:
        yield
    finally:
        del os.environ[MARK]
    left = [pid for pid in _processes() if mark in _read(f"/proc/{pid}/environ")]
    assert not left, f"processes left behind: {left}"
    orphans = [name for name in set(os.listdir("/dev/shm")) - before if not _is_in_use(f"/dev/shm/{name}")]
    assert not orphans, f"shared memory left behind: {orphans}"


def _processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _read(path: str) -> str:
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _is_in_use(path: str) -> bool:
    """Whether a living process has the file: other programs on this machine use shared memory too."""
    return not os.path.exists(path) or any(path in _read(f"/proc/{pid}/maps") for pid in _processes())


def run_to_the_end(
    body: Callable[..., None],
    args: tuple,
    *,
    ranks: int,
    backend: str,
    collective_timeout: float,
    grace: float = 30,
) -> weft.LaunchError:
    """Run a body that ranks don't survive, on ranks of its own, and return how it ended."""
    with RankPool(ranks, grace=grace) as pool:
        try:
            pool.run(body, args=args, backend=backend, timeout=60, collective_timeout=collective_timeout)
        except weft.LaunchError as error:
            return error
    raise AssertionError("nobody noticed that ranks died")

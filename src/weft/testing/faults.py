"""Failures that a test injects, at a rank and a step or call: `with inject(Fault(...))`.

    with inject(Fault(rank=1, op="all_reduce", call=3, action="kill")):
        train()

A fault fires once, on its rank, before the collective it names moves any data. One
that never fired fails the test at the end of the block: without the failure the test
shows nothing. Only calls through weft.comm are seen, and all calls of the process
are, so the block stands inside the function that runs on the ranks; around a launch
of thread-ranks it works too.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal, get_args

import torch.distributed as dist

from weft.comm import Call, install_watcher, remove_watcher
from weft.comm.group import resolve_group, store_of
from weft.errors import ConfigError
from weft.launcher.world import is_rank_thread

Action = Literal["kill", "stop", "exit", "raise", "hang", "open"]

# A signal and an exit are the whole process's: all thread-ranks would go at once, and the test with them.
_PROCESS_ACTIONS = ("kill", "stop", "exit")
_EXIT_CODE = 1
# A hang lasts until its gate opens. The store wants a limit, so the wait is renewed.
_RENEW = timedelta(hours=1)


@dataclass(frozen=True)
class Fault:
    """What goes wrong, on which rank, and when.

    It fires at a call if it names `op`, `feature` or `call`, or no `step`: at the `call`-th (from 0, the
    first unless given) of this rank's calls that fit the rest. A `step` alone fires as that step begins.

    `action`: "kill" and "stop" send this rank's process SIGKILL and SIGSTOP; "exit" ends it with os._exit,
    so that nothing is said to the peers; "raise" raises `error`, a RuntimeError unless given; "hang" waits
    at `gate` until another rank opens it, with open_gate() or a fault whose action is "open".
    """

    rank: int  # in the world
    action: Action
    op: str | None = None  # None: any
    feature: str | None = None  # None: any
    call: int | None = None
    step: int | None = None  # None: any, also where nobody counts steps
    error: BaseException | None = None
    gate: str = "gate"
    must_fire: bool = True
    seed: int | None = field(default=None, compare=False)  # what random_fault made it from

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise ConfigError(f"Fault: action must be one of {get_args(Action)}; got {self.action!r}.")
        if self.error is not None and self.action != "raise":
            raise ConfigError(f"Fault: error is for action='raise'; got {self.error!r} with {self.action!r}.")
        for name, number in (("rank", self.rank), ("call", self.call), ("step", self.step)):
            if number is not None and number < 0:
                raise ConfigError(f"Fault: {name} counts from 0; got {number}.")

    @property
    def is_at_call(self) -> bool:
        """Whether it fires at a collective, and not as a step begins."""
        return self.step is None or not (self.op is None and self.feature is None and self.call is None)

    def fits(self, call: Call, step: int | None) -> bool:
        """Whether it is about such calls, whichever of them."""
        return (
            self.rank == call.rank
            and self.op in (None, call.op)
            and self.feature in (None, call.feature)
            and self.step in (None, step)
        )

    def __repr__(self) -> str:
        """The code that makes it again; what has its default is left out."""
        given = [(f.name, getattr(self, f.name)) for f in fields(self)]
        defaults = {f.name: f.default for f in fields(self)}
        return f"Fault({', '.join(f'{name}={value!r}' for name, value in given if value != defaults[name])})"


def random_fault(
    seed: int,
    *,
    ranks: int | Sequence[int],
    calls: int,
    ops: Sequence[str] = (),
    actions: Sequence[Action] = ("kill", "stop"),
) -> Fault:
    """Draw a fault: the same one for the same seed and arguments, on every rank and machine.

    `ranks` are the candidates, or how many there are; `calls` is how many calls of each op the test surely
    makes (of all ops together, where `ops` is empty).
    """
    candidates = range(ranks) if isinstance(ranks, int) else ranks
    if not candidates or calls < 1 or not actions:
        raise ConfigError(
            f"random_fault: needs a rank, a call and an action to choose from; got ranks={ranks!r}, "
            f"calls={calls!r}, actions={actions!r}."
        )
    draw = random.Random(seed)
    return Fault(
        rank=draw.choice(candidates),
        action=draw.choice(actions),
        op=draw.choice(ops) if ops else None,
        call=draw.randrange(calls),
        seed=seed,
    )


def open_gate(gate: str = "gate") -> None:
    """Let ranks that hang at the gate go on, now or when they come to it."""
    store_of(resolve_group(None)).set(_gate_key(gate), "open")


class Injection:
    """Faults in force. A watcher of weft.comm; the test's loop tells it of steps."""

    def __init__(self, faults: Sequence[Fault], rank: int | None) -> None:
        self._faults = faults
        self._rank = rank  # the only one to watch; None: all ranks of this process
        self._mutex = threading.Lock()  # rank-threads share it where the block stands around a launch
        self._steps: Counter[int] = Counter()  # how many each rank has begun
        self._num_fitting: Counter[int] = Counter()  # calls that fitted each fault, by its place
        self._fired: set[int] = set()
        self._seen: Counter[tuple[int, str]] = Counter()  # calls by rank and op, for the message

    def next_step(self) -> int:
        """Begin the next step of the calling rank and return its number, from 0."""
        rank = dist.get_rank()
        with self._mutex:
            step = self._steps[rank]
            self._steps[rank] += 1
            due = [
                place
                for place, fault in enumerate(self._faults)
                if not fault.is_at_call and fault.rank == rank and fault.step == step
            ]
            self._fired.update(due)
        for place in due:
            _fire(self._faults[place], f"step {step}")
        return step

    def steps(self, num_steps: int) -> Iterator[int]:
        """Count steps: `for step in faults.steps(3)` instead of `for step in range(3)`."""
        for _ in range(num_steps):
            yield self.next_step()

    @property
    def fired(self) -> tuple[Fault, ...]:
        """Those that fired, as far as anyone is left to ask."""
        return tuple(self._faults[place] for place in sorted(self._fired))

    def started(self, call: Call) -> None:
        """Fire what is due at this call."""
        rank = call.rank
        if self._rank not in (None, rank):
            return
        due: list[int] = []
        with self._mutex:
            self._seen[rank, call.op] += 1
            step = self._steps[rank] - 1 if self._steps[rank] else None
            for place, fault in enumerate(self._faults):
                if not fault.is_at_call or not fault.fits(call, step):
                    continue
                if self._num_fitting[place] == (fault.call or 0):
                    due.append(place)
                self._num_fitting[place] += 1
            self._fired.update(due)
        for place in due:
            _fire(self._faults[place], f"call {call.number} of its group, {call.words()}, at {call.site}")

    def finished(self, call: Call, error: BaseException | None, end_secs: float) -> None:
        """Nothing to do: faults come before the data."""

    def check_fired(self) -> None:
        """Raise AssertionError for the faults that should have fired here and have not."""
        missed = [
            f"{fault!r}: {self._num_fitting[place]} calls fitted it"
            if fault.is_at_call
            else f"{fault!r}: {self._steps[fault.rank]} steps were begun with next_step()"
            for place, fault in enumerate(self._faults)
            if fault.must_fire and place not in self._fired and self._rank in (None, fault.rank)
        ]
        if missed:
            listed = "\n  ".join(missed)
            seen = ", ".join(f"{count} {op} by rank {rank}" for (rank, op), count in self._seen.items())
            raise AssertionError(
                f"inject: a fault never fired, so the test shows nothing.\n  {listed}\n"
                f"Calls seen: {seen or 'none'}. Only calls through weft.comm in this process are seen. "
                f"If it need not fire, say must_fire=False."
            )


@contextmanager
def inject(*faults: Fault) -> Generator[Injection]:
    """Have the faults happen while the block runs; every rank enters it with the same ones.

    Raises ConfigError for a rank outside the world, and for kill, stop and exit on thread-ranks. Raises
    AssertionError at the end of the block, on its rank, if a fault never fired, also where the block ended
    by another exception (its `__cause__` then). Whatever exception leaves the block bears the faults as a
    note, so that the failure can be replayed.
    """
    rank = dist.get_rank() if dist.is_initialized() else None
    for fault in faults:
        if rank is not None and fault.rank >= dist.get_world_size():
            raise ConfigError(
                f"inject: {fault!r} is for a rank outside this world of {dist.get_world_size()}."
            )
        if is_rank_thread():
            _check_thread_action(fault)
    injection = Injection(faults, rank)
    install_watcher(injection)
    try:
        try:
            yield injection
        except Exception as error:
            try:
                injection.check_fired()
            except AssertionError as missed:
                raise missed from error
            raise
        injection.check_fired()
    except BaseException as error:
        error.add_note(f"injected: {', '.join(map(repr, faults))}")
        raise
    finally:
        remove_watcher(injection)


def _fire(fault: Fault, where: str) -> None:
    if is_rank_thread():
        _check_thread_action(fault)
    match fault.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(_EXIT_CODE)
        case "raise":
            raise fault.error or RuntimeError(f"rank {fault.rank}: {fault!r} fired at {where}")
        case "hang":
            _hang(fault.gate)
        case "open":
            open_gate(fault.gate)


def _hang(gate: str) -> None:
    # A client of its own: a wait blocks the store's client, and the rest of this rank may need it.
    store: Any = store_of(resolve_group(None))
    store = store.clone()  # torch's stubs don't know it
    while not store.check([_gate_key(gate)]):
        try:
            store.wait([_gate_key(gate)], _RENEW)
        except dist.DistStoreError:
            continue


def _check_thread_action(fault: Fault) -> None:
    if fault.action in _PROCESS_ACTIONS:
        raise ConfigError(
            f"inject: {fault!r} would {fault.action} the process of all thread-ranks, the test's own. Use "
            f"kind='process', or action='raise' or 'hang'."
        )


def _gate_key(gate: str) -> str:
    return f"weft/testing/gate/{gate}"

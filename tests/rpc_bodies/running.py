"""Run bodies on workers: thread-ranks or process-ranks, with weft.rpc or torch.distributed.rpc.

A body is a function of one Worker and runs on every rank at once. Bodies of one kind share one group of
workers, one after the other: joining costs more than most of them.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch.distributed as dist

import weft
from tests.rpc_bodies.places import begin_anew
from weft.testing.pool import shared_pool

WEFT = "weft.rpc"
TORCH = "torch.distributed.rpc"
RANKS = 3
DEADLINE_SECS = 20.0  # for what happens at once, on a machine that has other things to do


@dataclass(frozen=True)
class Worker:
    """Who runs a body, and with which library. Its neighbours form a ring."""

    lib: str
    rank: int
    size: int
    pids: tuple[int, ...]

    @property
    def rpc(self) -> Any:
        return import_module(self.lib)

    @property
    def is_weft(self) -> bool:
        return self.lib == WEFT

    @property
    def name(self) -> str:
        return f"worker{self.rank}"

    @property
    def next_rank(self) -> int:
        return (self.rank + 1) % self.size

    @property
    def next(self) -> str:
        return f"worker{self.next_rank}"

    @property
    def after_next(self) -> str:
        return f"worker{(self.rank + 2) % self.size}"


Body = Callable[[Worker], None]


@contextmanager
def joined(lib: str, **options: Any) -> Generator[Worker]:
    """Be a worker for the length of the block: rank and world are those of the default process group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pids: list[Any] = [None] * size
    dist.all_gather_object(pids, os.getpid())
    rpc = import_module(lib)
    # A rank of weft.launch knows its rank and world; torch must be told, and who meets elsewhere.
    is_known = lib == WEFT and "init_method" not in options
    told = {} if is_known else {"rank": rank, "world_size": size}
    rpc.init_rpc(f"worker{rank}", rpc_backend_options=rpc.TensorPipeRpcBackendOptions(**options), **told)
    try:
        yield Worker(lib, rank, size, tuple(pids))
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    # torch's waits for ever, now and then, after many calls of remote().
    rpc.shutdown(graceful=lib == WEFT)


def run_each(worker: Worker, bodies: Sequence[Body]) -> None:
    for body in bodies:
        dist.barrier()
        begin_anew(worker.name)
        dist.barrier()
        try:
            body(worker)
        except BaseException as error:
            error.add_note(f"in body {body.__module__}.{body.__name__}, {worker.name}")
            raise
    dist.barrier()  # of no worker is the last body still running elsewhere when this one shuts down


def run_bodies(lib: str, bodies: Sequence[Body], options: dict[str, Any]) -> None:
    with joined(lib, **options) as worker:
        run_each(worker, bodies)


def on_threads(bodies: Body | Sequence[Body], ranks: int = RANKS, **options: Any) -> None:
    bodies = bodies if isinstance(bodies, Sequence) else [bodies]
    weft.launch(
        run_bodies,
        args=(WEFT, bodies, options),
        ranks=ranks,
        kind="thread",
        timeout=90,
        collective_timeout=60,
    )


def on_processes(bodies: Body | Sequence[Body], ranks: int = RANKS, lib: str = WEFT, **options: Any) -> None:
    bodies = bodies if isinstance(bodies, Sequence) else [bodies]
    shared_pool(ranks).run(run_bodies, args=(lib, bodies, options), timeout=90, collective_timeout=60)


def wait_until(holds: Callable[[], object], what: str, secs: float = DEADLINE_SECS) -> None:
    """Ask again and again until it holds; fail when the time is up."""
    stop_at = time.monotonic() + secs
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < stop_at, f"not within {secs} seconds: {what}"
        pause.wait(0.005)


@contextmanager
def takes(at_least_secs: float = 0.0, at_most_secs: float = DEADLINE_SECS) -> Generator[None]:
    """Fail if the block is quicker (but for a timer's tick) or slower than that."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert at_least_secs * 0.95 <= took <= at_most_secs, f"took {took:.3f} s"


def shown(error: BaseException) -> str:
    """What a user sees of an error that nobody catches."""
    return "".join(traceback.format_exception(error))

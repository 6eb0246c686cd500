"""`worker`: what a test of RPC is given on each rank, a member of a group of workers with a library of RPC.

    @run_on(threads=3, weft=3)
    @with_options(rpc_timeout=0.25)
    def test_calls_return(worker: Worker) -> None:
        assert worker.rpc.rpc_sync(worker.next, add, (1, 2)) == 3

All ranks join before the body and leave after it; none leaves before the last one is through. A folder whose
tests want `worker` imports it in its conftest.py.

Where torch's RPC does the same, such a test is right with torch's, too, and test_as_torch.py runs it with
that: its rpc is `worker.rpc`, and `worker.lib` goes along where a function on another worker needs one.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from tests.ranks import at_each_rank
from tests.rpc.remote_functions import Spot, begin_anew

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


@contextmanager
def apart(worker: Worker) -> Generator[None]:
    """Keep a body apart from those before and after it: it finds nothing of theirs, and ends with all."""
    begin_anew(worker.name)
    dist.barrier()
    yield
    dist.barrier()


@contextmanager
def _joined_for_a_test(options: dict[str, Any]) -> Generator[Worker]:
    with joined(WEFT, **options) as worker, apart(worker):
        yield worker


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Any:
    """A Worker on each rank. Its parameter is what the group begins with: see with_options."""
    return at_each_rank(_joined_for_a_test, getattr(request, "param", {}))


def with_options(*each: dict[str, Any], **options: Any) -> pytest.MarkDecorator:
    """Begin the group of a test's `worker` with these options of init_rpc; given dicts, once with each."""
    given = each or (options,)
    return pytest.mark.parametrize("worker", given, indirect=True, ids=map(_options_id, given))


def _options_id(options: dict[str, Any]) -> str:
    return ",".join(
        f"{name}={value}" if isinstance(value, int | float) else name for name, value in options.items()
    )


def from_worker0(test: Callable[..., None]) -> Callable[..., None]:
    """Have worker0 run the body, while the others serve. The test need not take `worker` itself."""
    parameters = inspect.signature(test).parameters

    @functools.wraps(test)
    def run(worker: Worker, **args: Any) -> None:
        if worker.rank == 0:
            test(**args, **({"worker": worker} if "worker" in parameters else {}))

    own = inspect.Parameter("worker", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Worker)
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [own, *(each for name, each in parameters.items() if name != "worker")]
    )
    return run


# -- with torch's RPC, which begins only once in a process -----------------------------------------

T = TypeVar("T", bound=Callable[..., Any])
_weft_only: set[Any] = set()


def weft_only(test: T) -> T:
    """Say of a test that it holds for weft's RPC, and not for torch's."""
    _weft_only.add(test)
    return test


def find_bodies_for_torch(modules: Iterable[ModuleType]) -> list[Body]:
    """The tests in these modules of a worker of a group without options that are not `weft_only`."""
    return [test for module in modules for test in vars(module).values() if _is_for_torch(test)]


def _is_for_torch(test: Any) -> bool:
    if not inspect.isfunction(test) or not test.__name__.startswith("test_") or test in _weft_only:
        return False
    marks: list[pytest.Mark] = getattr(test, "pytestmark", [])
    has_options = any(mark.name == "parametrize" for mark in marks)
    return list(inspect.signature(test).parameters) == ["worker"] and not has_options


def run_each(worker: Worker, bodies: Sequence[Body]) -> None:
    """Run bodies one after the other, in one group of workers."""
    for body in bodies:
        try:
            with apart(worker):
                body(worker)
        except BaseException as error:
            error.add_note(f"in body {body.__module__}.{body.__name__}, {worker.name}")
            raise


# -- what bodies need ------------------------------------------------------------------------------

MODES = ["sync", "async", "remote"]


def call(
    worker: Worker, mode: str, to: Any, func: Any, args: Any = None, kwargs: Any = None, **more: Any
) -> Any:
    """Call in one of the three ways, and wait for what comes of it."""
    if mode == "sync":
        return worker.rpc.rpc_sync(to, func, args=args, kwargs=kwargs, **more)
    if mode == "async":
        return worker.rpc.rpc_async(to, func, args=args, kwargs=kwargs, **more).wait()
    return worker.rpc.remote(to, func, args=args, kwargs=kwargs, **more).to_here()


def check_spot(worker: Worker, seen: Spot, rank: int) -> None:
    """Fail unless it is that worker's process and a thread of its own."""
    assert seen.worker == f"worker{rank}"
    assert seen.pid == worker.pids[rank]
    assert seen.thread != threading.get_ident() or seen.pid != worker.pids[worker.rank]


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

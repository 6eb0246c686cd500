"""One rank's side: run the body of one of torch's tests, in a process that serves many of them.

torch starts its ranks anew for each test. Here they come from a pool, and what a test may leave behind (its
module's globals, environment variables, the debug level, an RPC agent) is put back.
"""

from __future__ import annotations

import importlib
import os
import unittest
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.conformance.moved import load_fresh
from tests.conformance.replaced import install_weft
from tests.conformance.suites import ShippedTests, Suite

# What a pool, like torchrun, tells a rank. Where torch's tests make their own groups they know none of it.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_prepared_for: list[str] = []


def run_case(suite: Suite, target: str, tests: ShippedTests, test: str, folder: str, run: int) -> str | None:
    """Run a test on this rank. Returns why it was skipped, if it was; raises what it raises."""
    prepare_process(suite, target, folder)
    case = load_class(suite, tests)(test)
    case.rank = dist.get_rank()
    case.file_name = os.path.join(folder, f"{run}.store")
    torch.manual_seed(1234)
    body = getattr(case, test)
    with restored_process(), nullcontext() if suite.has_group else outside_of_groups():
        if suite.has_group:
            case._barrier = make_barrier()
        try:
            if getattr(body, "__unittest_skip__", False):
                return body.__unittest_skip_why__
            body()
        except unittest.SkipTest as skip:
            return str(skip)
        except SystemExit as stop:
            if stop.code != 0:
                # torch's decorators leave a rank this way; the code says which of them it was.
                return {skip.exit_code: skip.message for skip in _skips().values()}[stop.code]
    return None


def list_tests(suite: Suite, target: str, folder: str) -> list[str]:
    """The tests that the suite's classes really have."""
    prepare_process(suite, target, folder)
    find = unittest.TestLoader().getTestCaseNames
    return [test for tests in suite.classes for test in find(load_class(suite, tests))]


def prepare_process(suite: Suite, target: str, folder: str) -> None:
    """Make this process one that runs the suite's tests, for good."""
    if _prepared_for:
        assert _prepared_for == [suite.name], f"a rank of {_prepared_for[0]} was asked to run {suite.name}"
        return
    # What the tests print would drown the table.
    log = os.open(os.path.join(folder, f"{os.getpid()}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(BACKEND=suite.backend, TEMP_DIR=folder)
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = (
        "0"  # a line in every error, about a command that isn't ours
    )
    if target == "weft":
        install_weft(suite)
    _prepared_for.append(suite.name)


def load_class(suite: Suite, tests: ShippedTests) -> Any:
    """A class of tests that can be run, from a fresh module."""
    module = load_fresh(tests.module, suite.is_moved)
    found: Any = module
    for part in tests.name.split("."):
        found = getattr(found, part)
    bases = [found]
    for fixture in tests.fixtures:
        home, name = fixture.split(":")
        bases.append(getattr(module if home == tests.module else importlib.import_module(home), name))
    made = type(f"{found.__name__}OnRanks", tuple(bases), {"__module__": module.__name__})
    # Its methods are sent to other ranks, which look the class up by its name.
    setattr(module, made.__name__, made)
    return made


@contextmanager
def restored_process() -> Generator[None]:
    """Put back, at the end, what a test may have set in the whole process."""
    environment = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        dist.set_debug_level_from_env()
        torch.set_default_dtype(torch.float32)


def make_barrier() -> Callable[..., None]:
    """The tests' own barrier, which must work without a process group: torch's polls files every 100 ms."""
    store = distributed_c10d._get_default_store()
    num_ranks = dist.get_world_size()
    num_calls = 0

    def barrier(wait_for: int | None = None, timeout: float | None = None) -> None:
        nonlocal num_calls
        num_calls += 1
        if store.add(f"conformance/arrived/{num_calls}", 1) == (wait_for or num_ranks):
            store.set(f"conformance/all/{num_calls}", "")
        store.wait([f"conformance/all/{num_calls}"])

    return barrier


@contextmanager
def outside_of_groups() -> Generator[None]:
    """Be a process that belongs to nothing yet. End the RPC agent that a test has left behind.

    After a failure that is for the rank's process to do, when it has noted the time: those who hear that this
    worker is gone fail too, and later.
    """
    rpc = importlib.import_module("torch.distributed.rpc")
    backends = rpc.backend_registry.BackendType
    make_barrier()()  # who leaves early breaks the group for those who are still joining it
    dist.destroy_process_group()
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    # Some tests call a rank as soon as they have a group themselves, and count on that one's having it too.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    try:
        yield
    finally:
        rpc.backend_registry.BackendType = backends
    try:
        rpc.shutdown(graceful=False)
    except RuntimeError as error:
        if "has not been initialized" not in str(error):
            raise


def _skips() -> dict[str, Any]:
    return importlib.import_module("torch.testing._internal.common_distributed").TEST_SKIPS

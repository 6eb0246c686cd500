"""One rank's side: run the body of one of torch's tests, in a process that serves many of them.

torch starts its ranks anew for each test. Here they come from a pool with the default group already made, and
what a test may leave behind (environment variables, the debug level, the generators' state) is put back.
"""

from __future__ import annotations

import importlib
import os
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.conformance.moved import load_moved
from tests.conformance.replaced import install_weft
from tests.conformance.suites import Suite

_loaded: dict[str, Any] = {}


def run_case(suite: Suite, target: str, test: str, folder: str) -> str | None:
    """Run a test on this rank. Returns why it was skipped, if it was; raises what it raises."""
    case = load_class(suite, target, folder)(test)
    rank = dist.get_rank()
    case.rank = rank
    case.file_name = os.path.join(folder, f"{test}.store")
    case._barrier = make_barrier()
    environment = dict(os.environ)
    torch.manual_seed(1234)
    body = getattr(case, test)
    try:
        if getattr(body, "__unittest_skip__", False):
            return body.__unittest_skip_why__
        body()
    except unittest.SkipTest as skip:
        return str(skip)
    except SystemExit as stop:
        # torch's decorators leave a rank this way; the code says which of them it was.
        return {skip.exit_code: skip.message for skip in _skips().values()}[stop.code]
    finally:
        os.environ.clear()
        os.environ.update(environment)
        dist.set_debug_level_from_env()
        torch.set_default_dtype(torch.float32)
    return None


def list_tests(suite: Suite, target: str, folder: str) -> list[str]:
    """The tests that the class really has."""
    return unittest.TestLoader().getTestCaseNames(load_class(suite, target, folder))  # type: ignore[arg-type]


def load_class(suite: Suite, target: str, folder: str) -> Any:
    """The suite's class of tests. The first call makes this process one that runs them, for good."""
    if suite.name not in _loaded:
        _loaded[suite.name] = _load_class(suite, target, folder)
    return _loaded[suite.name]


def _load_class(suite: Suite, target: str, folder: str) -> Any:
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
    module = load_moved(suite.module)
    tests: Any = module
    for part in suite.tests.split("."):
        tests = getattr(tests, part)
    return type(tests.__name__, (getattr(module, suite.fixture), tests), {})


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


def _skips() -> dict[str, Any]:
    return importlib.import_module("torch.testing._internal.common_distributed").TEST_SKIPS

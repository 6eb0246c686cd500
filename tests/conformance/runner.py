"""Run the cases of a suite, one after another, on pools of ranks that no other test uses.

The ranks have names of torch's replaced for good, hence pools of their own. A rank that crashes or hangs
costs a new pool, and the test that did it; the others never notice.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

import torch

from tests.conformance.rank import list_tests, run_case
from tests.conformance.source import Case
from tests.conformance.suites import Suite
from weft.errors import LaunchError, LaunchTimeoutError
from weft.launcher.pool import RankPool

COLLECTIVE_TIMEOUT_SECS = 20.0
CASE_TIMEOUT_SECS = 60.0
SLOW_CASE_TIMEOUT_SECS = 1800.0


@dataclass(frozen=True)
class Outcome:
    """What came of a case: `error` says in a line what went wrong, `report` has every rank's traceback.

    "skipped" says that torch skips it, "unable" that this machine can't run it.
    """

    status: Literal["passes", "fails", "skipped", "unable"]
    secs: float = 0.0
    error: str = ""
    report: str = ""


class Runner:
    """Runs cases of one suite on weft, or on torch itself. Close it, or use it as a context manager."""

    def __init__(self, suite: Suite, target: Literal["weft", "torch"] = "weft") -> None:
        self._suite = suite
        self._target = target
        self._folder = tempfile.mkdtemp(prefix="conformance-")
        self._pools: dict[int, RankPool] = {}
        self._num_runs = 0

    def run(self, case: Case, timeout_secs: float = CASE_TIMEOUT_SECS) -> Outcome:
        """Run one case on as many ranks as it needs, if there are the GPUs that it needs."""
        if case.num_gpus > torch.cuda.device_count():
            return Outcome("unable", error=f"GPUs needed: {case.num_gpus}")
        pool = self._pool(case.num_ranks)
        self._num_runs += 1
        start = time.monotonic()
        try:
            results = pool.run(
                run_case,
                args=(self._suite, self._target, case.tests, case.test, self._folder, self._num_runs),
                backend=self._suite.backend,
                timeout=timeout_secs,
                collective_timeout=COLLECTIVE_TIMEOUT_SECS,
            )
        except LaunchTimeoutError as error:
            return Outcome(
                "fails", time.monotonic() - start, f"hangs: not done in {timeout_secs:g} s", str(error)
            )
        except LaunchError as error:
            return Outcome("fails", time.monotonic() - start, headline(error), str(error))
        secs = time.monotonic() - start
        skipped = [reason for reason in results if reason is not None]
        return Outcome("skipped", secs, error=skipped[0]) if skipped else Outcome("passes", secs)

    def list_tests(self) -> list[str]:
        """The tests that the suite's classes have in this torch."""
        pool = self._pool(self._suite.classes[0].num_ranks)
        return pool.run(list_tests, args=(self._suite, self._target, self._folder), timeout=120.0)[0]

    def close(self) -> None:
        """End the ranks and remove what the tests wrote."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pool(self, num_ranks: int) -> RankPool:
        pool = self._pools.get(num_ranks)
        if pool is None or not pool.is_usable or self._is_torch_rpc:
            if pool is not None:
                pool.close()
            pool = self._pools[num_ranks] = RankPool(num_ranks)
        return pool

    @property
    def _is_torch_rpc(self) -> bool:
        """Whether ranks serve one test only: torch's RPC can't be started a second time in a process."""
        return self._target == "torch" and not self._suite.has_group


def headline(error: LaunchError) -> str:
    """The first cause in one line: which rank, the error's type and its text, or how it died."""
    return str(error).splitlines()[0].removeprefix("launch: ")

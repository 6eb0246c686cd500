"""The pytest plugin of a run in a scratch copy: record which test reaches what, or run a mutant's tests.

Recording (--mutants-record FOLDER): every test, and every fixture that outlives a test, gets a row in the
file that reach.py maps, and tests.jsonl says which rows are a test's. A test has the rows of the fixtures
that it uses, and with `shared_pool` the rows of the pools' start, whoever was the first to need them.

Running (--mutants-tests FILE): the tests that the file lists, in its order, those of one tier. The file of
progress gets a line at the start of each test and one at the first failure: see supervise.py.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.reach import FILE, HEADER_BYTES

# In the folder of a recording: tests that need no recording.
KNOWN = "known.txt"
# A recorded test that is silent for so long hangs.
RECORDED_SECS = 900.0
# A test of a mutant hangs after this and as often the time it takes on the unchanged tree; later where the
# machine has other work.
SILENT_SECS, SILENT_FACTOR, MOST_LOAD = 60.0, 10.0, 6.0


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mutants")
    group.addoption("--mutants-record", type=Path, metavar="FOLDER")
    group.addoption("--mutants-tests", type=Path, metavar="FILE")
    group.addoption("--mutants-tier", choices=("everyday", "rest", "full"), default="full")
    group.addoption("--mutants-limit", type=float, default=float("inf"), metavar="SECS")
    group.addoption("--mutants-progress", type=Path, metavar="FILE")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.mutants_progress is None:
        return
    progress = ProgressFile(config.option.mutants_progress)
    if config.option.mutants_record is not None:
        config.pluginmanager.register(Recorder(config, progress), "mutants-recorder")
    else:
        config.pluginmanager.register(Runner(config, progress), "mutants-runner")


class ProgressFile:
    """JSON lines for the supervisor, and for whoever reads how it ended."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, **line: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


# -- recording ---------------------------------------------------------------------------


class Recorder:
    """Says which row is the current one, and writes down which rows a test has."""

    def __init__(self, config: pytest.Config, progress: ProgressFile) -> None:
        folder: Path = config.option.mutants_record
        self._progress = progress
        self._tests = folder / "tests.jsonl"
        self._known = {json.loads(line)["test"] for line in self._tests.read_text().splitlines()}
        self._known |= set((folder / KNOWN).read_text().splitlines())
        with (config.rootpath / FILE).open("r+b") as file:
            self._header = memoryview(mmap.mmap(file.fileno(), HEADER_BYTES)).cast("Q")
        # After the offset of the current row: a row's bytes, how many rows fit, how many are taken.
        self._row_bytes, self._capacity = self._header[1], self._header[2]
        self._fixture_rows: defaultdict[Any, list[int]] = defaultdict(list)
        self._pool_rows: list[int] = []
        self._outcomes: dict[str, str] = {}
        self._enter(0)

    def _new_row(self) -> int:
        self._header[3] += 1
        if self._header[3] >= self._capacity:
            pytest.exit("the file has no room for further tests", returncode=4)
        return self._header[3]

    def _enter(self, row: int) -> None:
        self._row = row
        self._header[0] = HEADER_BYTES + row * self._row_bytes

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._known]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._watch_pools()
        self._progress.write(test=item.nodeid, within=RECORDED_SECS)
        own = self._new_row()
        self._enter(own)
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            self._enter(0)
            self._write(item, own, time.perf_counter() - start)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        before, row = self._row, self._new_row()
        self._fixture_rows[fixturedef].append(row)
        self._enter(row)
        try:
            return (yield)
        finally:
            self._enter(before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self._outcomes.setdefault(report.nodeid, report.outcome)

    def _watch_pools(self) -> None:
        """Give the start of a shared pool a row of its own, once weft's test kit is imported."""
        pools: Any = sys.modules.get("weft.testing.pool")
        if pools is None or getattr(pools.RankPool, "__name__", "") == "start":
            return
        make_pool = pools.RankPool

        def start(*args: Any, **kwargs: Any) -> object:
            before, row = self._row, self._new_row()
            self._pool_rows.append(row)
            self._enter(row)
            try:
                return make_pool(*args, **kwargs)
            finally:
                self._enter(before)

        pools.RankPool = start

    def _write(self, item: pytest.Item, own: int, secs: float) -> None:
        used = [
            fixture
            for fixtures in getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
            for fixture in fixtures
            if fixture.scope != "function"
        ]
        # Such tests are run one after the other: setting the fixture up again for each would take long.
        is_grouped = any(fixture in self._fixture_rows for fixture in used)
        line = {
            "test": item.nodeid,
            "rows": [own, *(row for fixture in used for row in self._fixture_rows.get(fixture, ()))],
            "pool_rows": self._pool_rows,
            "secs": round(secs, 3),
            "group": item.nodeid.partition("::")[0] if is_grouped else "",
            "outcome": self._outcomes.pop(item.nodeid, "passed"),
        }
        with self._tests.open("a") as file:
            file.write(json.dumps(line) + "\n")


# -- running -----------------------------------------------------------------------------


class Runner:
    """Runs the listed tests of one tier in the order of the list."""

    def __init__(self, config: pytest.Config, progress: ProgressFile) -> None:
        self._secs: dict[str, float] = json.loads(config.option.mutants_tests.read_text())
        self._tier: str = config.option.mutants_tier
        self._progress = progress
        self._stop_at = time.monotonic() + config.option.mutants_limit
        self._session: pytest.Session | None = None
        self._num_run = 0
        self._has_failed = False

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        order = {name: index for index, name in enumerate(self._secs)}
        known = [item for item in items if item.nodeid in order]
        chosen = [item for item in known if self._is_in_tier(item)]
        left_out = set(items) - set(chosen)
        chosen.sort(key=lambda item: order[item.nodeid])
        items[:] = chosen
        config.hook.pytest_deselected(items=list(left_out))
        # Those of another tier, and those that are not there any more.
        others, gone = len(known) - len(chosen), len(order) - len(known)
        self._progress.write(collected=len(chosen), others=others, gone=gone)

    def _is_in_tier(self, item: pytest.Item) -> bool:
        is_marked = item.get_closest_marker("full") is not None
        return self._tier == "full" or is_marked == (self._tier == "rest")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._fail(report.nodeid, "collection", str(report.longrepr))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        secs = SILENT_SECS + SILENT_FACTOR * self._secs.get(nodeid, 0.0)
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        self._progress.write(test=nodeid, within=secs * min(max(load, 1.0), MOST_LOAD))
        self._num_run += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._fail(report.nodeid, report.when or "", crash.message if crash else str(report.longrepr))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        # Asked for between tests, when the session looks at it.
        if time.monotonic() > self._stop_at and self._session is not None:
            self._session.shouldstop = "the limit of time"

    def pytest_sessionfinish(self) -> None:
        if not self._has_failed:
            is_limited = time.monotonic() > self._stop_at
            self._progress.write(end="limit" if is_limited else "passed", ran=self._num_run)

    def _fail(self, name: str, when: str, message: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._progress.write(end="failed", test=name, when=when, message=message[:400], ran=self._num_run)

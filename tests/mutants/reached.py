"""Which tests reach a mutant, from recordings of the suite, and in which order they are tried.

A recording is a folder: files.json (the probes), tests.jsonl (the tests and their rows), reach.bin (the
rows). Later ones add to earlier ones, and stand in for them where both have a test. Where a file has changed
since, lines can't be compared: then the tests count that reach the function the mutant is in.
"""

from __future__ import annotations

import ast
import json
import mmap
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from tests.mutants.catalogue import Mutant
from tests.mutants.plugin import KNOWN
from tests.mutants.probes import ProbedFile, digest_text, find_functions
from tests.mutants.reach import FILE, HEADER_BYTES

_MAX_TESTS = 24_000
# What any test costs, however quick.
_TEST_SECS = 0.02
# What a test reaches that uses a shared pool: its rows are those of the pools' start, too.
_POOL_FUNCTION = ("testing/pool.py", "shared_pool")


@dataclass(frozen=True)
class RecordedTest:
    """A test as it was recorded. `group`: its file, where tests share a fixture that outlives them."""

    name: str
    rows: tuple[int, ...]
    pool_rows: tuple[int, ...]
    secs: float
    group: str
    outcome: str

    @property
    def function(self) -> str:
        return self.name.partition("[")[0]


def begin_recording(folder: Path, files: Sequence[ProbedFile], known: Iterable[str]) -> Path:
    """Make an empty recording; returns the file of rows, which the probed copy needs."""
    folder.mkdir(parents=True)
    (folder / "files.json").write_text(json.dumps([file.to_json() for file in files]))
    (folder / "tests.jsonl").touch()
    (folder / KNOWN).write_text("\n".join(known))
    row_bytes = -(-(files[-1].first + len(files[-1].probes)) // 64) * 64
    rows = folder / FILE
    with rows.open("wb") as file:
        file.truncate(HEADER_BYTES + _MAX_TESTS * row_bytes)  # with holes: rows take room once written
        # What plugin.Recorder and reach.mark read; see there.
        file.write(np.array([HEADER_BYTES, row_bytes, _MAX_TESTS, 0], np.uint64).tobytes())
    return rows


class Recording:
    """One run of the suite, or of a part of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files = {
            saved["path"]: ProbedFile.from_json(saved)
            for saved in json.loads((folder / "files.json").read_text())
        }
        lines = [json.loads(line) for line in (folder / "tests.jsonl").read_text().splitlines()]
        self.tests = {
            line["test"]: RecordedTest(
                line["test"],
                tuple(line["rows"]),
                tuple(line["pool_rows"]),
                line["secs"],
                line["group"],
                line["outcome"],
            )
            for line in lines
        }

    @cached_property
    def _matrix(self) -> np.ndarray:
        """A row a test, a column a probe."""
        with (self._folder / FILE).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = np.frombuffer(mapped, np.uint64, 4)
        row_bytes, num_rows = int(header[1]), int(header[3]) + 1
        return np.frombuffer(mapped, np.uint8, num_rows * row_bytes, HEADER_BYTES).reshape(
            num_rows, row_bytes
        )

    @cached_property
    def _pooled(self) -> np.ndarray:
        """The rows of tests that took a shared pool."""
        path, function = _POOL_FUNCTION
        return self._reached_rows(self._find_probes(path, lambda name, _: name == function))

    def tests_reaching(self, mutant: Mutant) -> list[RecordedTest]:
        """The tests that passed, and reach the mutant's lines, as far as this recording can tell."""
        reached = self._reached_rows(self.find_probes(mutant))
        return [
            test
            for test in self.tests.values()
            if test.outcome == "passed"
            and (
                reached[list(test.rows)].any()
                or (self._pooled[test.rows[0]] and reached[list(test.pool_rows)].any())
            )
        ]

    def find_probes(self, mutant: Mutant) -> list[int]:
        """The probes of the blocks that a mutant changes."""
        text = mutant.text
        file = self.files.get(mutant.file)
        changed = mutant.changed_lines(text)
        names = set(mutant.reached_by)
        if file is not None and not names:
            if file.digest == digest_text(text) and (
                exact := self._find_probes(mutant.file, lambda _, lines: not changed.isdisjoint(lines))
            ):
                return exact
            names = {
                name
                for name, (first, last) in find_functions(ast.parse(text)).items()
                if any(first <= line <= last for line in changed)
            }
        found = self._find_probes(mutant.file, lambda name, _: name in names)
        return found or self._find_probes(mutant.file, lambda *_: True)

    def _find_probes(self, path: str, is_one: Callable[[str, Sequence[int]], bool]) -> list[int]:
        file = self.files.get(path)
        if file is None:
            return []
        return [
            file.first + index
            for index, probe in enumerate(file.probes)
            if is_one(probe.function, probe.lines)
        ]

    def _reached_rows(self, probes: list[int]) -> np.ndarray:
        return np.any(self._matrix[:, probes], axis=1)


class ReachMap:
    """All recordings in a folder."""

    def __init__(self, folder: Path) -> None:
        self._recordings = [Recording(path.parent) for path in sorted(folder.glob("*/tests.jsonl"))]

    @property
    def tests(self) -> dict[str, RecordedTest]:
        return {name: test for recording in self._recordings for name, test in recording.tests.items()}

    def tests_reaching(self, mutant: Mutant) -> list[RecordedTest]:
        """Those that a test of the mutant has to run, in no order."""
        found: dict[str, RecordedTest] = {}
        for recording in self._recordings:
            for name in recording.tests:
                found.pop(name, None)
            found.update((test.name, test) for test in recording.tests_reaching(mutant))
        return list(found.values())


def order_tests(tests: Iterable[RecordedTest]) -> list[RecordedTest]:
    """Quick ones first, groups together. A test's further parameters come later than their time alone says:
    where one didn't notice a mutant, the others are less likely to than another test is.
    """
    units: defaultdict[str, list[RecordedTest]] = defaultdict(list)
    for test in tests:
        units[test.group or test.name].append(test)
    costs = {unit: sum(test.secs for test in members) for unit, members in units.items()}
    num_before: defaultdict[str, int] = defaultdict(int)
    rounds: dict[str, int] = {}
    for unit in sorted(units, key=lambda unit: (costs[unit], unit)):
        function = units[unit][0].group or units[unit][0].function
        rounds[unit] = num_before[function]
        num_before[function] += 1
    ordered = sorted(units, key=lambda unit: ((costs[unit] + _TEST_SECS) * (1 + rounds[unit]), unit))
    return [test for unit in ordered for test in units[unit]]

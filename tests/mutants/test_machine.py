"""How mutants are made and tried: probes, recordings, the order of tests, verdicts, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.mutants import supervise
from tests.mutants.catalogue import Mutant
from tests.mutants.plugin import KNOWN
from tests.mutants.probes import MARK, ProbedFile, find_functions, probe_file
from tests.mutants.reach import FILE, HEADER_BYTES
from tests.mutants.reached import ReachMap, RecordedTest, begin_recording, order_tests
from tests.mutants.running import Verdict, read_verdict, split_tests
from tests.mutants.scratch import ROOT, make_scratch
from tests.mutants.supervise import count_own_bytes, find_descendants
from tests.mutants.table import Results, make_table

# -- probes ------------------------------------------------------------------------------

SOURCE = '''"""Doc."""
from __future__ import annotations
LIMIT = 3

class Counter:
    start = 1

    def count(self, number, step=2):
        """Doc."""
        total = self.start
        if number > LIMIT:
            return -1
        elif number < 0:
            total += 1
        for each in range(number):
            total += each
        else:
            total += step
        try:
            total += {"a": lambda: 5}["a"]()
        except KeyError:
            total = 0
        return total

    def nothing(self): ...

def outer():
    def inner(x):
        return x + 1
    return inner

@triton.jit
def kernel(x):
    return x
'''


def probe_source(tmp_path: Path) -> tuple[ProbedFile, dict[str, object], list[int]]:
    """A probed file, what running it defines, and the numbers that it marks from then on."""
    path = tmp_path / "source.py"
    path.write_text(SOURCE)
    file, code = probe_file(path, "source.py", 100)
    marked: list[int] = []
    names = tuple(name for name in code.co_names if name != "weft._reach")
    assert MARK in names

    class Triton:
        jit = staticmethod(lambda function: function)

    stand_in = type(sys)("weft._reach")
    stand_in.mark = marked.append  # type: ignore[attr-defined]
    space: dict[str, object] = {"__name__": "source", "triton": Triton}
    before = sys.modules.get("weft._reach")
    sys.modules["weft._reach"] = stand_in
    try:
        exec(code, space)
    finally:
        if before is None:
            del sys.modules["weft._reach"]
    return file, space, marked


def lines_of(file: ProbedFile, marked: list[int]) -> set[int]:
    return {line for number in marked for line in file.probes[number - file.first].lines}


def test_probes_tell_which_lines_ran(tmp_path: Path) -> None:
    file, space, marked = probe_source(tmp_path)
    counter = space["Counter"]()  # type: ignore[operator]
    assert marked == []  # importing is nobody's
    lines = SOURCE.splitlines()

    def ran(words: str) -> bool:
        return next(n for n, line in enumerate(lines, start=1) if words in line) in lines_of(file, marked)

    assert counter.count(5) == -1
    assert [ran("total = self"), ran("return -1"), ran("elif number"), ran("for each")] == [
        True,
        True,
        False,
        False,
    ]
    marked.clear()
    assert counter.count(3) == 1 + 3 + 2 + 5
    assert [ran("def count"), ran("return -1"), ran("elif number"), ran("total += 1")] == [
        True,
        False,
        True,
        False,
    ]
    assert [ran("for each"), ran("total += each"), ran("total += step"), ran("lambda")] == [True] * 4
    assert [ran("total = 0"), ran("except KeyError"), ran("return total")] == [False, True, True]
    marked.clear()
    assert space["outer"]()(1) == 2  # type: ignore[operator]
    assert {file.probes[number - 100].function for number in marked} == {"outer", "outer.inner"}


def test_probes_leave_alone_what_others_compile(tmp_path: Path) -> None:
    file, _, _ = probe_source(tmp_path)
    functions = {probe.function for probe in file.probes}
    assert functions == {"Counter.count", "Counter.count.<lambda>", "outer", "outer.inner"}


def test_functions_are_found_with_their_lines() -> None:
    import ast

    found = find_functions(ast.parse(SOURCE))
    assert found["Counter.count"] == (8, 23)
    assert set(found) == {"Counter.count", "Counter.nothing", "outer", "outer.inner", "kernel"}
    assert found["kernel"][0] == SOURCE.splitlines().index("@triton.jit") + 1


# -- recordings and the order of tests ------------------------------------------------------


MUTANT = Mutant(
    name="strides-are-shifted",
    file="tensors/flat.py",
    kind="off by one",
    old="        step *= max(size, 1)",
    new="        step *= max(size, 2)",
    suffers="Gradients of tensors with a dim of one lie elsewhere.",
)


def save_recording(
    folder: Path, reached: dict[str, tuple[list[int], list[int]]], text: str = ""
) -> ProbedFile:
    """A recording of flat.py, and of these tests: the lines that each reaches, and those of the pools."""
    source = ROOT / "src" / "weft" / "tensors" / "flat.py"
    path = folder.with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text or source.read_text())
    file, _ = probe_file(path, "tensors/flat.py", 0)
    pool_text = path.with_suffix(".pool.py")
    pool_text.write_text("def shared_pool(ranks):\n    return 1\n")
    pool, _ = probe_file(pool_text, "testing/pool.py", len(file.probes))
    rows_path = begin_recording(folder, [file, pool], ())
    header = np.memmap(rows_path, np.uint64, "r+", shape=(4,))
    row_bytes = int(header[1])
    rows = np.memmap(rows_path, np.uint8, "r+", HEADER_BYTES, (2 * len(reached) + 1, row_bytes))
    lines = []
    for number, (name, (own, at_pool_start)) in enumerate(reached.items(), start=1):
        for row, wanted in ((2 * number - 1, own), (2 * number, at_pool_start)):
            for place, probe in enumerate(file.probes):
                rows[row, place] = any(line in probe.lines for line in wanted)
        rows[2 * number - 1, pool.first] = bool(at_pool_start)
        test = {"test": name, "rows": [2 * number - 1], "pool_rows": [2 * number], "secs": 0.1}
        lines.append(json.dumps({**test, "group": "", "outcome": "passed"}))
    header[3] = 2 * len(reached)
    (folder / "tests.jsonl").write_text("\n".join(lines))
    return file


def names_reaching(folder: Path) -> list[str]:
    return sorted(test.name for test in ReachMap(folder).tests_reaching(MUTANT))


def test_the_tests_that_reach_a_line_are_found(tmp_path: Path) -> None:
    at = MUTANT.line
    save_recording(tmp_path / "001", {"a::hit": ([at], []), "a::beside": ([1], []), "b::pooled": ([], [at])})
    assert names_reaching(tmp_path) == ["a::hit", "b::pooled"]


def test_where_the_file_has_changed_the_function_counts(tmp_path: Path) -> None:
    text = MUTANT.text
    first, last = find_functions(__import__("ast").parse(text))["contiguous_strides"]
    changed = "# one line more\n" + text
    reached = {"a::other_line": ([last + 1], []), "a::other_function": ([last + 20], [])}
    save_recording(tmp_path / "001", reached, changed)
    assert first <= MUTANT.line <= last
    assert names_reaching(tmp_path) == ["a::other_line"]


def test_a_later_recording_stands_in_for_an_earlier_one(tmp_path: Path) -> None:
    at = MUTANT.line
    save_recording(tmp_path / "001", {"a::moved_on": ([at], []), "a::stays": ([at], [])})
    save_recording(tmp_path / "002", {"a::moved_on": ([1], [])})
    assert names_reaching(tmp_path) == ["a::stays"]


def make_test(name: str, secs: float, group: str = "") -> RecordedTest:
    return RecordedTest(name, (1,), (), secs, group, "passed")


def test_quick_tests_go_first_and_variants_of_one_later() -> None:
    tests = [make_test("a::x[1]", 0.1), make_test("a::x[2]", 0.1), make_test("a::x[3]", 0.1)]
    tests += [make_test("b::y", 0.2), make_test("c::z", 9.0)]
    names = [test.name for test in order_tests(tests)]
    assert names == ["a::x[1]", "b::y", "a::x[2]", "a::x[3]", "c::z"]


def test_tests_that_share_a_fixture_stay_together() -> None:
    tests = [make_test("m::one", 0.1, "m"), make_test("b::y", 0.2), make_test("m::two", 0.3, "m")]
    assert [test.name for test in order_tests(tests)] == ["b::y", "m::one", "m::two"]
    many = [make_test(f"t::{number}", 0.1) for number in range(39)]
    many += [make_test(f"m::{number}", 0.1, "m") for number in range(5)]
    assert [len(part) for part in split_tests([*many, make_test("z::last", 1.0)])] == [44, 1]


# -- verdicts ----------------------------------------------------------------------------


STARTED = {"test": "a::x", "within": 60.0}


@pytest.mark.parametrize(
    ("lines", "ended", "verdict"),
    [
        (
            [STARTED, {"end": "failed", "test": "a::x", "when": "call", "message": "no", "ran": 1}],
            {"why": "exited", "status": 1},
            Verdict(True, "failure", "a::x", "no", 3, 1),
        ),
        (
            [{"end": "failed", "test": "a.py", "when": "collection", "message": "no", "ran": 0}],
            {"why": "exited", "status": 2},
            Verdict(True, "at collection", "a.py", "no", 3),
        ),
        ([STARTED], {"why": "hung", "status": None}, Verdict(True, "hang", "a::x", "", 3, 1)),
        ([STARTED], {"why": "memory", "status": None}, Verdict(True, "out of memory", "a::x", "", 3, 1)),
        (
            [STARTED],
            {"why": "exited", "status": -11},
            Verdict(True, "crash", "a::x", "status -11: bye", 3, 1),
        ),
        (
            [STARTED, {"end": "passed", "ran": 1}],
            {"why": "exited", "status": 0},
            Verdict(False, "all passed", "", "", 3, 1),
        ),
        (
            [STARTED, {"end": "limit", "ran": 1}],
            {"why": "exited", "status": 0},
            Verdict(False, "the limit of time", "", "", 3, 1),
        ),
    ],
)
def test_verdicts(tmp_path: Path, lines: list[object], ended: dict[str, object], verdict: Verdict) -> None:
    progress = tmp_path / "progress.jsonl"
    progress.write_text("".join(json.dumps(line) + "\n" for line in [{"collected": 3}, *lines]))
    assert read_verdict(progress, ended, "bye") == verdict


def test_the_table(tmp_path: Path) -> None:
    other = Mutant(**{**vars(MUTANT), "name": "other-one-here", "new": "        step *= 7"})
    gpu = Mutant(**{**vars(MUTANT), "name": "gpu-one-here", "needs_gpu": True})
    results = Results(tmp_path / "results.json")
    killed, passed = Verdict(True, "failure", "a::x"), Verdict(False, "all passed", reached=3, ran=3)
    results.keep(MUTANT, {"everyday": killed, "full": killed}, "2030-01-01")
    results.keep(other, {"everyday": passed, "full": killed}, "2030-01-01")
    table = make_table([MUTANT, other, gpu], Results(tmp_path / "results.json"))
    assert "| tensors | 2       | 1                  | 2              | 50.0%           |" in table
    assert "1 that need a GPU" in table
    where = f"src/weft/tensors/flat.py:{MUTANT.line}"
    assert f"Killed by the full tier alone:\n\n- `other-one-here`, {where}" in table
    assert "`- step *= max(size, 1); + step *= 7`" in table


# -- runs of pytest ----------------------------------------------------------------------------


SUITE = """
import os
import subprocess
import pytest

def test_quick(): pass
def test_other(): pass

@pytest.mark.full
def test_slow(): assert not os.environ.get("BREAK")

def test_wrong(): assert not os.environ.get("BREAK")

@pytest.mark.skip
def test_skipped(): pass

def test_daemon():
    subprocess.Popen(["tail", "-f", "/dev/null"], start_new_session=True)

def test_stuck():
    subprocess.run(["tail", "-f", "/dev/null"])
"""


@pytest.fixture
def run_suite(tmp_path: Path) -> Callable[..., tuple[dict[str, object], list[dict[str, object]]]]:
    """Runs tests of SUITE, by name and in an order, under a supervisor."""
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full\n")

    def run(
        *names: str, tier: str = "full", **variables: str
    ) -> tuple[dict[str, object], list[dict[str, object]]]:
        listed, progress = tmp_path / "tests.json", tmp_path / "progress.jsonl"
        secs = float(variables.pop("secs", "0"))
        listed.write_text(json.dumps({f"test_suite.py::test_{name}": secs for name in names}))
        progress.unlink(missing_ok=True)
        pytest_command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.mutants.plugin",
            "-p",
            "no:cacheprovider",
        ]
        pytest_command += ["-x", "-q", f"--mutants-tests={listed}", f"--mutants-tier={tier}"]
        pytest_command += [f"--mutants-progress={progress}", "test_suite.py"]
        supervisor = [sys.executable, "-m", "tests.mutants.supervise", str(progress), "20"]
        process = subprocess.Popen(
            [*supervisor, str(tmp_path / "log"), *pytest_command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        with process:
            said = process.stdout.read()
        return json.loads(said), [json.loads(line) for line in progress.read_text().splitlines()]

    return run


RunSuite = Callable[..., tuple[dict[str, object], list[dict[str, object]]]]


def started(lines: list[dict[str, object]]) -> list[str]:
    return [str(line["test"]).partition("::test_")[2] for line in lines if "within" in line]


def test_the_listed_tests_run_in_the_order_of_the_list(run_suite: RunSuite) -> None:
    ended, lines = run_suite("other", "slow", "quick")
    assert ended == {"status": 0, "why": "exited"}
    assert started(lines) == ["other", "slow", "quick"]
    assert lines[0] == {"collected": 3, "others": 0, "gone": 0}
    assert lines[-1] == {"end": "passed", "ran": 3}


def test_the_first_failure_ends_the_run(run_suite: RunSuite) -> None:
    ended, lines = run_suite("wrong", "quick", BREAK="1")
    assert ended == {"status": 1, "why": "exited"}
    assert started(lines) == ["wrong"]
    assert (lines[-1]["end"], lines[-1]["when"]) == ("failed", "call")


def test_the_tiers_are_told_apart_by_their_mark(run_suite: RunSuite) -> None:
    _, lines = run_suite("slow", "wrong", "gone", tier="everyday", BREAK="1")
    assert started(lines) == ["wrong"]
    assert lines[0] == {"collected": 1, "others": 1, "gone": 1}
    _, lines = run_suite("slow", "wrong", tier="rest", BREAK="1")
    assert started(lines) == ["slow"]


def test_nothing_is_left_behind(run_suite: RunSuite) -> None:
    before = set(find_descendants(1))
    ended, lines = run_suite("daemon", "quick")
    assert ended["status"] == 0
    assert started(lines) == ["daemon", "quick"]
    left = [pid for pid in set(find_descendants(1)) - before if _command(pid).startswith("tail\0")]
    assert left == []


def test_a_test_that_hangs_is_ended(run_suite: RunSuite, monkeypatch: pytest.MonkeyPatch) -> None:
    # Sixty seconds, and ten times what it takes: less than nothing for this one.
    ended, lines = run_suite("stuck", secs="-5.95")
    assert ended["why"] == "hung"
    assert started(lines) == ["stuck"]


def test_a_supervisor_whose_starter_is_gone_ends_all(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.mutants.supervise", str(tmp_path / "progress"), "1", ""]
    process = subprocess.Popen(
        [*command, "tail", "-f", "/dev/null"], cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    _, said = process.communicate()  # closes its stdin
    assert process.returncode == 1
    assert b"starter is gone" in said


def test_a_command_that_eats_the_memory_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Running:
        has_exited = threading.Event()

    assert count_own_bytes([os.getpid()]) > 1 << 20
    monkeypatch.setattr(supervise, "find_descendants", lambda _: [os.getpid()])
    monkeypatch.setattr(supervise, "MOST_BYTES", 1 << 20)
    reading, writing = os.pipe()
    with open(reading) as silent, open(writing, "w"):
        monkeypatch.setattr(sys, "stdin", silent)
        assert supervise.watch(Running(), supervise.Progress(tmp_path / "none"), 1.0) == "memory"  # type: ignore[arg-type]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


# -- scratch copies ------------------------------------------------------------------------------


def test_a_change_is_seen_in_the_copy_alone() -> None:
    show = "from weft.errors import ConfigError; print(ConfigError.__doc__)"

    def run() -> str:
        command = [scratch.python, "-I", "-c", show]
        done = subprocess.run(command, env=scratch.environment(), capture_output=True, text=True, check=True)
        return done.stdout

    with make_scratch() as scratch:
        path = scratch.package / "errors.py"
        text, written_at = path.read_text(), path.stat().st_mtime_ns
        first = text.index('"""', text.index("class ConfigError")) + 3
        before = run()
        # As long as the original, and as old: Python must not take its bytecode for this.
        with scratch.changed("errors.py", f"{text[:first]}#{text[first + 1 :]}"):
            os.utime(path, ns=(written_at, written_at))
            assert run() == f"#{before[1:]}"
        os.utime(path, ns=(written_at, written_at))
        assert run() == before
        assert (ROOT / "src" / "weft" / "errors.py").read_text() == text
        root = scratch.root
    assert not root.exists()


def test_every_process_of_a_probed_copy_marks_what_it_reaches(tmp_path: Path) -> None:
    show = (
        "import inspect, os, signal; from weft.tensors import flat\n"
        "if os.fork() == 0:\n"
        "    flat.contiguous_strides((2, 3)); os.kill(os.getpid(), signal.SIGKILL)\n"
        "os.wait(); print(inspect.getsource(flat).count('_reach'))"
    )
    with make_scratch() as scratch:
        files = scratch.insert_probes()
        recording = tmp_path / "001"
        rows_path = begin_recording(recording, files, ["known"])
        (scratch.root / FILE).symlink_to(rows_path)
        header = np.memmap(rows_path, np.uint64, "r+", shape=(4,))
        header[0], header[3] = HEADER_BYTES + 5 * int(header[1]), 5
        done = subprocess.run(
            [scratch.python, "-I", "-c", show],
            env={"PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout == "0\n"
    assert (recording / KNOWN).read_text() == "known"
    assert set(os.listdir(recording)) == {"files.json", "tests.jsonl", KNOWN, FILE}
    test = {"test": "a::x", "rows": [5], "pool_rows": [], "secs": 0.0, "group": "", "outcome": "passed"}
    (recording / "tests.jsonl").write_text(json.dumps(test))
    assert names_reaching(tmp_path) == ["a::x"]
    test["rows"] = [4]
    (recording / "tests.jsonl").write_text(json.dumps(test))
    assert names_reaching(tmp_path) == []

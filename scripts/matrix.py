"""Run tiers of the tests on each version of torch and of Python that weft supports, and print the table.

Each version gets an environment of its own in `.matrix`, made as scripts/environment.py makes `.venv`. What
was found is kept in `.matrix/results.json`, so that a table can be put together of several runs (`--table`).

Exits with 1 when a test failed, an environment could not be made, or a version has no interpreter.
Needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import TextIO

from environment import Environment, ensure_environment, install_with_pip, locked

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ".matrix"
RESULTS = ROOT / FOLDER / "results.json"
# Folders of tests by what they test, of every kind of test; a tier takes what its mark selects. Without those
# that have a tier of their own, and those of scripts, which work in `.venv`.
OTHERS = {f"tests/{name}" for name in ("compiler", "conformance", "gpu", "mutants", "parity", "repo")}
FEATURES = tuple(sorted({f"tests/{path.parent.name}" for path in ROOT.glob("tests/*/test_*.py")} - OTHERS))
# Everything that is asked of a version, cheapest first: what pytest is to run.
TIERS: dict[str, tuple[str, ...]] = {
    # A few minutes: the private names of torch, the local group, every strategy, compiled once.
    "smoke": (
        "tests/unit/test_torch_private.py",
        "tests/unit/test_autograd.py",
        "tests/unit/test_tensors.py",
        "tests/threads/test_launch_world.py",
        "tests/procs/test_train_losses.py::test_every_strategy_has_the_losses_of_one_process[2-weft]",
        "tests/compiler/test_steps.py::test_with_inductor[gloo-2-replicate-plain]",
        "tests/compiler/test_fully_shard.py::test_with_inductor[gloo-2-None]",
    ),
    "unit": FEATURES,
    "compile": ("tests/compiler",),
    "parity": ("tests/parity", "tests/rpc/test_as_torch.py", "tests/dist_autograd/test_as_torch.py"),
    # Of each feature the tests that train or talk, on the local group and on gloo; not those that kill ranks.
    "procs": (
        "tests/data_parallel/test_training.py",
        "tests/fully_shard/test_training.py",
        "tests/fully_shard/test_backward.py",
        "tests/tensor_parallel/test_training.py",
        "tests/procs/test_train_losses.py",
        "tests/procs/test_group_backends.py",
        "tests/join/test_data_parallel.py",
        "tests/procs/test_launch.py",
        "tests/procs/test_launch_torchrun.py",
        "tests/procs/test_local_collectives.py",
        "tests/rpc/test_calls.py",
        "tests/rpc/test_payloads.py",
        "tests/rpc/test_errors.py",
        "tests/rpc/test_timeouts.py",
        "tests/rpc/test_async_functions.py",
        "tests/rpc/test_pickling.py",
        "tests/rpc/test_secret.py",
        "tests/rpc/test_tensor_memory.py",
        "tests/dist_autograd/test_contexts.py",
        "tests/dist_autograd/test_corners.py",
        "tests/dist_autograd/test_cuts.py",
        "tests/dist_autograd/test_exact.py",
        "tests/dist_autograd/test_failing.py",
        "tests/dist_autograd/test_hooks.py",
        "tests/dist_autograd/test_optimizer.py",
        "tests/dist_autograd/test_passes.py",
        "tests/dist_autograd/test_received.py",
        "tests/dist_autograd/test_sharing.py",
        "tests/procs/test_train_checkpoints.py",
    ),
    "threads": FEATURES,
}
# What pytest's -m selects of them.
MARKS = {
    "unit": "not threads and not processes and not gpu",
    "procs": "processes",
    "threads": "threads",
}
FULL = ("unit", "compile", "parity", "procs", "threads")


@dataclass(frozen=True)
class Version:
    """A row of the table: a release of torch on a release of Python, as "2.15" and "3.11"."""

    torch: str
    python: str

    def __str__(self) -> str:
        return f"torch {self.torch}, Python {self.python}"

    @property
    def environment(self) -> Environment:
        # Older releases of torch want an older setuptools than weft is developed with.
        pins = (f"torch=={self.torch}.*", "setuptools>=70")
        folder = f"{FOLDER}/torch-{self.torch}-python-{self.python}"
        return Environment(ROOT, folder, interpreters[self.python], pins)


@dataclass(frozen=True)
class Outcome:
    """A cell of the table. `problem` stands for the counts where pytest gave none."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    secs: float = 0.0
    date: str = ""
    problem: str = ""

    @property
    def is_good(self) -> bool:
        return not self.problem and not self.failed and self.passed > 0

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        parts = [(self.failed, "failed"), (self.passed, "passed"), (self.skipped, "skipped")]
        return ", ".join(f"{count:,} {what}" for count, what in parts if count) or "no tests"


@dataclass
class Row:
    """What is known of a version: the exact versions, and an outcome for each tier that was run.

    A tier that was run in parts has an outcome for each, as "compile 2/3".
    """

    version: Version
    exact: str = ""
    tiers: dict[str, Outcome] = field(default_factory=dict)

    def cell(self, tier: str) -> Outcome | None:
        """What was found of a tier, its parts together; None when nothing was."""
        parts = {name: outcome for name, outcome in self.tiers.items() if name.split(" ")[0] == tier}
        if not parts:
            return None
        total = Outcome(
            sum(outcome.passed for outcome in parts.values()),
            sum(outcome.failed for outcome in parts.values()),
            sum(outcome.skipped for outcome in parts.values()),
            round(sum(outcome.secs for outcome in parts.values()), 1),
            max(outcome.date for outcome in parts.values()),
        )
        problem = next((outcome.problem for outcome in parts.values() if outcome.problem), "")
        num_parts = int(next(iter(parts)).partition("/")[2] or 1)
        if len(parts) < num_parts:
            problem = problem or f"{total} ({len(parts)} of {num_parts} parts)"
        return replace(total, problem=problem)


# Python release -> the interpreter's command, for those that are there.
interpreters: dict[str, str] = {}


def main() -> None:
    options = parse()
    if options.table:
        rows = read_rows()
    else:
        versions = choose_versions(options)
        find_interpreters({version.python for version in versions}, options.interpreter)
        rows = [run_version(version, options) for version in versions]
    tiers = [tier for tier in TIERS if any(row.cell(tier) for row in rows)]
    print(f"\n{make_table(rows, tiers)}")
    if options.markdown:
        options.markdown.write_text(make_table(rows, tiers))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    sys.exit(not all(outcome.is_good for row in rows for outcome in row.tiers.values()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/matrix", description=__doc__)
    torches, pythons = supported_torches(), supported_pythons()
    names = ", ".join(TIERS)
    add = parser.add_argument
    add("--torch", nargs="+", metavar="V", help=f"releases of torch: {', '.join(torches)}; or newest, oldest")
    add("--python", nargs="+", metavar="V", help=f"releases of Python: {', '.join(pythons)}")
    add("--tier", nargs="+", default=["full"], metavar="T", help=f"of {names}; full: all but smoke (default)")
    add("--part", default="", metavar="K/N", help="only the K-th of N parts of each tier")
    add(
        "--interpreter",
        nargs="+",
        default=[],
        metavar="V=CMD",
        help="where a Python is, when not pythonV on PATH",
    )
    add("--remake", action="store_true", help="make the environments anew")
    add("--discard", action="store_true", help="remove each environment after its tests: most take 5 GB")
    add("--table", action="store_true", help="run nothing: show what earlier runs have found")
    add("--markdown", type=Path, metavar="FILE", help="write the table to a file")
    add("--json", type=Path, metavar="FILE", help="write the numbers to a file")
    options = parser.parse_args()
    options.tiers = [
        tier for tier in TIERS if tier in options.tier or ("full" in options.tier and tier in FULL)
    ]
    if unknown := {*options.tier} - {*TIERS, "full"}:
        parser.error(f"no tier {', '.join(sorted(unknown))}; there are {names} and full")
    ends = {"newest": torches[-1], "oldest": torches[0]}
    options.torch = options.torch and [ends.get(release, release) for release in options.torch]
    if options.part and not re.fullmatch(r"[1-9]\d?/[1-9]\d?", options.part):
        parser.error(f"'{options.part}' is no part: write 2/3")
    for given in [*(options.torch or ()), *(options.python or ())]:
        if not re.fullmatch(r"\d+\.\d+", given):
            parser.error(f"'{given}' is no release: write 2.15 or 3.12")
    return options


def supported_torches() -> list[str]:
    """The releases between the bounds of pyproject.toml, oldest first."""
    bounds = re.search(r'"torch>=2\.(\d+),<2\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert bounds, "pyproject.toml bounds torch by no two releases of one major version"
    return [f"2.{minor}" for minor in range(int(bounds[1]), int(bounds[2]))]


def supported_pythons() -> list[str]:
    """The releases that pyproject.toml names, oldest first."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [
        re.fullmatch(r"Programming Language :: Python :: (\d\.\d+)", line) for line in project["classifiers"]
    ]
    return [match[1] for match in found if match]


def choose_versions(options: argparse.Namespace) -> list[Version]:
    """The rows: each torch on the oldest Python, and each Python on the torch that weft is developed with."""
    developed = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert developed, "constraints.txt names no torch"
    pythons = supported_pythons()
    if options.torch or options.python:
        torches = options.torch or [developed[1]]
        return [Version(torch, python) for torch in torches for python in options.python or pythons[:1]]
    on_oldest = [Version(torch, pythons[0]) for torch in supported_torches()]
    return [*on_oldest, *(Version(developed[1], python) for python in pythons[1:])]


def find_interpreters(pythons: Iterable[str], given: Iterable[str]) -> None:
    """Look for a command for each release: the one given, else python3.12 and the like on the path."""
    commands = dict(entry.split("=", 1) for entry in given)
    for release in pythons:
        command = commands.get(release, f"python{release}")
        show = "import sys; print('%d.%d' % sys.version_info[:2])"
        try:
            done = subprocess.run([command, "-c", show], capture_output=True, text=True, check=False)
        except OSError:
            continue
        if done.stdout.strip() == release:
            interpreters[release] = command


def run_version(version: Version, options: argparse.Namespace) -> Row:
    """Run the tiers on a version."""
    row = Row(version)
    problem = prepare(version, options)
    for tier in options.tiers:
        name = f"{tier} {options.part}".strip()
        if problem:
            row.tiers[name] = Outcome(problem=problem)
        else:
            row.tiers[name] = run_tier(version, name)
            row.exact = ask_exact(version.environment)
            keep_row(row)
    if options.discard and not problem:
        shutil.rmtree(version.environment.where)
    return row


def prepare(version: Version, options: argparse.Namespace) -> str:
    """Make or update a version's environment; what stands in the way of it, or nothing."""
    if version.python not in interpreters:
        return f"no python{version.python} on the path"
    environment = version.environment
    if options.remake:
        shutil.rmtree(environment.where, ignore_errors=True)
    environment.where.parent.mkdir(exist_ok=True)
    began = time.monotonic()
    try:
        ensure_environment(environment, ["test"], install_with_pip)
    except (SystemExit, subprocess.CalledProcessError) as error:
        print(error, file=sys.stderr)
        return "no environment"
    say(f"{version}: environment ready after {time.monotonic() - began:.0f} s")
    return ""


def run_tier(version: Version, tier: str) -> Outcome:
    """Run the tests of a tier, or of a part of one, show how far they are, and count them."""
    environment = version.environment
    file_name = re.sub(r"\W", "-", tier)
    report = environment.where / f"{file_name}.xml"
    log = environment.where / f"{file_name}.log"
    report.unlink(missing_ok=True)
    began = time.monotonic()
    with log.open("w") as file:
        status = run_pytest(environment, version, tier, report, file)
    secs = time.monotonic() - began
    outcome = read_report(report, secs)
    if status not in (0, 1):  # of pytest: all ran, none failed or some
        outcome = replace(outcome, problem=f"ended early: pytest's status {status}")
    say(f"{version}, {tier}: {outcome}, {secs:.0f} s")
    if not outcome.is_good:
        shown = [line for line in log.read_text().splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
        print("\n".join(shown[-40:]), f"all of it: {log.relative_to(ROOT)}", sep="\n", file=sys.stderr)
    return outcome


def run_pytest(environment: Environment, version: Version, tier: str, report: Path, log: TextIO) -> int:
    """Run pytest, with its output in the log, and tell of every tenth of the tests. Its exit status."""
    tests = find_tests(tier)
    command = [environment.python, "-m", "pytest", "-q", "--full", "--tb=short", "-p", "no:cacheprovider"]
    with subprocess.Popen(
        [*command, "-m", MARKS.get(tier.partition(" ")[0], ""), f"--junitxml={report}", *tests],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        told = 0
        for line in process.stdout:
            log.write(line)
            log.flush()
            found = re.search(r"\[ *(\d+)%\]$", line)
            if found and int(found[1]) >= told + 10:
                told = int(found[1])
                say(f"{version}, {tier}: {told}%")
    return process.returncode


def find_tests(tier: str) -> list[str]:
    """What pytest is to run for a tier, or for a part of one: files, and single tests of files."""
    name, _, part = tier.partition(" ")
    tests = [str(path.relative_to(ROOT)) for pattern in TIERS[name] for path in expand(pattern)]
    first, _, step = part.partition("/")
    return tests[int(first) - 1 :: int(step)] if part else tests


def expand(pattern: str) -> list[Path]:
    """The files that a pattern means, or those of a folder; a single test as it is."""
    if "::" in pattern:
        return [ROOT / pattern]
    pattern = pattern if pattern.endswith(".py") else f"{pattern}/test_*.py"
    return sorted(ROOT.glob(pattern))


def read_report(report: Path, secs: float) -> Outcome:
    """The counts of a pytest run."""
    today = time.strftime("%Y-%m-%d", time.gmtime())
    try:
        suite = ElementTree.parse(report).getroot().find("testsuite")
    except (OSError, ElementTree.ParseError):
        suite = None
    if suite is None:  # it crashed, or something hung
        return Outcome(problem="no result", date=today, secs=round(secs, 1))
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return Outcome(max(0, total - failed - skipped), failed, skipped, round(secs, 1), today)


def ask_exact(environment: Environment) -> str:
    """The exact versions of torch and of Python in an environment."""
    show = "import platform, torch; print(f'torch {torch.__version__}, Python {platform.python_version()}')"
    done = subprocess.run([environment.python, "-c", show], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "does not import"


def read_rows() -> list[Row]:
    """What earlier runs have found."""
    if not RESULTS.exists():
        return []
    return [
        Row(
            Version(**row["version"]),
            row["exact"],
            {tier: Outcome(**outcome) for tier, outcome in row["tiers"].items()},
        )
        for row in json.loads(RESULTS.read_text())
    ]


def keep_row(row: Row) -> None:
    """Put what a row says among the results of earlier runs, and of runs under way."""
    with locked(RESULTS.with_suffix(".lock")):
        rows = read_rows()
        kept = next((other for other in rows if other.version == row.version), None)
        if kept is not None:
            rows.remove(kept)
            # A whole tier takes the place of its parts, and parts that of the whole.
            fresh = {part_of(tier) for tier in row.tiers}
            others = {
                tier: outcome
                for tier, outcome in kept.tiers.items()
                if part_of(tier) in fresh or not any(tier.split(" ")[0] == name for name, _ in fresh)
            }
            row = Row(row.version, row.exact, {**others, **row.tiers})
        rows.append(row)
        rows.sort(key=lambda row: [tuple(map(int, part.split("."))) for part in astuple(row.version)])
        RESULTS.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def part_of(tier: str) -> tuple[str, str]:
    """The tier, and of how many parts this is one."""
    return tier.split(" ")[0], tier.partition("/")[2]


def make_table(rows: Sequence[Row], tiers: Sequence[str]) -> str:
    """The rows as a table of Markdown, which a terminal shows well enough."""
    lines = [["version", *tiers], ["---"] * (len(tiers) + 1)]
    lines += [[row.exact or str(row.version), *(str(row.cell(tier) or "") for tier in tiers)] for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(tiers) + 1)]
    lines[1] = ["-" * width for width in widths]
    padded = (
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )
    return "\n".join(f"| {line} |" for line in padded) + "\n"


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

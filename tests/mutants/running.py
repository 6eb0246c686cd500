"""Run the tests of one mutant in a scratch copy, and record the suite in one.

Each run of pytest has a supervisor (supervise.py), so that a mutant that hangs or leaves processes behind
costs its time and nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.mutants.catalogue import Mutant
from tests.mutants.reach import FILE
from tests.mutants.reached import ReachMap, RecordedTest, begin_recording, order_tests
from tests.mutants.scratch import Scratch, make_scratch

# Rules about the text of the source, which a mutant may break for the wrong reason, and what needs a GPU.
LEFT_OUT = ("tests/repo", "tests/mutants")
# How long pytest may take to exit once its verdict is known: it closes pools of ranks.
_GRACE_SECS = 20.0
_MAX_RESTARTS = 20
LIMIT = "the limit of time"
_PART_SIZES = (40, 400)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant in one tier. `how`: killed by a failure, a crash, a hang; else why not."""

    killed: bool
    how: str
    test: str = ""
    message: str = ""
    reached: int = 0  # tests of the tier that reach it
    ran: int = 0
    secs: float = 0.0
    others: int = 0  # tests of another tier that reach it
    gone: int = 0  # tests that were recorded and are not there any more

    def __str__(self) -> str:
        if self.killed:
            return f"killed ({self.how}) by {self.test}"
        return f"survived: {self.how}, {self.ran} of {self.reached} tests run"


def run_tier(scratch: Scratch, tests: Sequence[RecordedTest], tier: str, limit_secs: float) -> Verdict:
    """Run tests of a tier in their order until one fails, on the copy as it is.

    In parts, since most mutants fall to the first few tests, and collecting all takes longer than those.
    """
    start = time.monotonic()
    total = Verdict(False, "no test of this tier reaches it")
    for part in split_tests(tests):
        left_secs = start + limit_secs - time.monotonic()
        if left_secs <= 0:
            return replace(total, how=LIMIT)
        verdict = _run_part(scratch, part, tier, left_secs)
        total = replace(
            verdict,
            how=verdict.how if verdict.reached or verdict.killed else total.how,
            reached=total.reached + verdict.reached,
            ran=total.ran + verdict.ran,
            secs=round(time.monotonic() - start, 1),
            others=total.others + verdict.others,
            gone=total.gone + verdict.gone,
        )
        if verdict.killed or verdict.how == LIMIT:
            break
    return total


def split_tests(tests: Sequence[RecordedTest]) -> list[Sequence[RecordedTest]]:
    """The tests in parts, each much larger than the one before; groups stay together."""
    parts: list[Sequence[RecordedTest]] = []
    start = 0
    for size in (*_PART_SIZES, len(tests)):
        stop = min(start + size, len(tests))
        while stop < len(tests) and tests[stop].group and tests[stop].group == tests[stop - 1].group:
            stop += 1
        if stop > start:
            parts.append(tests[start:stop])
        start = stop
    return parts


def _run_part(scratch: Scratch, tests: Sequence[RecordedTest], tier: str, limit_secs: float) -> Verdict:
    listed, progress = scratch.root / "mutants-tests.json", scratch.root / "mutants-progress.jsonl"
    listed.write_text(json.dumps({test.name: test.secs for test in tests}))
    progress.unlink(missing_ok=True)
    files = sorted({test.name.partition("::")[0] for test in tests})
    files = [name for name in files if (scratch.root / name).is_file()]
    if not files:
        return Verdict(False, "no test of this tier reaches it", gone=len(tests))
    arguments = [f"--mutants-tests={listed}", f"--mutants-tier={tier}", f"--mutants-limit={limit_secs}"]
    ended, output = supervise_pytest(
        scratch, [*arguments, f"--mutants-progress={progress}", "-x", *files], progress
    )
    scratch.clean()
    return read_verdict(progress, ended, output)


def read_verdict(progress: Path, ended: dict[str, object], output: str) -> Verdict:
    """What the lines of progress, and the way in which pytest ended, say of a mutant."""
    lines = [json.loads(line) for line in progress.read_text().splitlines()] if progress.exists() else []
    counts = next((line for line in lines if "collected" in line), {})
    last = next((line["test"] for line in reversed(lines) if "test" in line), "")
    final = next((line for line in lines if "end" in line), {})
    so_far = Verdict(
        False,
        "all passed",
        reached=counts.get("collected", 0),
        ran=sum("within" in line for line in lines),
        others=counts.get("others", 0),
        gone=counts.get("gone", 0),
    )
    if final.get("end") == "failed":
        how = "at collection" if final["when"] == "collection" else "failure"
        return replace(so_far, killed=True, how=how, test=final["test"], message=final["message"])
    if ended["why"] in ("hung", "memory"):
        how = "hang" if ended["why"] == "hung" else "out of memory"
        return replace(so_far, killed=True, how=how, test=last)
    if not final:
        # Killed by a signal, by faulthandler, by os._exit, or not able to start.
        message = f"status {ended['status']}: {output[-400:]}"
        return replace(so_far, killed=True, how="crash", test=last, message=message)
    return replace(so_far, how=LIMIT if final["end"] == "limit" else so_far.how)


def try_mutant(
    scratch: Scratch, mutant: Mutant, tests: Sequence[RecordedTest], tiers: Sequence[str], limit_secs: float
) -> dict[str, Verdict]:
    """A verdict for each tier asked for. What the everyday tier kills, the full tier kills."""
    ordered = order_tests(tests)
    verdicts: dict[str, Verdict] = {}
    with scratch.changed(mutant.file, mutant.apply(mutant.text)):
        everyday = verdicts["everyday"] = run_tier(scratch, ordered, "everyday", limit_secs)
        if "full" in tiers:
            is_decided = everyday.killed or not everyday.others
            verdicts["full"] = everyday if is_decided else run_tier(scratch, ordered, "rest", limit_secs)
    return verdicts


def record(paths: Sequence[str], folder: Path, *, only_missing: bool) -> Path:
    """Record the suite, or the part of it under `paths`; returns the recording's folder."""
    known = ReachMap(folder).tests if only_missing else {}
    number = max((int(path.name) for path in folder.glob("[0-9]*")), default=0) + 1
    recording = folder / f"{number:03}"
    with make_scratch() as scratch:
        rows = begin_recording(recording, scratch.insert_probes(), known)
        (scratch.root / FILE).symlink_to(rows)
        chosen = list(paths) or ["tests", *(f"--ignore={path}" for path in LEFT_OUT)]
        for _ in range(_MAX_RESTARTS):
            progress = scratch.root / "mutants-progress.jsonl"
            progress.unlink(missing_ok=True)
            arguments = [f"--mutants-record={recording}", f"--mutants-progress={progress}", *chosen]
            ended, output = supervise_pytest(scratch, arguments, progress, show=True)
            if ended["why"] == "exited" and ended["status"] in (
                0,
                1,
                5,
            ):  # passed, failed, nothing left to run
                return recording
            if not _give_up(recording, progress):
                sys.exit(
                    f"scripts/mutants: pytest ended with {ended} before the first test.\n{output[-2000:]}"
                )
    return recording


def _give_up(recording: Path, progress: Path) -> bool:
    """Note the test that ended the run, so that the next one goes on behind it; False if there was none."""
    lines = [json.loads(line) for line in progress.read_text().splitlines()] if progress.exists() else []
    if not lines:
        return False
    lost = {
        "test": lines[-1]["test"],
        "rows": [],
        "pool_rows": [],
        "secs": 0.0,
        "group": "",
        "outcome": "lost",
    }
    with (recording / "tests.jsonl").open("a") as file:
        file.write(json.dumps(lost) + "\n")
    return True


def supervise_pytest(
    scratch: Scratch, arguments: Sequence[str], progress: Path, *, show: bool = False
) -> tuple[dict[str, object], str]:
    """Run pytest in the copy; returns how it ended, and its output."""
    pytest = [str(scratch.python), "-m", "pytest", "-p", "tests.mutants.plugin", "-p", "no:cacheprovider"]
    # Of a mutant's tests the output goes to a file: what is left behind would keep a pipe open.
    log = "" if show else str(scratch.root / "mutants-pytest.log")
    supervisor = [sys.executable, "-m", "tests.mutants.supervise", str(progress), str(_GRACE_SECS), log]
    process = subprocess.Popen(
        # The plugin chooses by the tiers itself, so nothing is left out before it.
        [*supervisor, *pytest, "-q", "-m", "full or not full", "--tb=short", "--no-header", *arguments],
        cwd=scratch.root,
        env=scratch.environment(),
        stdin=subprocess.PIPE,  # the supervisor ends all when this end is closed
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            said = process.stdout.read()
        except BaseException:
            process.terminate()
            raise
        finally:
            process.wait()
    ended = json.loads(said) if said.strip() else {"status": process.returncode, "why": "lost"}
    return ended, Path(log).read_text(errors="replace") if log else ""

"""Change weft's source in many small ways and see which tests notice. `scripts/mutants --help` says how."""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

from tests.mutants.catalogue import CatalogueError, Mutant, choose_mutants, read_catalogue
from tests.mutants.reached import ReachMap, Recording
from tests.mutants.running import Verdict, record, run_tier, try_mutant
from tests.mutants.scratch import ROOT, make_scratch
from tests.mutants.table import Results, make_table

FOLDER = ROOT / ".mutants"


def main() -> int:
    """Exit with 1 when a mutant survives that was tried, or when what killed one fails without it."""
    options = parse_options()
    if options.record is not None:
        FOLDER.mkdir(exist_ok=True)
        recording = record(options.record, FOLDER / "reach", only_missing=options.missing)
        say(f"recorded in {recording.relative_to(ROOT)}: {describe_recording(recording)}")
        return 0
    FOLDER.mkdir(exist_ok=True)
    results = Results(FOLDER / "results.json")
    mutants = choose(options)
    is_good = True
    if not (options.table or options.list):
        is_good = Run(mutants, results, options).run()
    if options.list:
        show_reach(mutants)
    else:
        text = make_table(mutants, results)
        print(text)
        if options.markdown:
            options.markdown.write_text(text)
    return 0 if is_good else 1


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/mutants",
        description="Change weft's source in many small ways, one at a time and in a copy, and see which of "
        "the tests that reach the change notice it. Results are kept in .mutants, so a run that was stopped "
        "goes on.",
    )
    add = parser.add_argument
    add("--record", nargs="*", metavar="PATH", help="first of all: record what each test (of PATH) reaches")
    add("--missing", action="store_true", help="with --record: only tests that no recording has")
    add("--only", nargs="+", default=[], metavar="NAME", help="mutants, or parts of weft: rpc, fsdp, ...")
    add("--tier", choices=("everyday", "full"), default="full", help="what tries to kill them (%(default)s)")
    add("--sample", type=int, metavar="N", help="N of them, drawn at random")
    add("--seed", type=int, default=0, help="of the sample (%(default)s)")
    add("--jobs", type=int, default=1, metavar="N", help="how many mutants at a time (%(default)s)")
    add("--limit", type=float, default=1200, metavar="SECS", help="a mutant's time in a tier (%(default)s)")
    add("--again", action="store_true", help="also those that have a result")
    add("--survivors", action="store_true", help="again, those that have survived")
    add("--table", action="store_true", help="try nothing: show what earlier runs have found")
    add("--list", action="store_true", help="try nothing: show the mutants and how many tests reach each")
    add("--markdown", type=Path, metavar="FILE", help="write the table to a file")
    return parser.parse_args()


def choose(options: argparse.Namespace) -> list[Mutant]:
    try:
        mutants = choose_mutants(read_catalogue(), options.only)
    except CatalogueError as error:
        sys.exit(f"scripts/mutants: {error}")
    if options.sample is not None:
        drawn = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
        mutants = [mutant for mutant in mutants if mutant in drawn]
    return mutants


class Run:
    """Tries mutants, as many at a time as there are jobs, each job in a copy of its own."""

    def __init__(self, mutants: Sequence[Mutant], results: Results, options: argparse.Namespace) -> None:
        self._results = results
        self._options = options
        self._tiers = ("everyday", "full") if options.tier == "full" else ("everyday",)
        self._reach = ReachMap(FOLDER / "reach")
        if not self._reach.tests:
            sys.exit("scripts/mutants: nothing is recorded yet. Run scripts/mutants --record first.")
        self._todo = [mutant for mutant in mutants if self._is_due(mutant)]
        self._tried: list[tuple[Mutant, dict[str, Verdict]]] = []
        self._lock = threading.Lock()
        self._is_stopped = threading.Event()
        self._num_gone = 0

    def _is_due(self, mutant: Mutant) -> bool:
        if mutant.needs_gpu:
            return False
        result = self._results.find(mutant)
        if result is None or self._options.again or not set(self._tiers) <= set(result.verdicts):
            return True
        return self._options.survivors and not all(v.killed for v in result.verdicts.values())

    def run(self) -> bool:
        """Whether all were killed, by tests that pass without them."""
        queue: SimpleQueue[Mutant] = SimpleQueue()
        for mutant in self._todo:
            queue.put(mutant)
        errors: list[BaseException] = []
        jobs = [
            threading.Thread(target=self._work, args=(queue, errors))
            for _ in range(min(self._options.jobs, len(self._todo)))
        ]
        for job in jobs:
            job.start()
        try:
            for job in jobs:
                job.join()
        finally:
            self._is_stopped.set()
        if errors:
            raise errors[0]
        if self._num_gone:
            say(f"up to {self._num_gone} tests were recorded and are not there any more: record again")
        is_confirmed = self._confirm()
        return is_confirmed and all(v.killed for _, verdicts in self._tried for v in verdicts.values())

    def _work(self, queue: SimpleQueue[Mutant], errors: list[BaseException]) -> None:
        try:
            with make_scratch() as scratch:
                while not self._is_stopped.is_set():
                    mutant = queue.get_nowait()
                    tests = self._reach.tests_reaching(mutant)
                    verdicts = try_mutant(scratch, mutant, tests, self._tiers, self._options.limit)
                    self._keep(mutant, verdicts)
        except Empty:
            pass
        except BaseException as error:
            errors.append(error)
            self._is_stopped.set()

    def _keep(self, mutant: Mutant, verdicts: dict[str, Verdict]) -> None:
        with self._lock:
            self._tried.append((mutant, verdicts))
            self._results.keep(mutant, verdicts, time.strftime("%Y-%m-%d", time.gmtime()))
            last = list(verdicts.values())[-1]
            secs = sum({id(verdict): verdict.secs for verdict in verdicts.values()}.values())
            self._num_gone = max(self._num_gone, last.gone)
            say(f"{len(self._tried)}/{len(self._todo)} {mutant.name}: {last}, {secs:.0f} s")

    def _confirm(self) -> bool:
        """Run the tests that killed something once more, on the tree as it is."""
        killers = {v.test for _, verdicts in self._tried for v in verdicts.values() if v.killed}
        tests = [test for name, test in self._reach.tests.items() if name in killers]
        if not tests:
            return True
        say(f"running the {len(tests)} tests that have killed a mutant on the unchanged tree")
        is_good = True
        with make_scratch() as scratch:
            while tests:
                verdict = run_tier(scratch, tests, "full", float("inf"))
                if not verdict.killed:
                    break
                is_good = False
                say(f"NOT A KILLER: {verdict.test} fails without a mutant, too: {verdict.message}")
                tests = [test for test in tests if test.name != verdict.test]
        return is_good


def show_reach(mutants: Sequence[Mutant]) -> None:
    reach = ReachMap(FOLDER / "reach")
    for mutant in mutants:
        tests = reach.tests_reaching(mutant)
        secs = sum(test.secs for test in tests)
        where = f"{mutant.file}:{mutant.line}"
        print(f"{mutant.name:55} {where:45} {len(tests):5} tests, {secs:6.0f} s")


def describe_recording(recording: Path) -> str:
    """How many tests there are, and which of them will kill nothing since they failed."""
    tests = Recording(recording).tests.values()
    outcomes = Counter(test.outcome for test in tests)
    failed = [test.name for test in tests if test.outcome in ("failed", "lost")]
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.most_common())
    return "\n  ".join([counts or "no tests", *failed])


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

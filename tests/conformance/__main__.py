"""Run torch's shipped tests and print the table. `scripts/conformance --help` says how."""

from __future__ import annotations

import argparse
import re
import sys

import torch

from tests.conformance.expectations import Expectations, read_expectations
from tests.conformance.runner import Outcome, Runner
from tests.conformance.source import list_cases
from tests.conformance.suites import SUITES, Suite

WORDS = {"passes": "passes", "fails": "fails", "skipped": "not run", "unable": "unable"}


def main() -> int:
    """Print a line for each test; exit with 1 if one came to something else than its list says."""
    options = parse_options()
    surprises: list[str] = []
    for name in options.suite or SUITES:
        surprises += run_suite(SUITES[name], options)
    for surprise in surprises:
        print(f"\n{surprise}")
    return 1 if surprises else 0


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/conformance", description="Run torch's own shipped tests with weft in torch's place."
    )
    parser.add_argument(
        "--suite", action="append", choices=sorted(SUITES), help="run this one (default: all)"
    )
    parser.add_argument("-k", default="", metavar="REGEX", help="run only tests whose name has a match")
    parser.add_argument(
        "--target",
        choices=("weft", "torch"),
        default="weft",
        help="torch: replace nothing, to see what torch itself passes here",
    )
    parser.add_argument("--quick", action="store_true", help="leave out what is listed as slow")
    parser.add_argument("--gpu", action="store_true", help="run only what needs a GPU")
    parser.add_argument("-v", action="store_true", help="print every rank's traceback of a test that fails")
    return parser.parse_args()


def run_suite(suite: Suite, options: argparse.Namespace) -> list[str]:
    """Run one suite and return what its list did not foresee."""
    expectations = read_expectations(suite)
    is_checked = options.target == "weft" and expectations.is_for(torch.__version__)
    cases = [case for case in list_cases(suite) if re.search(options.k, case.name)]
    cases = [case for case in cases if not (options.quick and case.name in expectations.slow)]
    cases = [case for case in cases if case.num_gpus or not options.gpu]
    width = max((len(case.name) for case in cases), default=0)
    counts = dict.fromkeys(WORDS, 0)
    surprises: list[str] = []
    print(f"{suite.name} on {options.target}, torch {torch.__version__}")
    with Runner(suite, options.target) as runner:
        for case in cases:
            outcome = runner.run(case, expectations.limit_secs(case.name))
            counts[outcome.status] += 1
            reason = describe(expectations, case.name, outcome) if is_checked else outcome.error
            print(f"{case.name:{width}}  {WORDS[outcome.status]:7}  {reason}".rstrip(), flush=True)
            if options.v and outcome.report:
                print(outcome.report)
            if is_checked and (surprise := expectations.surprise(case.name, outcome)):
                surprises.append(surprise)
    print(", ".join(f"{count} {WORDS[status]}" for status, count in counts.items()))
    return surprises


def describe(expectations: Expectations, test: str, outcome: Outcome) -> str:
    """Why it is so: the list's reason, or what was seen where the list does not speak of it."""
    if outcome.status != "unable" and expectations.surprise(test, outcome) is None:
        return expectations.expected(test).reason
    return outcome.error


if __name__ == "__main__":
    sys.exit(main())

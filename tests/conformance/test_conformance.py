"""torch's own shipped tests, run on weft: each passes, or stands in its suite's list with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.conformance.expectations import read_expectations
from tests.conformance.runner import Runner
from tests.conformance.source import Case, list_cases
from tests.conformance.suites import SUITES, Suite

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not all(read_expectations(suite).is_for(torch.__version__) for suite in SUITES.values()),
        reason="the lists are for the tests of another torch",
    ),
]


def quick_cases() -> list[Case]:
    cases = [case for suite in SUITES.values() for case in list_cases(suite)]
    return [case for case in cases if case.name not in read_expectations(case.suite).slow]


@pytest.fixture(scope="module")
def runners() -> Iterator[dict[str, Runner]]:
    made = {name: Runner(suite) for name, suite in SUITES.items()}
    yield made
    for runner in made.values():
        runner.close()


@pytest.mark.parametrize("case", quick_cases(), ids=lambda case: f"{case.suite.name}-{case.name}")
def test_case(case: Case, runners: dict[str, Runner]) -> None:
    expectations = read_expectations(case.suite)
    outcome = runners[case.suite.name].run(case, expectations.limit_secs(case.name))
    if outcome.status == "unable":
        pytest.skip(outcome.error)
    surprise = expectations.surprise(case.name, outcome)
    assert surprise is None, f"{surprise}\n{outcome.report}"


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_every_listed_test_exists(suite: Suite, runners: dict[str, Runner]) -> None:
    cases = list_cases(suite)
    expectations = read_expectations(suite)
    known = {case.name for case in cases}
    assert sorted({*expectations.listed, *expectations.slow} - known) == []
    # What was found by reading the file is there when it is run, so that no test is missed.
    assert sorted({case.test for case in cases} - set(runners[suite.name].list_tests())) == []

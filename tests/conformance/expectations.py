"""Which tests of a suite do not pass, and why: a TOML file, and the verdict on an outcome.

    torch = "2.13"             # the release whose tests these are

    [[fails]]                  # run, and expected to fail
    reason = "..."             # why weft does not do it, for a reader
    error = "..."              # what the failure says: failing for another reason is a surprise too
    tests = ["test_a"]
    secs = 5                   # after which it is ended, if it would wait for ever

    [[slow]]                   # run by scripts/conformance only
    reason = "..."
    tests = ["test_b"]

Everything else must pass. A test that torch itself skips is listed under `[[skipped]]`.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.conformance.runner import CASE_TIMEOUT_SECS, SLOW_CASE_TIMEOUT_SECS, Outcome
from tests.conformance.suites import Suite


@dataclass(frozen=True)
class Expectation:
    """What a listed test is expected to come to."""

    status: str
    reason: str
    error: str = ""
    secs: float = CASE_TIMEOUT_SECS


@dataclass(frozen=True)
class Expectations:
    """A suite's list. A test that is not `listed` passes."""

    torch: str
    listed: Mapping[str, Expectation]
    slow: Mapping[str, str]

    def is_for(self, torch_version: str) -> bool:
        """Whether it speaks of this release's tests."""
        return torch_version.startswith(f"{self.torch}.")

    def expected(self, test: str) -> Expectation:
        """What the test should come to."""
        return self.listed.get(test, Expectation("passes", ""))

    def limit_secs(self, test: str) -> float:
        """How long it may take."""
        return SLOW_CASE_TIMEOUT_SECS if test in self.slow else self.expected(test).secs

    def surprise(self, test: str, outcome: Outcome) -> str | None:
        """What is wrong with the list, or with weft, if the test came to this; None if it was to be so."""
        if outcome.status == "unable":
            return None
        expected = self.expected(test)
        if outcome.status != expected.status:
            because = f" (the list says: {expected.reason})" if expected.reason else ""
            return f"{test} {outcome.status}, but is expected as: {expected.status}{because}"
        if expected.error not in outcome.error:
            return f"{test} fails as it should, but not with {expected.error!r}: {outcome.error}"
        return None


@cache
def read_expectations(suite: Suite) -> Expectations:
    """Read and check a suite's file."""
    return parse_expectations(suite.expectations.read_text())


def parse_expectations(text: str) -> Expectations:
    """Read the text of such a file. Raises ValueError for one that says two things, or too little."""
    content: dict[str, Any] = tomllib.loads(text)
    listed: dict[str, Expectation] = {}
    slow: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for status in ("fails", "skipped"):
        for entry in content.get(status, []):
            if not entry["reason"] or not entry["tests"] or (status == "fails" and not entry["error"]):
                raise ValueError(f"[[{status}]] has an entry without reason, error or tests: {entry}")
            secs = float(entry.get("secs", CASE_TIMEOUT_SECS))
            expectation = Expectation(status, entry["reason"], entry.get("error", ""), secs)
            listed |= dict.fromkeys(entry["tests"], expectation)
            seen.update(entry["tests"])
    for entry in content.get("slow", []):
        slow |= dict.fromkeys(entry["tests"], entry["reason"])
    twice = [test for test, count in seen.items() if count > 1]
    if twice:
        raise ValueError(f"listed more than once: {', '.join(twice)}")
    return Expectations(content["torch"], listed, slow)

"""scripts/matrix: which versions and tests it takes, what it makes of pytest's report, and its table."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.repo.source import ROOT
from weft.torch_private import NEWEST, OLDEST


def load_script() -> ModuleType:
    # scripts/ is not a package, and scripts/matrix.py imports what lies beside it.
    spec = importlib.util.spec_from_file_location("matrix", ROOT / "scripts" / "matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        spec.loader.exec_module(module)
    return module


matrix = load_script()
Outcome, Row, Version = matrix.Outcome, matrix.Row, matrix.Version


def test_the_bounds_of_torch_are_the_same_everywhere() -> None:
    torches = matrix.supported_torches()
    assert (torches[0], torches[-1]) == (OLDEST, NEWEST)
    for page in ("README.md", "docs/versions.md", "docs/quickstart.md"):
        assert f"torch {OLDEST} to {NEWEST}" in (ROOT / page).read_text(), page


def test_the_releases_of_python_are_the_same_everywhere() -> None:
    pythons = matrix.supported_pythons()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"].startswith(f">={pythons[0]}")
    for page in ("README.md", "docs/versions.md", "docs/quickstart.md"):
        text = (ROOT / page).read_text().replace("\n", " ")
        assert f"Python {pythons[0]} to {pythons[-1]}" in text, page


def test_the_table_of_the_page_has_every_release() -> None:
    page = (ROOT / "docs" / "versions.md").read_text()
    for version in matrix.choose_versions(Namespace(torch=None, python=None)):
        row = rf"^\| torch {re.escape(version.torch)}\.\S*, Python {re.escape(version.python)}\.\d+ +\|"
        assert re.search(row, page, re.MULTILINE), version


@pytest.mark.parametrize("tier", matrix.TIERS)
def test_every_test_of_a_tier_is_there(tier: str) -> None:
    for pattern in matrix.TIERS[tier]:
        files = matrix.expand(pattern)
        assert files, pattern
        for file in files:
            path, _, test = str(file).partition("::")
            assert Path(path).exists(), pattern
            assert not test or f"def {test.partition('[')[0]}(" in Path(path).read_text(), pattern


def test_a_feature_is_in_the_tiers_by_its_marks() -> None:
    assert "tests/join" in matrix.FEATURES
    for tier in ("unit", "threads"):
        assert "tests/join/test_join.py" in matrix.find_tests(tier)
        assert matrix.MARKS[tier]


def test_rows_are_each_torch_and_each_python() -> None:
    torches, pythons = matrix.supported_torches(), matrix.supported_pythons()
    rows = matrix.choose_versions(Namespace(torch=None, python=None))
    assert [row.torch for row in rows if row.python == pythons[0]] == torches
    assert {row.python for row in rows} == set(pythons)
    assert len(rows) == len(torches) + len(pythons) - 1
    asked = matrix.choose_versions(Namespace(torch=["2.12", "2.15"], python=["3.12"]))
    assert asked == [Version("2.12", "3.12"), Version("2.15", "3.12")]


def test_an_environment_of_a_version_has_its_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matrix.interpreters, "3.12", "python3.12")
    environment = Version("2.15", "3.12").environment
    assert environment.where == ROOT / ".matrix" / "torch-2.15-python-3.12"
    assert environment.interpreter == "python3.12"
    replaced = sys.modules["environment"].replace_pins(
        "torch==2.13.0\ntorchlike==1\nsetuptools==84", environment.pins
    )
    assert replaced == "torchlike==1\ntorch==2.15.*\nsetuptools>=70\n"


@pytest.mark.parametrize(
    ("attributes", "said", "is_good"),
    [
        ('tests="1797" failures="0" errors="0" skipped="2"', "1,795 passed, 2 skipped", True),
        ('tests="10" failures="1" errors="2" skipped="3"', "3 failed, 4 passed, 3 skipped", False),
        ('tests="0" failures="0" errors="0" skipped="0"', "no tests", False),
        ('tests="2" failures="0" errors="0" skipped="2"', "2 skipped", False),
    ],
)
def test_counts_of_a_report(tmp_path: Path, attributes: str, said: str, is_good: bool) -> None:
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite {attributes}></testsuite></testsuites>")
    outcome = matrix.read_report(report, 12.34)
    assert (str(outcome), outcome.is_good, outcome.secs) == (said, is_good, 12.3)


@pytest.mark.parametrize("text", [None, "", "<testsuites>", "<testsuites></testsuites>"])
def test_a_run_without_a_report_is_no_success(tmp_path: Path, text: str | None) -> None:
    report = tmp_path / "report.xml"
    if text is not None:
        report.write_text(text)
    outcome = matrix.read_report(report, 1.0)
    assert (str(outcome), outcome.is_good) == ("no result", False)


def test_parts_of_a_tier_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "results.json")
    version = Version("2.15", "3.11")

    def keep(tier: str, outcome: Any) -> Any:
        matrix.keep_row(Row(version, "", {tier: outcome}))
        return matrix.read_rows()[0].cell("unit")

    assert str(keep("unit", Outcome(7, secs=1.0))) == "7 passed"
    keep("parity", Outcome(3))
    half = keep("unit 1/2", Outcome(4, secs=1.5))
    assert (str(half), half.is_good) == ("4 passed (1 of 2 parts)", False)
    both = keep("unit 2/2", Outcome(5, skipped=1, secs=2.0))
    assert (str(both), both.is_good, both.secs) == ("9 passed, 1 skipped", True, 3.5)
    assert str(keep("unit 1/2", Outcome(3, failed=1))) == "1 failed, 8 passed, 1 skipped"
    assert str(keep("unit", Outcome(9))) == "9 passed"
    assert str(matrix.read_rows()[0].cell("parity")) == "3 passed"
    assert matrix.read_rows()[0].cell("compile") is None


def test_a_cell_says_that_it_is_of_the_everyday_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "results.json")
    version = Version("2.15", "3.11")
    matrix.keep_row(
        Row(version, "", {"threads 1/2": Outcome(7, is_everyday=True), "threads 2/2": Outcome(3)})
    )
    assert str(matrix.read_rows()[0].cell("threads")) == "10 passed (everyday)"


def test_parts_are_all_of_a_tier() -> None:
    whole = matrix.find_tests("threads")
    parts = [matrix.find_tests(f"threads {part}/3") for part in (1, 2, 3)]
    assert sorted(test for part in parts for test in part) == sorted(whole)
    assert len(whole) > 100


def test_the_table_and_what_is_kept_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "RESULTS", tmp_path / "results.json")
    later = Row(Version("2.15", "3.11"), "torch 2.15.0, Python 3.11.7", {"unit": Outcome(5)})
    earlier = Row(Version("2.9", "3.11"), "", {"unit": Outcome(4, 1), "parity": Outcome(problem="no result")})
    for row in (later, earlier, later):
        matrix.keep_row(row)
    rows = matrix.read_rows()
    assert rows == [earlier, later]
    assert matrix.make_table(rows, ["unit", "parity"]) == (
        "| version                     | unit               | parity    |\n"
        "| --------------------------- | ------------------ | --------- |\n"
        "| torch 2.9, Python 3.11      | 1 failed, 4 passed | no result |\n"
        "| torch 2.15.0, Python 3.11.7 | 5 passed           |           |\n"
    )

"""The tiers of the tests: what is left out, what comes first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.source import ROOT
from tests.tiers import find_changed, how_near

TESTS = """
import pytest

def test_everyday(): pass

@pytest.mark.full
def test_long(): pass

@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_sizes(ranks): pass
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full: in the full tier only\n")
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    return tmp_path


def collect(suite: Path, *options: str) -> list[str]:
    """The ids that pytest would run, in order."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.tiers", "--collect-only", "-q", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_the_everyday_tier_leaves_out_what_is_marked(suite: Path) -> None:
    assert collect(suite, "test_a.py") == ["test_a.py::test_everyday", "test_a.py::test_sizes[2]"]


def test_the_full_tier_has_all(suite: Path) -> None:
    assert len(collect(suite, "--full")) == 4 * 4


@pytest.mark.parametrize("chosen", [["test_a.py::test_long"], ["test_a.py", "-m", "full", "-k", "long"]])
def test_what_is_named_runs_in_any_tier(suite: Path, chosen: list[str]) -> None:
    assert collect(suite, *chosen) == ["test_a.py::test_long"]


def test_random_order_repeats_with_its_seed_and_keeps_files_together(suite: Path) -> None:
    orders = [collect(suite, "--full", "--random-order", seed) for seed in ("1", "1", "2")]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])
    files = [node.partition("::")[0] for node in orders[0]]
    assert len([i for i in range(1, len(files)) if files[i] != files[i - 1]]) == 3


def test_a_revision_that_is_none_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match="no revision 'nowhere'"):
        find_changed("nowhere")


@pytest.mark.parametrize(
    ("test", "rank"),
    [
        ("tests/join/test_wire.py", 0),
        ("tests/join/test_other.py", 1),
        ("tests/fully_shard/test_hooks.py", 1),
        ("tests/rpc/test_calls.py", 2),
        ("tests/test_top.py", 2),
    ],
)
def test_tests_of_what_changed_are_near(test: str, rank: int) -> None:
    changed = {Path("tests/join/test_wire.py"), Path("src/weft/fsdp/state.py"), Path("docs/rpc.md")}
    assert how_near(Path(test), changed) == rank

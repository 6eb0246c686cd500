"""Which tests run, and in which order: the everyday tier, the full tier, what changed first, random order.

A test marked `full` runs in the full tier only (`--full`), or when it is named by its id or selected with
`-m`. The everyday tier is all others.

With `--full` the tests of what changed come first, so that a failure is seen in minutes: changed test files,
then folders of tests whose part of src/weft has changed, then the rest.

This is a plugin of pytest, loaded by tests/conftest.py.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterable, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Parts of src/weft whose tests lie in folders of other names, or in several.
FOLDERS = {
    "data_parallel": {"data_parallel", "data_parallel_rpc"},
    "dist_autograd": {"dist_autograd", "data_parallel_rpc"},
    "fsdp": {"fully_shard"},
    "launcher": {"launch"},
    "observe": {"report"},
    "planning": {"plan"},
    "rpc": {"rpc", "remote_module"},
    "training": {"train"},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("weft")
    group.addoption("--full", action="store_true", help="run the full tier; tests of what changed come first")
    group.addoption(
        "--since",
        metavar="REV",
        help="with --full: what changed since this revision, committed or not (default: where the branch "
        "left origin/main, or the last commit)",
    )
    group.addoption("--random-order", type=int, metavar="SEED", help="shuffle files, and the tests in each")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_full = config.getoption("--full")
    # Whoever names a test or a mark has chosen.
    if not is_full and not config.option.markexpr and not any("::" in arg for arg in config.args):
        left_out = [item for item in items if item.get_closest_marker("full")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker("full")]
    if is_full:
        changed = find_changed(config.getoption("--since"))
        items.sort(key=lambda item: how_near(item.path.relative_to(config.rootpath), changed))
    seed = config.getoption("--random-order")
    if seed is not None:
        items[:] = shuffle(items, seed)


def how_near(test_file: Path, changed: Set[Path]) -> int:
    """0 for a test file that changed, 1 for one whose folder tests a part of weft that changed, else 2."""
    if test_file in changed:
        return 0
    parts = {path.parts[2] for path in changed if path.parts[:2] == ("src", "weft")}
    folders = {folder for part in parts for folder in FOLDERS.get(part, {part})} | {
        path.parts[1] for path in changed if path.parts[0] == "tests" and len(path.parts) > 2
    }
    return 1 if len(test_file.parts) > 2 and test_file.parts[1] in folders else 2


def find_changed(since: str | None) -> set[Path]:
    """The files that differ from a revision, and those that git does not track yet. Empty without git."""
    try:
        if since is None:
            base = _git("merge-base", "HEAD", "origin/main")
            is_own_branch = base and base != _git("rev-parse", "HEAD")
            since = base[0] if is_own_branch else "HEAD~1"
        elif not _git("rev-parse", "--verify", f"{since}^{{commit}}"):
            raise pytest.UsageError(f"--since: git knows no revision '{since}'")
        names = _git("diff", "--name-only", since) + _git("ls-files", "--others", "--exclude-standard")
    except OSError:  # there is no git
        return set()
    return {Path(name) for name in names}


def _git(*arguments: str) -> list[str]:
    """The lines that git prints; none where it fails, as outside of a repository."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return [] if done.returncode else done.stdout.splitlines()


def shuffle(items: Iterable[pytest.Item], seed: int) -> list[pytest.Item]:
    """Shuffle files, and tests within a file: fixtures of a file are made once."""
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    random_order = random.Random(seed)
    files = list(by_file.values())
    random_order.shuffle(files)
    for tests in files:
        random_order.shuffle(tests)
    return [item for tests in files for item in tests]

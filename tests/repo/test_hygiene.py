"""The repository works anywhere: no path or package host of one machine in it, and its scripts run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.repo.source import ROOT

# Written so that this file does not match its own patterns.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:(?:home|Users)/\w|(?:root|work|opt)/)")
PACKAGE_HOST = re.compile(
    r"\b(?:pypi|pythonhosted|npmjs|anaconda)\.(?:org|com)\b|\bdownload\.pytorch\.org\b|--(?:extra-)?index-url|--find[-]links"
)

SCRIPTS = [
    "scripts/demo",
    "scripts/test",
    "scripts/check",
    "scripts/bench",
    "scripts/conformance",
    "scripts/matrix",
    "scripts/mutants",
    "scripts/nightly",
    "scripts/rpc_fuzz",
    "scripts/fence_fuzz",
    "scripts/store_fuzz",
    "scripts/file_fuzz",
    "scripts/docs",
    ".ci/run",
]


def find_machine_traces(path: str, text: str) -> list[str]:
    return [
        f"{path}:{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), start=1)
        if MACHINE_PATH.search(line) or PACKAGE_HOST.search(line)
    ]


def list_files() -> list[Path]:
    """List what git holds or would add: a trace should be found before it is committed."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    # A file may be deleted and not yet committed as such.
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_bears_a_trace_of_one_machine() -> None:
    files = list_files()
    assert ROOT / "pyproject.toml" in files
    traces: list[str] = []
    for path in files:
        traces += find_machine_traces(str(path.relative_to(ROOT)), path.read_text(errors="replace"))
    assert traces == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_executable_and_stop_at_the_first_error(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in path.read_text()
    subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.parametrize(
    "line",
    [
        "cd /home" + "/ann/weft",
        'path = "/Users' + '/ann"',
        "see /work" + "/main/x",
        "file:///opt" + "/wheels",
        "pip install --index" + "-url=x y",
        "https://pypi" + ".org/simple",
        "https://download.pytorch" + ".org/whl/cpu",
    ],
)
def test_a_trace_is_found(line: str) -> None:
    assert find_machine_traces("a", f"fine\n{line}\n") == [f"a:2: {line}"]


@pytest.mark.parametrize("line", ["docs/work/x", "/dev/shm", "~/work/x", "a/root/b", "/proc/self/home"])
def test_other_paths_pass(line: str) -> None:
    assert find_machine_traces("a", line) == []

"""Restricted environments: everyday work is right there, or one line says what to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.anywhere.confine import NO_PRIVILEGE
from tests.train.commands import REPO, environment

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent


def run_confined(
    confinement: Sequence[str], *options: str, home: str = "/nonexistent"
) -> subprocess.CompletedProcess[str]:
    """Run everyday work in an environment; skip where this process may not make one."""
    return run_program(confinement, [str(HERE / "everyday.py"), *options], {"HOME": home})


def run_program(
    confinement: Sequence[str], program: Sequence[str], variables: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    confine = [sys.executable, str(HERE / "confine.py"), *confinement, "--"]
    done = subprocess.run(
        [*confine, sys.executable, *program],
        env=environment(variables),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode == NO_PRIVILEGE:
        pytest.skip(done.stderr.strip())
    return done


@pytest.mark.full
@pytest.mark.parametrize(
    ("confinement", "ranks"),
    [
        pytest.param(["--deny", "process_vm_writev"], 2, id="writes denied"),
        pytest.param(["--deny", "process_vm_readv", "--deny", "process_vm_writev"], 2, id="no ptrace"),
        pytest.param(["--shm", "missing", "--network", "loopback"], 2, id="no shm, loopback only"),
        pytest.param(["--network", "ipv6"], 2, id="ipv6 only"),
        # As in containers that run under any number: the system has no name for this user.
        pytest.param(["--user", "12345", "--umask", "077", "--files", "64"], 4, id="nameless user, 64 files"),
        pytest.param(["--ignore", "SIGINT", "--ignore", "SIGHUP", "--closed", "0"], 2, id="nohup"),
    ],
)
def test_everyday_work_is_right(confinement: list[str], ranks: int) -> None:
    done = run_confined(confinement, "--ranks", str(ranks))
    assert (done.returncode, done.stdout) == (0, "right on weft\n"), done.stderr


def test_a_home_that_nobody_can_write_to(tmp_path: Path) -> None:
    """Also by root, whom permissions don't keep out."""
    home = str(tmp_path)
    done = run_confined(["--read-only", home, "--umask", "077"], home=home)
    assert (done.returncode, done.stdout) == (0, "right on weft\n"), done.stderr
    assert list(tmp_path.iterdir()) == []


SHOW = """
import os, signal
import tests.conftest
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)  # a hangup stays as it was asked for
print({"RANK", "WEFT_SECRET_FILE"}.isdisjoint(os.environ))
"""


def test_the_suite_runs_in_the_background_as_in_the_foreground() -> None:
    ignored = ["--ignore", "SIGINT", "--ignore", "SIGTERM", "--ignore", "SIGHUP", "--closed", "0"]
    variables = {"RANK": "1", "WEFT_SECRET_FILE": "/nonexistent"}
    done = run_program(ignored, ["-c", SHOW], variables, cwd=REPO)
    assert done.stdout.splitlines() == ["True"] * 4, done.stderr


def test_without_memfd_the_default_is_gloo_and_the_reason_is_given() -> None:
    done = run_confined(["--deny", "memfd_create"], "--without", "rpc")
    assert (done.returncode, done.stdout) == (0, "right on gloo\n"), done.stderr
    assert done.stderr.count("the local group (weft) can't run: it needs memfd_create") == 1


@pytest.mark.parametrize(
    ("confinement", "options", "told"),
    [
        (["--deny", "memfd_create"], ["--backend", "weft"], "Use backend 'gloo' here."),
        (["--network", "nothing"], [], "Bring it up (ip link set lo up), or use kind='thread'."),
    ],
)
def test_what_cannot_work_is_one_clear_line(confinement: list[str], options: list[str], told: str) -> None:
    done = run_confined(confinement, *options)
    assert done.returncode == 1
    assert done.stderr.startswith("ConfigError: ")
    assert done.stderr.endswith(f"{told}\n")
    assert done.stderr.count("\n") == 1

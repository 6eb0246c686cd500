"""launch(kind="process") when a rank raises, dies, hangs or is stopped, and when the launcher is killed.

And what is left of a process in which ranks were threads, and one raised.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import wait as wait_readable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from weft.errors import LaunchError, LaunchTimeoutError, PeerError
from weft.launcher import RankPool
from weft.testing.pool import shared_pool

pytestmark = pytest.mark.processes

REPO = Path(__file__).parents[2]


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """A pool to break, of two ranks or as many as asked. Whatever becomes of it, no process may be left."""
    pool = RankPool(getattr(request, "param", 2), grace=1.0)
    pids = pool.pids
    pool.run(is_gone, args=(0,))  # the ranks import this module, which the tests' timeouts must not count
    yield pool
    try:
        for pid in pids:
            assert is_gone(pid)
    finally:
        pool.kill()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def wait_forever() -> None:
    reader, _writer = os.pipe()
    os.read(reader, 1)


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("not for travelling")
        self.frame = sys._getframe()


@pytest.mark.parametrize("backend", ["weft", "gloo"])
def test_exception_ends_the_others_and_leaves_the_pool_usable(backend: str) -> None:
    def body():
        if dist.get_rank() == 1:
            raise KeyError("boom")
        dist.all_reduce(torch.ones(1))

    pool = shared_pool(2)
    with pytest.raises(LaunchError) as caught:
        pool.run(body, backend=backend, timeout=60)
    error = caught.value
    assert str(error).startswith("launch: rank 1 of 2 raised KeyError: 'boom'\n")
    assert repr(error.__cause__) == repr(KeyError("boom"))
    assert list(error.failures) == [1, 0]
    assert 'raise KeyError("boom")' in error.failures[1]
    assert "dist.all_reduce(torch.ones(1))" in error.failures[0]
    assert pool.is_usable
    assert pool.run(dist.get_rank) == [0, 1]


@pytest.mark.full
def test_exception_that_cannot_travel_becomes_its_text() -> None:
    def body():
        raise Unpicklable

    with pytest.raises(LaunchError, match=r"raised tests\.launch\.test_failures\.Unpicklable") as caught:
        shared_pool(2).run(body)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "Unpicklable: not for travelling" in str(caught.value.__cause__)


def test_killed_rank_leads_and_its_peers_errors_follow(pool: RankPool) -> None:
    def body():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(LaunchError) as caught:
        pool.run(body, timeout=60)
    assert str(caught.value).startswith("launch: rank 1 of 2 died: killed by SIGKILL\n")
    assert isinstance(caught.value.__cause__, PeerError)
    assert "PeerError" in caught.value.failures[0]
    assert not pool.is_usable


@pytest.mark.full
@pytest.mark.parametrize("pool", [1], indirect=True)
def test_exit_behind_pythons_back_is_a_death(pool: RankPool) -> None:
    with pytest.raises(LaunchError, match="died: exited with code 0"):
        pool.run(lambda: os._exit(0), timeout=60)


@pytest.mark.parametrize("pool", [1], indirect=True)
def test_crash_shows_where_it_happened(pool: RankPool) -> None:
    def crash_here():
        ctypes.string_at(0)

    with pytest.raises(LaunchError, match="rank 0 of 1 died: killed by SIGSEGV") as caught:
        pool.run(crash_here, timeout=60)
    assert "in crash_here\n    ctypes.string_at(0)" in caught.value.failures[0]


@pytest.mark.full
def test_rank_stuck_after_a_failure_is_shown_and_killed(pool: RankPool) -> None:
    def body():
        if dist.get_rank() == 0:
            raise ValueError("boom")
        wait_forever()

    started = time.monotonic()
    with pytest.raises(LaunchError, match="rank 0 of 2 raised ValueError: boom") as caught:
        pool.run(body, timeout=60)
    assert time.monotonic() - started < 30
    report = caught.value.failures[1]
    assert report.startswith("had not ended 1 seconds after the failure and had to be killed; last seen at:")
    assert "in wait_forever\n    os.read(reader, 1)" in report
    assert not pool.is_usable


def test_timeout_shows_unfinished_ranks_alone_even_in_a_native_call_that_holds_the_interpreter(
    pool: RankPool,
) -> None:
    def wait_in_c():
        # PyDLL keeps the interpreter lock; pause() returns when a signal has been handled.
        while True:
            ctypes.PyDLL(None).pause()

    def body():
        if dist.get_rank() == 1:
            wait_in_c()

    with pytest.raises(LaunchTimeoutError) as caught:
        pool.run(body, timeout=3)
    assert str(caught.value).startswith("launch: rank 1 of 2 had not finished after timeout=3 seconds")
    assert list(caught.value.failures) == [1]
    assert "in wait_in_c\n    ctypes.PyDLL(None).pause()" in caught.value.failures[1]


def test_stopped_rank_is_named_at_the_timeout(pool: RankPool) -> None:
    os.kill(pool.pids[1], signal.SIGSTOP)
    with pytest.raises(LaunchTimeoutError, match="ranks 0-1 of 2 had not finished") as caught:
        pool.run(lambda data: len(data), args=(b"x" * 10_000_000,), timeout=3, collective_timeout=60)
    assert "the process is stopped, by SIGSTOP or a debugger" in caught.value.failures[1]


def test_processes_that_a_rank_started_go_with_it(pool: RankPool, tmp_path: Path) -> None:
    def body():
        if dist.get_rank() == 1:
            grandchild = subprocess.Popen(["sleep", "1000"], close_fds=False)
            (tmp_path / "pid").write_text(str(grandchild.pid))
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(LaunchError, match="rank 1 of 2 died: killed by SIGKILL"):
        pool.run(body, timeout=60)
    wait_until_ended(
        [os.pidfd_open(pid) for pid in [int((tmp_path / "pid").read_text())] if not is_gone(pid)]
    )


def test_broken_shared_pool_is_replaced() -> None:
    broken = shared_pool(1)
    with pytest.raises(LaunchError):
        broken.run(lambda: os._exit(1))
    replacement = shared_pool(1)
    assert replacement is not broken
    assert replacement.run(dist.get_rank) == [0]
    os.kill(replacement.pids[0], signal.SIGKILL)
    os.waitid(os.P_PID, replacement.pids[0], os.WEXITED | os.WNOWAIT)
    assert shared_pool(1).run(dist.get_rank) == [0]


def test_ranks_that_cannot_start_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(LaunchError, match="could not start: exited with code 1"):
        RankPool(2)


LAUNCHER = """
import os, signal, subprocess, sys
import torch.distributed as dist
from weft.launcher import launch

def fork_worker():
    pid = os.fork()
    if pid == 0:
        reader, _writer = os.pipe()
        os.read(reader, 1)
    return pid

def body():
    pids = [None] * dist.get_world_size()
    mine = [os.getpid(), subprocess.Popen(["sleep", "1000"]).pid, fork_worker()]
    dist.all_gather_object(pids, mine)
    if dist.get_rank() == 0:
        print(*[pid for each in pids for pid in each], flush=True)
        if {interrupts_launcher}:
            os.kill(os.getppid(), signal.SIGINT)
    else:
        os.kill(os.getpid(), signal.SIGSTOP)
    reader, _writer = os.pipe()
    os.read(reader, 1)

launch(body, ranks=2)
"""


def start_launcher(*, interrupts_launcher: bool) -> subprocess.Popen[str]:
    """Start a launcher with one rank that waits forever, and one that is stopped."""
    script = LAUNCHER.format(interrupts_launcher=interrupts_launcher)
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(REPO / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until_ended(pidfds: list[int]) -> None:
    """Wait for processes that are not our children, by a descriptor that turns readable at their end."""
    for pidfd in pidfds:
        assert wait_readable([pidfd], 20), "a process was left behind"
        os.close(pidfd)


def test_ranks_and_the_processes_they_started_end_with_a_killed_launcher() -> None:
    with start_launcher(interrupts_launcher=False) as launcher:
        pidfds = [os.pidfd_open(int(pid)) for pid in launcher.stdout.readline().split()]
        assert len(pidfds) == 6  # two ranks, a program and a worker of each
        launcher.kill()
        wait_until_ended(pidfds)


def test_interrupt_of_the_launcher_ends_the_ranks() -> None:
    with start_launcher(interrupts_launcher=True) as launcher:
        pidfds = [os.pidfd_open(int(pid)) for pid in launcher.stdout.readline().split()]
        _, errors = launcher.communicate(timeout=60)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    wait_until_ended(pidfds)


# Rank 0 waits for rank 1 in a collective of gloo, which nothing but the end of rank 1's group can wake. The
# process exits with what torch and gloo have left: an abort there would be exit code 134.
FAILING_THREADS = """
import sys
import torch
import torch.distributed as dist
import weft

def fn():
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    dist.all_reduce(torch.ones(4))

try:
    weft.launch(fn, ranks=2, kind="thread", backend="gloo", grace=60)
except weft.LaunchError as error:
    assert "rank 1 of 2 raised ValueError: on purpose" in str(error)
    assert "rank 0 raised" in str(error), error
    sys.exit(1)
"""


@pytest.mark.full
@pytest.mark.parametrize("together", [2] * 5)
def test_after_a_failed_rank_the_process_exits_with_its_own_code(together: int) -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", FAILING_THREADS],
            env=os.environ | {"PYTHONPATH": str(REPO / "src"), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(together)
    ]
    for run in runs:
        _, stderr = run.communicate(timeout=120)
        assert run.returncode == 1, stderr
        assert stderr.count("\n") == 1, f"more than the line that names the backend: {stderr}"

"""Run a command, end it when it makes no progress, and leave no process of it behind, whatever it started.

The supervisor is a process of its own that the kernel makes the parent of orphans (PR_SET_CHILD_SUBREAPER),
so that daemons and ranks in groups of their own are still its descendants, and are killed at the end. It ends
them also when whoever started it is gone. Linux only.

    python -m tests.mutants.supervise PROGRESS GRACE_SECS LOG COMMAND...

PROGRESS is a file to which the command appends JSON lines. A line's "within" says after how many seconds
without another line the command hangs; "end" says that its verdict is known, and it has GRACE_SECS to exit.
What it prints goes to the file LOG, or to stderr where LOG is empty.
It is ended, too, when it takes more than a third of the machine's memory.
Prints one JSON line: {"status": the exit status, or null, "why": "exited", "hung", "memory" or "verdict"}.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_SECS = 0.25
_MEMORY_LOOK_SECS = 1.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MOST_BYTES = os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES // 3


class Supervised:
    """The command as its supervisor sees it."""

    def __init__(self, command: list[str], log: str) -> None:
        self._status: int | None = None
        self.has_exited = threading.Event()
        files: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        if log:
            files.append((os.POSIX_SPAWN_OPEN, 2, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))
        files.append((os.POSIX_SPAWN_DUP2, 2, 1))
        self._pid = os.posix_spawnp(command[0], command, os.environ, file_actions=files, setsid=True)
        self._reaper = threading.Thread(target=self._reap, daemon=True)
        self._reaper.start()

    @property
    def status(self) -> int | None:
        return self._status

    def _reap(self) -> None:
        """Collect every child that ends, adopted ones at once: tests wait for processes to be gone."""
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                return
            if pid == self._pid:
                self._status = os.waitstatus_to_exitcode(status)
                self.has_exited.set()

    def kill_all(self) -> None:
        """Kill what is left, until nothing is: a process may start another before its turn comes."""
        while self._reaper.is_alive():
            for pid in find_descendants(os.getpid()):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._reaper.join(_LOOK_SECS)


class Progress:
    """The file of progress: how long the command may be silent, and whether its verdict is known."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self._silent_at = time.monotonic() + 300.0  # until the first line: imports, collection
        self.is_decided = False

    def look(self) -> None:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return
        if len(text) == self._size or not text.endswith("\n"):
            return
        self._size = len(text)
        last = json.loads(text.splitlines()[-1])
        self.is_decided = "end" in last
        self._silent_at = time.monotonic() + last.get("within", 300.0)

    @property
    def is_silent(self) -> bool:
        return time.monotonic() > self._silent_at


def main() -> None:
    """Do what the module says, with the arguments of the command line."""
    progress_path, grace_secs, log, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER: adopting orphans failed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    supervised = Supervised(command, log)
    try:
        why = watch(supervised, Progress(Path(progress_path)), float(grace_secs))
        status = supervised.status
    finally:
        supervised.kill_all()
    print(json.dumps({"status": status, "why": why}), flush=True)


def watch(supervised: Supervised, progress: Progress, grace_secs: float) -> str:
    """Wait for the command to end, to hang, to eat the memory, or to linger after its verdict; say which."""
    decided_at = float("inf")
    weigh_at = 0.0
    while not supervised.has_exited.wait(_LOOK_SECS):
        # The other end of stdin is held by whoever started the supervisor, and says nothing.
        if select.select([sys.stdin], [], [], 0)[0]:
            sys.exit("the supervisor's starter is gone")
        progress.look()
        if progress.is_decided:
            decided_at = min(decided_at, time.monotonic())
            if time.monotonic() - decided_at > grace_secs:
                return "verdict"
        elif progress.is_silent:
            return "hung"
        if time.monotonic() > weigh_at:
            if count_own_bytes(find_descendants(os.getpid())) > MOST_BYTES:
                return "memory"
            weigh_at = time.monotonic() + _MEMORY_LOOK_SECS
    return "exited"


def find_descendants(root: int) -> list[int]:
    """The processes below one, by what /proc says now."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                stat = Path("/proc", entry, "stat").read_text()
                parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {root})


def count_own_bytes(pids: Sequence[int]) -> int:
    """The memory of processes that they share with no file and with nobody."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            _, resident, shared, *_ = map(int, Path("/proc", str(pid), "statm").read_text().split())
            total += (resident - shared) * _PAGE_BYTES
    return total


if __name__ == "__main__":
    main()

"""One process-rank as the launcher sees it: started, talked to, asked for its stack, killed.

The rank is a fresh interpreter and never a fork or a re-import of the user's main
module, so a script needs no `__main__` guard. Three channels join the two:

    control    a socket pair with wire.py's messages
    lifeline   a pipe that nobody writes to: when the launcher is gone, by whatever death,
               the kernel closes it and kills the rank and its children (see child.py)
    stacks     a pipe on which the rank's faulthandler writes
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait as wait_readable

from weft.launcher.stacks import DUMP_SIGNAL, format_dump
from weft.launcher.wire import Message, MessageReader, encode_message

_BOOTSTRAP = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from weft.launcher.child import main
main(sys.argv[1:])
"""
# How long a dump may take to begin, and the silence after which it counts as complete.
_DUMP_START_SECS = 2.0
_DUMP_QUIET_SECS = 0.1
# A killed process is gone in milliseconds, unless the kernel can't let go of it.
_KILL_SECS = 10.0
_READ_BYTES = 1 << 20

# How often ranks are looked at while they are silent: see wait_for_messages.
LOOK_SECS = 0.25


class RankProcess:
    """A running rank; `close` or `kill` must be called."""

    def __init__(self, rank: int, num_ranks: int, env: Mapping[str, str]) -> None:
        self.rank = rank
        self._reader = MessageReader()
        self._dump = bytearray()
        self.is_closed = False
        self.control, child_control = socket.socketpair()
        child_lifeline, self._lifeline = os.pipe()
        self.stacks, child_stacks = os.pipe()
        os.set_blocking(self.stacks, False)
        child_fds = (child_control.fileno(), child_lifeline, child_stacks)
        try:
            self._popen = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _BOOTSTRAP,
                    json.dumps(list(map(str, sys.path))),
                    str(rank),
                    str(num_ranks),
                    *map(str, child_fds),
                ],
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=child_fds,
                # Its own process group: Ctrl-C reaches the launcher alone, and a kill reaches the
                # processes that the rank has started too.
                process_group=0,
            )
        except BaseException:
            self._release()
            raise
        finally:
            child_control.close()
            os.close(child_lifeline)
            os.close(child_stacks)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def exit_code(self) -> int | None:
        """The exit code (minus the signal, as subprocess has it), or None while the rank lives."""
        was_alive = self._popen.returncode is None
        returncode = self._popen.poll()
        if was_alive and returncode is not None:
            self._kill_group()  # at once, while nothing else can have got the number
        return returncode

    def send(self, message: Message, within_secs: float | None) -> bool:
        """Send one message; False when the rank is gone or does not read within the time."""
        self.control.settimeout(within_secs)
        try:
            self.control.sendall(encode_message(message))
        except OSError:
            return False
        return True

    def receive(self) -> list[Message]:
        """All that the rank has said by now, without waiting; `is_closed` tells of the end."""
        self.control.settimeout(0.0)
        messages: list[Message] = []
        while not self.is_closed:
            try:
                received = self.control.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                received = b""
            self.is_closed = not received
            messages += self._reader.feed(received)
        return messages

    def wait_exit(self, within_secs: float) -> int | None:
        """Wait for the process to end; None when it has not."""
        try:
            self._popen.wait(within_secs)
        except subprocess.TimeoutExpired:
            return None
        self._kill_group()
        return self._popen.returncode

    def drain_stacks(self) -> bool:
        """Take over what the rank's faulthandler has written so far; whether there was anything."""
        num_before = len(self._dump)
        try:
            while part := os.read(self.stacks, _READ_BYTES):
                self._dump += part
        except BlockingIOError:
            pass
        return len(self._dump) > num_before

    def take_stacks(self) -> str:
        """The stacks written since the last call: those asked for, or the last one before a crash."""
        self.drain_stacks()
        dump = self._dump.decode(errors="replace")
        self._dump.clear()
        return format_dump(dump)

    def kill(self) -> None:
        """End the rank and the processes it started, whatever it is doing, and release what it held here."""
        self.signal_kill()
        if self._popen.returncode is None:
            # Not without limit: a process in an uninterruptible system call stays until that ends.
            self.wait_exit(_KILL_SECS)
        self._release()

    def signal_kill(self) -> None:
        """Begin to kill the rank, without waiting for its end."""
        if self._popen.returncode is None:
            self._kill_group()

    def hang_up(self) -> None:
        """Tell an idle rank to exit; `kill` must follow, once it had the time to."""
        self.control.close()

    def _kill_group(self) -> None:
        # Nobody may be left, which macOS says with the second.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def _release(self) -> None:
        self.control.close()
        for fd in (self._lifeline, self.stacks):
            if fd >= 0:
                os.close(fd)
        self._lifeline = self.stacks = -1


def wait_for_messages(processes: Sequence[RankProcess], within_secs: float) -> list[RankProcess]:
    """Wait until ranks have said something or have gone, and return them.

    A dead rank shows as the end of its stream, at once. Where processes that it started hold the stream
    open, it shows when it is looked at: after this wait.
    """
    ready = wait_readable([process.control for process in processes], within_secs)
    return [process for process in processes if process.control in ready or process.exit_code() is not None]


def fetch_stacks(processes: Sequence[RankProcess]) -> dict[int, str]:
    """Ask running ranks for their Python stacks, all at once; the text says so where none came."""
    for process in processes:
        process.take_stacks()  # so that what was there before is not taken for the answer
        os.kill(process.pid, DUMP_SIGNAL)
    _wait_for_dumps(processes)
    return {process.rank: process.take_stacks() or _describe_silence(process.pid) for process in processes}


def _wait_for_dumps(processes: Sequence[RankProcess]) -> None:
    """Wait until each rank has written something and then fallen silent, or has had its time."""
    waiting = {process.stacks: process for process in processes if not _is_stopped(process.pid)}
    give_up_at = time.monotonic() + _DUMP_START_SECS
    quiet_at = dict.fromkeys(waiting, give_up_at)
    while waiting:
        now = time.monotonic()
        waiting = {fd: process for fd, process in waiting.items() if quiet_at[fd] > now}
        if waiting:
            for fd in wait_readable(list(waiting), min(quiet_at[fd] for fd in waiting) - now):
                assert isinstance(fd, int)
                waiting[fd].drain_stacks()
                quiet_at[fd] = min(time.monotonic() + _DUMP_QUIET_SECS, give_up_at)


def _is_stopped(pid: int) -> bool:
    """Whether the process is stopped by a signal, as far as the system tells."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _describe_silence(pid: int) -> str:
    if _is_stopped(pid):
        return "  (no stack: the process is stopped, by SIGSTOP or a debugger)"
    return f"  (no stack: the process did not answer within {_DUMP_START_SECS:g} seconds)"

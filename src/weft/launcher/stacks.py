"""Where a rank was: Python stacks of threads of this process and of other processes.

Another process writes its stacks with faulthandler, from a signal handler that
runs even while its interpreter waits in a native call. That text lists innermost
frames first and has no source lines; here it becomes what a traceback looks like.
"""

from __future__ import annotations

import linecache
import re
import signal
import sys
import traceback
from dataclasses import dataclass
from types import FrameType

# A real-time signal where there is one: programs and debuggers leave those alone.
DUMP_SIGNAL: int = getattr(signal, "SIGRTMIN", signal.SIGUSR2) + (5 if hasattr(signal, "SIGRTMIN") else 0)

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) ")
_LAUNCHER_FILES = re.compile(r"[/\\]weft[/\\]launcher[/\\]\w+\.py$")


@dataclass(frozen=True)
class _Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        text = f'  File "{self.file}", line {self.line}, in {self.function}\n'
        return f"{text}    {source}\n" if source else text


def format_dump(dump: str) -> str:
    """Rewrite faulthandler's text: threads apart, innermost frame last, the launcher's frames left out.

    Text without any frame (a dump that was cut short) is returned as it came.
    """
    threads = [_without_launcher(frames) for frames in _parse_threads(dump)]
    # The rank's own thread is the one that began in the launcher; it is listed first, others are named.
    threads = [frames for frames in threads if frames]
    if not threads:
        return dump.strip()
    parts = ["".join(str(frame) for frame in frames) for frames in threads]
    return "another of its threads:\n".join(parts).rstrip()


def format_thread(thread_id: int) -> str:
    """The stack of a thread of this process; empty when it has ended."""
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return ""
    return "".join(traceback.format_list(_user_part(frame))).rstrip()


def _parse_threads(dump: str) -> list[list[_Frame]]:
    """One list a thread, outermost frame first; the thread that runs the job before all others."""
    threads: list[list[_Frame]] = []
    for line in dump.splitlines():
        match = _FRAME.match(line)
        if match and threads:
            threads[-1].insert(0, _Frame(match["file"], int(match["line"]), match["function"]))
        elif _THREAD.match(line) or "most recent call first" in line:
            threads.append([])
    return sorted(threads, key=lambda frames: not _is_rank_thread(frames))


def _is_rank_thread(frames: list[_Frame]) -> bool:
    return any(_LAUNCHER_FILES.search(frame.file) for frame in frames)


def _without_launcher(frames: list[_Frame]) -> list[_Frame]:
    """Cut the launcher's frames off the outer end: what called the user's function."""
    inner = [i for i, frame in enumerate(frames) if _LAUNCHER_FILES.search(frame.file)]
    if not inner:
        return frames
    first = inner[0]
    while first < len(frames) and _LAUNCHER_FILES.search(frames[first].file):
        first += 1
    return frames[first:] or frames


def _user_part(frame: FrameType) -> traceback.StackSummary:
    summary = traceback.extract_stack(frame)
    first = 0
    for i, entry in enumerate(summary):
        if _LAUNCHER_FILES.search(entry.filename):
            first = i + 1
        elif first:
            break
    return traceback.StackSummary.from_list(list(summary)[first:] or list(summary))

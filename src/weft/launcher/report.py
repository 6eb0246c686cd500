"""Turn what went wrong on each rank into one error. Pure: failures in, LaunchError out.

The headline names the cause: a rank that failed on its own comes before those
that failed because a peer was gone, and among equals the earliest comes first.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

import torch.distributed as dist

from weft.errors import LaunchError, LaunchTimeoutError, PeerError

# Modules whose frames stand between a rank's start and the user's function.
_CALLERS = ("weft.launcher.", "weft.testing.ranks")

E = TypeVar("E", bound=LaunchError)


@dataclass(frozen=True)
class RankFailure:
    """Why one rank gave no result.

    Both texts follow the words "rank N": `headline` is one line ("raised ValueError: boom"), `report`
    all there is to say ("raised:" and the traceback).
    """

    rank: int
    headline: str
    report: str
    at_secs: float
    exception: BaseException | None = None
    # The rank failed because another was gone, so it is not the one to look at.
    is_consequence: bool = False


def launch_error(failures: Sequence[RankFailure], num_ranks: int) -> LaunchError:
    """Build the error for a run in which ranks failed."""
    ordered = _cause_first(failures)
    headline = f"launch: rank {ordered[0].rank} of {num_ranks} {ordered[0].headline}"
    return _with_cause(LaunchError(_message(headline, ordered), _reports(ordered)), ordered)


def launch_timeout_error(
    failures: Sequence[RankFailure], num_ranks: int, timeout_secs: float
) -> LaunchTimeoutError:
    """Build the error for a run that went past its timeout; `failures` holds every unfinished rank."""
    ordered = sorted(failures, key=lambda failure: failure.rank)
    headline = (
        f"launch: {name_ranks([f.rank for f in ordered])} of {num_ranks} had not finished after "
        f"timeout={timeout_secs:g} seconds"
    )
    return _with_cause(LaunchTimeoutError(_message(headline, ordered), _reports(ordered)), ordered)


def exception_failure(rank: int, exception: BaseException, at_secs: float) -> RankFailure:
    """Describe an exception that left the launched function. Call it where the exception was caught."""
    return RankFailure(
        rank=rank,
        headline=f"raised {describe_exception(exception)}",
        report=f"raised:\n{_format(exception)}",
        at_secs=at_secs,
        exception=exception,
        is_consequence=is_consequence(exception),
    )


def describe_exception(exception: BaseException) -> str:
    """The exception's type and the first line of its text."""
    return "".join(traceback.format_exception_only(exception)).strip().partition("\n")[0]


def is_consequence(exception: BaseException) -> bool:
    """Whether an exception says that a peer was lost, so that the peer is the one to look at.

    gloo raises plain RuntimeErrors for that; its messages carry its source path.
    """
    if isinstance(exception, PeerError | dist.DistNetworkError | dist.DistBackendError):
        return True
    return type(exception) is RuntimeError and "gloo" in str(exception)


def stuck_failure(rank: int, what: str, stack: str) -> RankFailure:
    """Describe a rank that had to be left or killed where it was; never the cause where there is another."""
    return RankFailure(rank, what, f"{what}; last seen at:\n{stack}", time.monotonic(), is_consequence=True)


def describe_exit(returncode: int) -> str:
    """Say how a process ended, from subprocess's return code."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in few words: "rank 3", "ranks 0-2, 7"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    text = ", ".join("-".join(str(rank) for rank in span) for span in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _cause_first(failures: Sequence[RankFailure]) -> list[RankFailure]:
    return sorted(failures, key=lambda failure: (failure.is_consequence, failure.at_secs))


def _reports(ordered: Sequence[RankFailure]) -> dict[int, str]:
    return {failure.rank: failure.report.rstrip() for failure in ordered}


def _message(headline: str, ordered: Sequence[RankFailure]) -> str:
    """Put one paragraph a report under the headline; ranks with the very same report share one."""
    ranks_by_report: dict[str, list[int]] = {}
    for rank, report in _reports(ordered).items():
        ranks_by_report.setdefault(report, []).append(rank)
    paragraphs = [f"{name_ranks(ranks)} {report}" for report, ranks in ranks_by_report.items()]
    return "\n\n".join([headline, *paragraphs])


def _with_cause(error: E, ordered: Sequence[RankFailure]) -> E:
    error.__cause__ = next((f.exception for f in _cause_first(ordered) if f.exception is not None), None)
    return error


def _format(exception: BaseException) -> str:
    """Format a traceback without the frames that say nothing to the user.

    Those are the ones that called the function, and where a peer is to blame also the ones below the
    user's call: with many ranks they would bury the rank that matters.
    """
    formatted = traceback.TracebackException.from_exception(exception)
    frames = formatted.stack
    modules = [_module_name(frame) for frame, _ in traceback.walk_tb(exception.__traceback__)]
    start = next((i for i, name in enumerate(modules) if not name.startswith(_CALLERS)), 0)
    stop = len(frames)
    if is_consequence(exception):
        last_of_user = max((i for i, name in enumerate(modules) if not _is_library(name)), default=stop)
        stop = min(stop, last_of_user + 1)
    formatted.stack = traceback.StackSummary.from_list(list(frames[start:stop]))
    return "".join(formatted.format())


def _module_name(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def _is_library(module_name: str) -> bool:
    return module_name.partition(".")[0] in ("torch", "weft")

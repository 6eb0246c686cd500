"""The error of a failed launch says first what matters; stacks read like tracebacks."""

from __future__ import annotations

import faulthandler
import pickle
import tempfile
import threading

import pytest

from weft.errors import LaunchError, LaunchTimeoutError, PeerError
from weft.launcher.report import (
    RankFailure,
    describe_exit,
    exception_failure,
    is_consequence,
    launch_error,
    launch_timeout_error,
    name_ranks,
    stuck_failure,
)
from weft.launcher.stacks import format_dump, format_thread


def raised(rank: int, exception: Exception, at_secs: float) -> RankFailure:
    try:
        raise exception
    except Exception as caught:
        return exception_failure(rank, caught, at_secs)


def test_own_failure_leads_over_earlier_peer_errors() -> None:
    lost, bug = PeerError("rank 2 is gone", [2]), ValueError("boom")
    error = launch_error([raised(0, lost, at_secs=1.0), raised(2, bug, at_secs=2.0)], 3)
    assert str(error).startswith("launch: rank 2 of 3 raised ValueError: boom\n")
    assert error.__cause__ is bug
    assert list(error.failures) == [2, 0]
    assert "rank 2 is gone" in error.failures[0]
    assert "Traceback" in error.failures[2]


def test_death_leads_over_peer_errors_and_has_no_exception_of_its_own() -> None:
    lost = PeerError("rank 1 is gone", [1])
    death = RankFailure(1, "died: killed by SIGKILL", "died: killed by SIGKILL", at_secs=9.0)
    error = launch_error([raised(0, lost, at_secs=1.0), death], 2)
    assert str(error).startswith("launch: rank 1 of 2 died: killed by SIGKILL\n")
    assert error.__cause__ is lost


def test_the_earlier_of_two_own_failures_leads() -> None:
    error = launch_error([raised(0, KeyError("late"), 2.0), raised(1, KeyError("early"), 1.0)], 2)
    assert "rank 1 of 2 raised KeyError: 'early'" in str(error).splitlines()[0]


def test_ranks_with_one_report_share_a_paragraph() -> None:
    failures = [RankFailure(rank, "raised E", "raised:\nE", 1.0 + rank) for rank in (0, 1, 2, 5)]
    text = str(launch_error(failures, 6))
    assert text.count("raised:") == 1
    assert "ranks 0-2, 5 raised:" in text


def test_timeout_error_names_the_ranks_and_is_a_timeout() -> None:
    error = launch_timeout_error([stuck_failure(1, "had not finished", "  File here")], 2, 0.5)
    assert isinstance(error, TimeoutError)
    assert str(error).startswith("launch: rank 1 of 2 had not finished after timeout=0.5 seconds")
    assert "last seen at:\n  File here" in error.failures[1]


@pytest.mark.parametrize("kind", [LaunchError, LaunchTimeoutError])
def test_errors_survive_pickling(kind: type[LaunchError]) -> None:
    error = pickle.loads(pickle.dumps(kind("text", {1: "why"})))
    assert type(error) is kind
    assert (str(error), error.failures) == ("text", {1: "why"})


def test_gloo_errors_count_as_consequences() -> None:
    assert is_consequence(RuntimeError("[/third_party/gloo/pair.cc:1] Connection closed by peer"))
    assert not is_consequence(RuntimeError("boom"))


def test_exits_are_named() -> None:
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(-63) == "killed by signal 63"


def test_ranks_are_named_in_few_words() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([7, 0, 1, 2]) == "ranks 0-2, 7"
    assert name_ranks(range(64)) == "ranks 0-63"


def wait_here(started: threading.Event, event: threading.Event) -> None:
    started.set()
    event.wait()


def test_dumps_and_live_threads_show_source_lines_innermost_last() -> None:
    started, event = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_here, args=(started, event))
    thread.start()
    started.wait()
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        dump = format_dump(file.read().decode())
    live = format_thread(thread.ident or 0)
    event.set()
    thread.join()
    for text in (dump, live):
        assert "in wait_here\n    event.wait()\n" in text
    # Other tests may have left threads of torch's that wait as well: only this one's stack is looked at.
    own = next(stack for stack in dump.split("another of its threads:") if "in wait_here" in stack)
    assert own.index("in wait_here") < own.index("in wait\n")
    assert format_thread(thread.ident or 0) == ""


def test_dump_drops_what_called_the_user_and_puts_the_rank_before_other_threads() -> None:
    dump = """Thread 0x1 (most recent call first):
  File "other.py", line 1 in other

Current thread 0x2 (most recent call first):
  File "user.py", line 8 in inner
  File "user.py", line 9 in outer
  File "/x/weft/launcher/child.py", line 5 in serve
  File "<string>", line 5 in <module>
"""
    assert format_dump(dump) == (
        '  File "user.py", line 9, in outer\n  File "user.py", line 8, in inner\n'
        'another of its threads:\n  File "other.py", line 1, in other'
    )


def test_dump_that_was_cut_short_is_shown_as_it_came() -> None:
    assert format_dump("Fatal Python error: Segm") == "Fatal Python error: Segm"
    assert format_dump("") == ""

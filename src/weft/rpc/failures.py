"""Exceptions across the wire: they arrive as themselves, with the remote traceback as their cause.

An exception travels as its text, which always arrives, and as a pickle, which may not: its class may be
unknown here, or refuse to be built from what it was pickled with.
"""

from __future__ import annotations

import copy
import pickle
import traceback
from typing import Any, cast

from weft.rpc.fence import Fence
from weft.rpc.message_forms import check_failure
from weft.rpc.pickling import pickle_object, unpickle_object
from weft.rpc.workers import WorkerInfo

Failure = tuple[str, str, bytes | None]  # what it is, its traceback, its pickle


class RemoteTraceback(Exception):
    """Where an exception was raised on its worker: the cause of the one that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def fresh_copy(error: BaseException) -> BaseException:
    """An error like one that is kept, to be raised: what is raised holds the frames it passed, for good."""
    try:
        copied = copy.copy(error)
    except Exception:  # its class can't be built from what it holds
        return error.with_traceback(None)
    copied.__cause__ = error.__cause__
    return copied


def describe_failure(error: BaseException, worker: WorkerInfo, *, is_fenced: bool = False) -> Failure:
    """An exception as data. `is_fenced`: as in pickle_object."""
    frames = traceback.format_exception(type(error), error, error.__traceback__)
    headline = "".join(traceback.format_exception_only(error)).strip()  # whatever its __str__ does
    text = f"On {worker}:\n{headline}\n{''.join(frames)}"
    try:
        pickled = pickle_object(error, is_fenced=is_fenced)
        body = pickled.body if not pickled.tensors and not pickled.buffers else None
    except Exception:
        body = None
    return headline, text, body


def rebuild_failure(failure: object, fence: Fence | None) -> BaseException:
    """The exception, to be raised here.

    With a fence a peer can't end this worker by what it raises: anything but an Exception (SystemExit, say)
    becomes a RuntimeError.
    """
    check_failure(failure)
    headline, text, body = cast(Failure, failure)
    if body is None:
        error: BaseException = RuntimeError(f"{headline}\n(It could not be pickled.) {text}")
    else:
        try:
            unpickle = unpickle_object if fence is None else fence.unpickle
            error = cast(BaseException, unpickle(body, (), ()))
            if not isinstance(cast(Any, error), BaseException if fence is None else Exception):
                raise pickle.UnpicklingError(f"{type(error).__name__} is not an Exception")
        except Exception as problem:
            error = RuntimeError(
                f"Failed to create original exception type. Error msg was {problem} Original exception on "
                f"remote side was {headline}\n{text}"
            )
    error.__cause__ = RemoteTraceback(text)
    return error

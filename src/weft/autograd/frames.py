"""Functions that are called from outside, by autograd above all, and that Dynamo shall not compile.

A compiled function may run a backward: Dynamo leaves `loss.backward()` to autograd, but goes on to compile
every Python function that is called from there. weft's hooks are calls to other ranks, not something to
compile. Where a graph is traced *through* such a function (compiled autograd) nothing changes.

Private names of torch, used here and nowhere else: `torch._C._dynamo.eval_frame`'s
`set_code_exec_strategy`, `_FrameExecStrategy` and `_FrameAction`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])


def traced_inside_only(fn: F) -> F:
    """Let Dynamo run this function, and all that it calls, as it is. It costs nothing when it is called."""
    frames: Any = eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(fn.__code__, frames._FrameExecStrategy(skip, skip))  # type: ignore[attr-defined]
    return fn

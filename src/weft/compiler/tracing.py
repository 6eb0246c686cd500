"""Code that Dynamo traces, and what it may do while it traces.

Private names of torch, used here and nowhere else: `comptime` and `callback.callback_handler` of
`torch._dynamo`, `CompileContext` and `TracingContext` of `torch._guards`, compiled autograd's flag, and what
`torch.fx.traceback` puts on the nodes that are traced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

is_tracing = torch.compiler.is_compiling
F = TypeVar("F", bound=Callable[..., Any])
_LAST = 2**62


def at_trace(run: Callable[[Any], None]) -> None:
    """Call a function once, while this place is traced; it leaves nothing in the graph.

    It must be a function that existed before, and takes one argument (which says where the tracing is).
    """
    from torch._dynamo.comptime import comptime

    comptime(run)


_called_first: dict[Callable[[], None], Callable[..., None]] = {}


def call_before_traces(run: Callable[[], None]) -> bool:
    """Call a function before each trace from now on, on the thread that traces; whether it will be.

    Not where Dynamo isn't imported yet: it is by the first optimizer, at the latest by torch.compile.
    Harmless when called again, and needed after torch.compiler.reset(), which forgets such functions.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    from torch._dynamo.callback import callback_handler

    callback = _called_first.setdefault(run, lambda *_: run())
    if callback not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(callback)
    return True


def current_trace() -> object:
    """What tells one piece of traced code from another: behind a graph break comes another piece."""
    from torch._guards import CompileContext

    return CompileContext.current_compile_id()


def note_owner(number: int) -> None:
    """While code is traced: an owner's parameters shall be marked in the graph that comes of it."""
    owners_here().append(number)


def owners_here() -> list[int]:
    """The numbers of owners that were noted in the tracing, or compiling, under way."""
    context = _context()
    if context is None:
        return []
    return vars(context).setdefault("_weft_owners", [])


def is_backward_traced() -> bool:
    """Whether compiled autograd would trace a backward that began now."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.compiled_autograd_enabled)


def run_at_trace(method: F) -> F:
    """Let a method run while a call of it is traced, once, on the real object; what it reads gets no guards.

    As torch.compiler.assume_constant_result, which imports all of Dynamo.
    """
    method._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return method


def allow_in_graph(function: Callable[..., Any]) -> None:
    """Let graphs of Dynamo have calls of this function. Autograd looks into it, and so do compilers."""
    torch.compiler.allow_in_graph(function)


@contextmanager
def made_again_in_backward(is_wanted: bool) -> Generator[None]:
    """What is traced here is computed again in backward, not kept until then, if that is wanted."""
    from torch.fx import traceback
    from torch.utils.checkpoint import CheckpointPolicy

    # A mark of activation checkpointing, in a region that comes after all regions of the user's: so nothing
    # of theirs makes torch keep it.
    marks = {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": _LAST}
    meta = traceback.current_meta
    before = dict(meta)
    if is_wanted:
        meta.update(marks)
    try:
        yield
    finally:
        if is_wanted:
            meta.clear()
            meta.update(before)


def note_gathers() -> None:
    """While code is traced: the graph that comes of it gathers sharded parameters."""
    context = _context()
    if context is not None:
        vars(context)["_weft_gathers"] = True


def gathers_here() -> bool:
    """Whether that was noted in the tracing, or compiling, under way."""
    context = _context()
    return context is not None and "_weft_gathers" in vars(context)


def _context() -> Any:
    from torch._guards import TracingContext

    return TracingContext.try_get()

"""Code that Dynamo traces, and what it may do while it traces.

Private names of torch, used here and nowhere else: `torch._dynamo.comptime`,
`torch._guards.CompileContext` and `TracingContext`, and compiled autograd's flag.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

is_tracing = torch.compiler.is_compiling


def at_trace(run: Callable[[Any], None]) -> None:
    """Call a function once, while this place is traced; it leaves nothing in the graph.

    It must be a function that existed before, and takes one argument (which says where the tracing is).
    """
    from torch._dynamo.comptime import comptime

    comptime(run)


def current_trace() -> object:
    """What tells one piece of traced code from another: behind a graph break comes another piece."""
    from torch._guards import CompileContext

    return CompileContext.current_compile_id()


def note_owner(number: int) -> None:
    """While code is traced: an owner's parameters shall be marked in the graph that comes of it."""
    owners_here().append(number)


def owners_here() -> list[int]:
    """The numbers of owners that were noted in the tracing, or compiling, under way."""
    from torch._guards import TracingContext

    context: Any = TracingContext.try_get()
    if context is None:
        return []
    return vars(context).setdefault("_weft_owners", [])


def is_backward_traced() -> bool:
    """Whether compiled autograd would trace a backward that began now."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.compiled_autograd_enabled)

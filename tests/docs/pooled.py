"""Run what users run, examples and blocks of the documents, with ranks of the shared pools.

`weft.launch` starts fresh processes, which takes longer than what most of these scripts do. Here it takes
ranks that are there already, as long as the script asks for nothing but ranks; with further options, and
for threads, it is itself.
"""

from __future__ import annotations

import io
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.testing import shared_pool

_launch = weft.launch
TIMEOUT_SECS = 150


def run_script(path: Path, monkeypatch: pytest.MonkeyPatch, options: Sequence[str] = ()) -> str:
    """Run a script as `python PATH OPTIONS` does, and give what its ranks and it print."""
    on_ranks: list[str] = []

    def launch(
        fn: Callable[..., Any], *, ranks: int = 2, args: Sequence[Any] = (), **others: Any
    ) -> list[Any]:
        if others:
            return _launch(fn, ranks=ranks, args=args, **others)
        by_rank = shared_pool(ranks).run(_print_aside, args=(fn, tuple(args)), timeout=TIMEOUT_SECS)
        on_ranks.extend(printed for _, printed in by_rank)
        return [result for result, _ in by_rank]

    monkeypatch.setattr(weft, "launch", launch)
    monkeypatch.setattr(sys, "argv", [str(path), *options])
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    return "".join(on_ranks) + printed.getvalue()


def _print_aside(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, str]:
    with redirect_stdout(io.StringIO()) as printed:
        result = fn(*args)
    return result, printed.getvalue()

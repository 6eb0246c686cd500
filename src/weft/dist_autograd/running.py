"""Which part of a distributed backward the engine is at work on, asked by nodes and hooks.

On the CPU the engine works on the thread that called it. What runs on a GPU is run by a thread of the
engine's own, which serves all backwards of the process: there the backward's number tells.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd import Function

from weft.autograd import current_backward, run_first, traced_inside_only
from weft.errors import StateError

if TYPE_CHECKING:
    from weft.dist_autograd.run import Run

_OPENING_SECS = 10.0


class _Here(threading.local):
    run: Run | None = None


_here = _Here()
_opening = threading.Condition()
_by_backward: dict[int, Run] = {}
_unopened: set[Run] = set()


class _Open(Function):
    """A root of every backward that may use a GPU: tells its number."""

    @staticmethod
    def forward(ctx: Any, run: Run, anchor: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        return torch.zeros((), device="cpu")

    @staticmethod
    @traced_inside_only
    def backward(ctx: Any, *_: Any) -> Any:
        with _opening:
            _by_backward[cast(int, current_backward())] = ctx.run
            _unopened.discard(ctx.run)
            _opening.notify_all()
        return None, None


def current_run() -> Run | None:
    """The part that the engine is at work on, on this thread; None outside of distributed backwards."""
    if _here.run is not None:
        return _here.run
    number = current_backward()
    if number is None or not (_unopened or _by_backward):
        return None
    with _opening:
        _opening.wait_for(lambda: number in _by_backward or not _unopened, _OPENING_SECS)
        return _by_backward.get(number)


def need_run(what: str) -> Run:
    """The same; raises where there is none. `what` the backward came to, for the error."""
    run = current_run()
    if run is None:
        raise StateError(
            f"dist_autograd: backward came to {what}, which belongs to the graph of several workers. Use "
            "weft.dist_autograd.backward(context_id, [loss]) in place of loss.backward()."
        )
    return run


class at_work:
    """The engine works on a part, inside. Gives roots that it must have beside its own."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._uses_threads = torch.cuda.is_initialized()
        self._outer: Run | None = None

    def __enter__(self) -> list[torch.Tensor]:
        self._outer, _here.run = _here.run, self._run
        if not self._uses_threads:
            return []
        with _opening:
            _unopened.add(self._run)
        anchor = torch.zeros((), device="cpu", requires_grad=True)
        root = cast(torch.Tensor, _Open.apply(self._run, anchor))
        # Before all others, whatever number a new thread gives to its first node: a send that waits would
        # keep it from telling, and the nodes on the GPU from going on.
        run_first(root.grad_fn)
        return [root]

    def __exit__(self, *_: object) -> None:
        _here.run = self._outer
        if self._uses_threads:
            with _opening:
                _unopened.discard(self._run)
                for number in [number for number, other in _by_backward.items() if other is self._run]:
                    del _by_backward[number]
                _opening.notify_all()

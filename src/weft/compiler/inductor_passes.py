"""The pipeline as Inductor's pass objects. Imported only where Inductor is: it takes a second.

Private names of torch, used here and nowhere else: `torch._inductor.custom_graph_pass.CustomGraphPass`.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from weft.compiler.ops import owner_of
from weft.compiler.passes.mark_parameters import mark_noted
from weft.compiler.pipeline import fingerprint, run_passes
from weft.compiler.tracing import owners_here


class _After(CustomGraphPass):
    """Runs after the user's own passes, if there are any. Inductor pickles it, for its cache."""

    def __init__(self, users: Any) -> None:
        self._users = [] if users is None else list(users) if isinstance(users, list | tuple) else [users]

    def __call__(self, graph: fx.Graph) -> None:
        for run in self._users:
            run(graph)
        self._run(graph)

    def _run(self, graph: fx.Graph) -> None:
        raise NotImplementedError

    def uuid(self) -> Any:
        theirs = [getattr(run, "uuid", lambda: None)() for run in self._users]
        # The owners too: graphs of two modules of one kind are alike but for whose gradients they mark.
        wires = [owner_of(number).wire for number in owners_here()]
        return None if None in theirs else [fingerprint(), *wires, *theirs]


class MarkPass(_After):
    """Before autograd is traced: mark what the tracing under way has noted."""

    def _run(self, graph: fx.Graph) -> None:
        mark_noted(graph)


class PipelinePass(_After):
    """After Inductor's own passes over a graph: the pipeline."""

    def _run(self, graph: fx.Graph) -> None:
        run_passes(graph)

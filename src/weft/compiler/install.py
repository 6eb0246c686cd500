"""Where the pipeline is hooked into torch.compile: before Inductor traces autograd, and after its own passes.

Private names of torch, used here and nowhere else: Inductor's `config.pre_grad_custom_pass`,
`config.post_grad_custom_post_pass` and `CustomGraphPass`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from weft.compiler.ops import owner_of
from weft.compiler.passes.mark_parameters import mark_parameters
from weft.compiler.pipeline import fingerprint, run_passes
from weft.compiler.tracing import owners_here

_HOOKS = ("pre_grad_custom_pass", "post_grad_custom_post_pass")


def install() -> None:
    """Run the pipeline over every graph that Inductor compiles from now on. Harmless when called again."""
    from torch._inductor import config

    for name, run in zip(_HOOKS, (mark_in_pipeline, run_passes), strict=True):
        users = getattr(config, name)
        if not getattr(users, "_weft_is_installed", False):
            setattr(config, name, _make_pass(users, run))


def wires_here() -> list[str]:
    """How the gradients travel that the compiling under way is about."""
    return [owner_of(number).wire for number in owners_here()]


def mark_in_pipeline(graph: fx.Graph) -> None:
    """Mark what the tracing under way has noted."""
    mark_parameters(graph, owners_here())


def _make_pass(users: Any, run: Callable[[fx.Graph], object]) -> Any:
    """Inductor's pass object: the user's own first, if there are any, then ours."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    before = [] if users is None else list(users) if isinstance(users, list | tuple) else [users]

    class WeftPasses(CustomGraphPass):
        _weft_is_installed = True

        def __call__(self, graph: fx.Graph) -> None:
            for one in before:
                one(graph)
            run(graph)

        def uuid(self) -> Any:
            theirs = [getattr(one, "uuid", lambda: None)() for one in before]
            # The owners too: graphs of two modules of one kind are alike but for whose gradients they mark.
            return None if None in theirs else [fingerprint(), *wires_here(), *theirs]

    return WeftPasses()

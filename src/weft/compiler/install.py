"""Where the pipeline is hooked into torch.compile: after Inductor's own passes over a graph.

Private names of torch, used here and nowhere else: Inductor's `config.post_grad_custom_post_pass` and
`CustomGraphPass`.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from weft.compiler.pipeline import fingerprint, run_passes


def install() -> None:
    """Run the pipeline over every graph that Inductor compiles from now on. Harmless when called again."""
    from torch._inductor import config

    if getattr(config.post_grad_custom_post_pass, "_weft_is_installed", False):
        return
    config.post_grad_custom_post_pass = _make_pass(config.post_grad_custom_post_pass)


def _make_pass(users: Any) -> Any:
    """Inductor's pass object: the user's own first, if there are any, then the pipeline."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    mine = [] if users is None else list(users) if isinstance(users, list | tuple) else [users]

    class WeftPasses(CustomGraphPass):
        _weft_is_installed = True

        def __call__(self, graph: fx.Graph) -> None:
            for run in mine:
                run(graph)
            run_passes(graph)

        def uuid(self) -> Any:
            theirs = [getattr(run, "uuid", lambda: None)() for run in mine]
            return None if None in theirs else [fingerprint(), *theirs]

    return WeftPasses()

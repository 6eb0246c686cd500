"""`torch.compile(model, backend="weft")`: Inductor, or graphs run as they are, with the pipeline in force.

With Inductor the pipeline is in force for every compiled weft module anyway. This backend also runs the
passes where graphs are not compiled further (`engine="aot_eager"`): what they make can be seen and debugged
without Inductor.

Private names of torch, used here and nowhere else: `torch._dynamo.backends.common.aot_autograd`,
`torch._inductor.compile_fx.compile_fx` and `torch._functorch`'s `make_boxed_func`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from weft.compiler.install import install
from weft.compiler.passes.mark_parameters import mark_noted
from weft.compiler.pipeline import Work, run_passes
from weft.errors import ConfigError

ENGINES = ("inductor", "aot_eager")


def backend(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend. `options`: `engine` is "inductor" or "aot_eager"; all others are Inductor's."""
    theirs = dict(options or {})
    engine = theirs.pop("engine", "inductor")
    if engine not in ENGINES:
        raise ConfigError(f"backend 'weft': engine is one of {ENGINES}, got {engine!r}.")
    if engine == "aot_eager":
        if theirs or mode:
            given = sorted(theirs) + ([f"mode={mode}"] if mode else [])
            raise ConfigError(f"backend 'weft': engine 'aot_eager' takes no other options, got {given}.")
        return run_graphs(gm, inputs)
    from torch import _inductor
    from torch._inductor.compile_fx import compile_fx

    install()
    if mode and mode != "default":
        theirs = {**_inductor.list_mode_options(mode), **theirs}
    compiled: Any = compile_fx(gm, inputs, config_patches=theirs or None)  # type: ignore[arg-type]
    return compiled


def run_graphs(
    gm: fx.GraphModule, inputs: Sequence[Any], *, on_graph: Callable[[Work], None] | None = None
) -> Callable[..., Any]:
    """Trace autograd, take the graphs through the passes and run them as they are."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func

    def finish(graph_module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        work = run_passes(graph_module.graph)
        if on_graph is not None:
            on_graph(work)
        graph_module.recompile()
        return make_boxed_func(graph_module.forward)

    mark_noted(gm.graph)
    gm.recompile()
    return aot_autograd(fw_compiler=finish, bw_compiler=finish)(gm, inputs)

"""Backwards that are traced and compiled as they run: compiled autograd, with the pipeline in force.

Private names of torch, used here and nowhere else: `torch._dynamo.compiled_autograd._enable`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from weft.compiler.install import install
from weft.compiler.ops import live_owners


@contextmanager
def autograd(*, backend: str | Callable[..., Any] = "weft", **options: Any) -> Generator[None]:
    """Trace and compile the backwards of this block, also those of forwards that were not compiled.

    `backend` and the other options are those of torch.compile. Gradients of replicated modules are reduced in
    the graph.
    """
    from torch._dynamo import compiled_autograd

    from weft.compiler.backend import backend as weft_backend

    chosen = weft_backend if backend == "weft" else backend
    install()
    for owner in live_owners():
        owner.listen()

    def compile_backward(gm: fx.GraphModule) -> Any:
        return torch.compile(gm, backend=chosen, **options)

    with compiled_autograd._enable(compile_backward):
        yield

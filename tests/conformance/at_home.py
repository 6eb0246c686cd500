"""Implementations that never leave their rank: what passes on them proves nothing."""

from __future__ import annotations

from typing import Any

import torch


def call_here(to: object, function: Any, args: Any = (), kwargs: Any = None, timeout: float = -1.0) -> Any:
    """An rpc_sync that stays with the caller."""
    return function(*args, **(kwargs or {}))


def backward_here(context_id: int, roots: list[torch.Tensor], retain_graph: bool = False) -> None:
    """A backward that asks nobody."""
    torch.autograd.backward(roots, retain_graph=retain_graph)

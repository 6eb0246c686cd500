"""Communication hooks for tests. Without annotations: torch can't read those that are strings."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future


def future_of(value: Any) -> Future[Any]:
    """A future that is done."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def mean_hook(state, bucket):
    """What DDP does without a hook."""
    flat = bucket.buffer().div_(dist.get_world_size())

    def flat_again(future):
        future.value()  # raises what went wrong
        return flat  # what the future brings is, of complex numbers, a real view

    return dist.all_reduce(flat, async_op=True).get_future().then(flat_again)


def local_hook(state, bucket):
    """Reduces nothing."""
    return future_of(bucket.buffer())


def first_value(future: Future[Any]) -> torch.Tensor:
    value = future.value()
    return value[0] if isinstance(value, list) else value


def noting_hook(seen, bucket):
    """The mean, and a note of each bucket: its index, whether it is the last, its parameters."""
    seen.append((bucket.index(), bucket.is_last(), list(bucket.parameters())))
    return mean_hook(None, bucket)


def names_in(seen: list[tuple[int, bool, list[torch.Tensor]]], model: torch.nn.Module) -> list[list[str]]:
    """The names of each noted bucket's parameters, without `module.` in front."""
    names = {param: name.removeprefix("module.") for name, param in model.named_parameters()}
    # A parameter is found by identity: hashing it is that, and comparing it would compare values.
    return [[names[param] for param in params] for _, _, params in seen]

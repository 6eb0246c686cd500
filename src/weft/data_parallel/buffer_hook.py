"""Buffers that a hook of the user's keeps alike on all ranks, in place of a broadcast of the first rank's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import Enum, auto
from typing import Any, cast

import torch
from torch import nn
from torch.futures import Future

from weft.autograd import on_backward_end, unseen_by_autograd
from weft.errors import ConfigError, ConfigTypeError, RefusedError

BufferCommHook = Callable[[Any, dict[str, torch.Tensor]], Any]


class BufferCommHookLocation(Enum):
    """When a hook of buffers runs; torch's `_BufferCommHookLocation` is taken as well."""

    PRE_FORWARD = auto()
    POST_FORWARD = auto()


class BufferHook:
    """`hook(state, buffers by name)`: makes them alike, before it returns or when its futures are done."""

    def __init__(self, state: Any, hook: BufferCommHook, location: Any) -> None:
        if not callable(hook):
            raise RefusedError(
                f"hook must be callable, got {type(hook).__name__}. Give a function (state, buffers by name)."
            )
        names = [place.name for place in BufferCommHookLocation]
        if getattr(location, "name", None) not in names:
            raise ConfigError(f"comm_hook_location must be one of {names}, got {location!r}.")
        self._state = state
        self._hook = hook
        self._futures: list[Future[Any]] = []
        self.is_after_forward: bool = location.name == BufferCommHookLocation.POST_FORWARD.name

    @torch.no_grad()
    def run(self, module: nn.Module, ignored_names: Collection[str]) -> None:
        """Call the hook. What it starts is waited for at the end of backward, or by the next forward."""
        self.wait()
        buffers = {name: buffer for name, buffer in module.named_buffers() if name not in ignored_names}
        # A graph that is still to be run backward may hold a buffer, as in a broadcast.
        with unseen_by_autograd(buffers.values()):
            given = self._hook(self._state, buffers)
        if given is None:
            return
        # Those of c10d are no torch.futures.Future, but wait alike.
        if not isinstance(given, list | tuple) or not all(hasattr(future, "wait") for future in given):
            raise ConfigTypeError(
                "a hook of buffers returns None or a list of torch.futures.Future, got "
                f"{type(given).__name__}."
            )
        self._futures = list(cast("Iterable[Any]", given))

    def wait_at_backward_end(self) -> None:
        """Wait for the hook's futures when the backward under way has computed everything."""
        if self._futures:
            on_backward_end(self.wait)

    def wait(self) -> None:
        """Return when buffers are alike on all ranks. Raises what the hook's work has failed with."""
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()

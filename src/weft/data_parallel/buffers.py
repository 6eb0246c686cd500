"""Keep tensors alike on all ranks: broadcasts in flat messages, or a hook of the user's for buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import Enum, auto
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.futures import Future

from weft import comm
from weft.autograd import on_backward_end, unseen_by_autograd
from weft.comm.group import state_of
from weft.comm_hooks.mean import FEATURE
from weft.data_parallel.bucket_plan import MB
from weft.errors import ConfigError, ConfigTypeError, RefusedError
from weft.tensors import batch_by_dtype, copy_all

BufferCommHook = Callable[[Any, dict[str, torch.Tensor]], Any]


class BufferCommHookLocation(Enum):
    """When a buffer hook runs; torch's `_BufferCommHookLocation` is accepted as well."""

    PRE_FORWARD = auto()
    POST_FORWARD = auto()


class BufferHook:
    """`hook(state, buffers by name)` makes buffers alike by the time it returns or its futures are done."""

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
        """Call the hook. Its futures are waited for at the end of backward, or by the next forward."""
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
        """Wait for the hook's futures when the backward under way ends."""
        if self._futures:
            on_backward_end(self.wait)

    def wait(self) -> None:
        """Wait for the hook's futures. Raises what they have failed with."""
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()


BROADCAST_BYTES = 250 * MB


@torch.no_grad()
def broadcast_tensors(
    tensors: Iterable[torch.Tensor],
    src: int,
    group: ProcessGroup,
    label: str,
    limit_bytes: int = BROADCAST_BYTES,
) -> None:
    """Copy the values of rank `src` of the group to all ranks, in few flat messages."""
    root = state_of(group).ranks[src]
    is_root = state_of(group).rank == src
    for batch in batch_by_dtype((tensor.detach() for tensor in tensors), limit_bytes):
        if len(batch) == 1 and batch[0].is_contiguous():
            comm.broadcast(batch[0], root, group, feature=FEATURE, label=label).wait()
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in batch])
        comm.broadcast(flat, root, group, feature=FEATURE, label=label).wait()
        if not is_root:
            parts = flat.split([tensor.numel() for tensor in batch])
            copy_all(batch, [part.view(one.shape) for part, one in zip(parts, batch, strict=True)])

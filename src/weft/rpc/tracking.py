"""Where distributed autograd joins in.

A call that is made inside a context of distributed autograd carries the context's id. The tracker of the
worker that sends a message notes the tensors in it that need gradients, the tracker of the one that receives
it makes them the outputs of a node of its graph. This is all that RPC knows of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from weft.rpc.agent import Agent
    from weft.rpc.tensors import Route

Stub = tuple[int, tuple[int, ...]]  # the number of the cut, and which of the message's tensors it has


class Tracker(Protocol):
    """Follows the tensors of one worker's messages."""

    notices: Mapping[str, Callable[..., None]]  # what its peers tell it, by name; must not wait

    def on_call(self, context_id: int, route: Route) -> None:
        """Note a call in a context that sends nothing."""
        ...

    def on_send(
        self,
        context_id: int,
        tensors: Sequence[torch.Tensor],
        route: Route,
        *,
        is_given_up: bool = False,
    ) -> Stub | None:
        """Note what is about to be sent in a context. None where no tensor needs a gradient.

        `is_given_up`: nothing of Python's refers to them but the message.
        """
        ...

    def on_sent(self, context_id: int, stub: Stub) -> None:
        """It is on its way: what takes time is done now, while the peer is at work on it."""
        ...

    def on_withdraw(self, context_id: int, stub: Stub) -> None:
        """Forget it: the message was not sent."""
        ...

    def on_receive(
        self, context_id: int, stub: Stub | None, tensors: Sequence[torch.Tensor], route: Route
    ) -> Sequence[torch.Tensor]:
        """The tensors of a message, tied to the worker that sent them.

        Those of a stub come without need of gradients, and leave with it.
        """
        ...

    def is_open(self, context_id: int) -> bool:
        """Whether a message's context is, or can be, one of this worker's."""
        ...

    def on_lost(self, peer_id: int) -> None:
        """A worker is gone."""
        ...

    def debug_info(self) -> dict[str, str]:
        """Numbers for the curious."""
        ...

    def close(self) -> None:
        """This worker ends."""
        ...


class _Here(threading.local):
    context_id = 0  # of this thread; 0 for none


here = _Here()

# Set by distributed autograd.
make_tracker: Callable[[Agent], Tracker] | None = None
backward_in_context: Callable[[int, list[torch.Tensor], bool], Any] | None = None

"""Where the graph is cut: nodes at both ends of every message that carries tensors which need gradients.

    sender:    ... -> tensors -> Send          Send's token keeps the graph behind the tensors
    receiver:  Recv -> tensors -> ...          the tensors are Recv's outputs

In a backward Recv gives the gradients of its outputs away, to the sender. There the engine starts at the
tensors that were sent, with the gradients that arrived (starts.py). Where they are not there yet it starts at
Send, which waits for them and hands them on. Such ones have the lowest priority of all nodes, so autograd's
engine comes to one when nothing else is left to do, and to the latest send first: what waits for another
worker never keeps from it what that worker waits for, since whatever was sent later is done before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from weft.autograd import accumulation_node, run_soon, traced_inside_only
from weft.dist_autograd import running
from weft.errors import StateError
from weft.rpc.tensors import Route

# Makes outputs need gradients; what it gets itself nobody reads. On the CPU, whatever the default device: its
# node and those of tokens run on the thread that called backward.
_anchor = torch.zeros((), device="cpu", requires_grad=True)
_anchor_node = accumulation_node(_anchor)  # held, so that it is not made again by several threads at once
_one, _zero = torch.ones((), device="cpu"), torch.zeros((), device="cpu")


class _Send(Function):
    @staticmethod
    def forward(ctx: Any, number: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.number = number
        return torch.empty((), device="cpu")

    @staticmethod
    @traced_inside_only
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *running.need_run("a token of a send").take_arrived(ctx.number)


class _Recv(Function):
    @staticmethod
    def forward(ctx: Any, cut: RecvCut, anchor: torch.Tensor, tensors: list[torch.Tensor]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.cut = cut
        return tuple(tensors)

    @staticmethod
    @traced_inside_only
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        run = running.need_run(f"a tensor that came from worker '{ctx.cut.route.peer_name}'")
        ctx.cut.check_context(run.context.id)
        run.give_away(ctx.cut, grads)
        return None, None, None


class RecvCut:
    """The receiving end of a message: where the gradients go."""

    __slots__ = ("context_id", "number", "route")

    def __init__(self, context_id: int, number: int, route: Route) -> None:
        self.context_id = context_id
        self.number = number
        self.route = route  # the gradients' way back

    def check_context(self, context_id: int) -> None:
        """Raise where the tensors belong to another context than the backward."""
        if context_id != self.context_id:
            raise StateError(
                f"dist_autograd: a tensor of context {self.context_id} is in the graph of a backward of "
                f"context {context_id}. Detach it, or use both in one context."
            )


def cut_sent(number: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A token for tensors that are sent. It holds their graph as it is now."""
    return recorded(_cut_sent, number, tensors)


def _cut_sent(number: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    # A leaf's node is made under a lock of the leaf's, and for that torch may need the interpreter's. A
    # Function holds the latter when it asks for the node: where another thread makes it just then, both would
    # wait for ever. So the nodes are made before, by views, and held; sparse tensors have no views.
    views = [
        tensor.view_as(tensor) for tensor in tensors if tensor.is_leaf and tensor.layout is torch.strided
    ]
    token = _apply_send(number, *tensors)
    del views
    return token


def tie_received(cut: RecvCut, tensors: list[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Tensors that came in a message, as outputs of a node; and the node."""
    tied: tuple[torch.Tensor, ...] = recorded(_apply_recv, cut, _anchor, tensors)
    node = tied[0].grad_fn
    run_soon(node)  # another worker waits for what it gives away
    return tied, node


def recorded(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, with autograd recording its nodes."""
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        return function(*args)
    with torch.inference_mode(False), torch.enable_grad():
        return function(*args)


def root_gradient() -> torch.Tensor:
    """The gradient to start a token with."""
    return _one


def second_start() -> tuple[GradientEdge, torch.Tensor]:
    """Something to start at beside another: torch tells hooks that a start which is alone will not run."""
    return GradientEdge(_anchor_node, 0), _zero


def is_anchor(variable: torch.Tensor) -> bool:
    """Whether a leaf of the graph is weft's own."""
    return variable is _anchor


def cut_of(node: Any) -> RecvCut | None:
    """The cut that a node of the graph receives from, if it is one."""
    return node.cut if type(node) is _RECV_NODE else None


# Function.apply without its look for the transforms of functorch, which no message is part of.
_apply_send: Any = super(Function, _Send).apply  # type: ignore[attr-defined]
_apply_recv: Any = super(Function, _Recv).apply  # type: ignore[attr-defined]
_RECV_NODE: Any = _Recv._backward_cls  # type: ignore[attr-defined]
_SEND_NODE: Any = _Send._backward_cls  # type: ignore[attr-defined]
# As profiles and `grad_fn.name()` show them, under torch's names.
_RECV_NODE.__name__ = "torch::distributed::autograd::RecvRpcBackward"
_SEND_NODE.__name__ = "torch::distributed::autograd::SendRpcBackward"

"""The functions of distributed autograd."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.autograd.profiler import record_function

from weft.dist_autograd.context import DistAutogradContext
from weft.dist_autograd.tracker import GraphTracker, tracker_here
from weft.errors import ConfigTypeError, StateError, UnfitError
from weft.rpc import registry, tracking
from weft.rpc.tracking import here

__all__ = [
    "_current_context",
    "_get_debug_info",
    "_get_max_id",
    "_has_valid_context",
    "_init",
    "_is_valid_context",
    "_new_context",
    "_release_context",
    "_retrieve_context",
    "backward",
    "context",
    "get_gradients",
    "is_available",
]


class context:
    """A forward and its backwards over several workers: `with dist_autograd.context() as context_id: ...`.

    Calls that are made inside, by this thread and by what it calls, are part of it. It ends on every worker
    when the block does.
    """

    def __enter__(self) -> int:
        self._id = _new_context().id
        return self._id

    def __exit__(self, *_: object) -> None:
        _leave(self._id)


def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    *,
    gradients: Sequence[torch.Tensor | None] | None = None,
    exact: bool = False,
) -> None:
    """Compute the gradients of the roots for all leaves, on all workers that took part in making them.

    They go into the context: `get_gradients` on the worker that has the leaf. Several backwards add up.
    Returns when every worker is done.

    `gradients`: one for each root, for roots that are no scalars. By default every tensor that was sent
    between workers in this context is taken to get a gradient, which is so where all results are used; where
    one is not, backward waits for it and fails when the RPC timeout is over. `exact=True` finds out first,
    with a few more messages.

    Raises BackwardError, a RuntimeError, for what a worker's part raised; PeerError for a worker that is
    gone.
    """
    is_list = type(roots) is list or isinstance(roots, Sequence)  # pyright: ignore
    if not isinstance(context_id, int) or not is_list:  # pyright: ignore
        raise ConfigTypeError(
            "backward(): incompatible function arguments: it takes a context's id (int) and a list of "
            f"tensors, not {type(context_id).__name__} and {type(roots).__name__}."
        )
    tracker = _tracker()
    context = tracker.contexts.get(context_id)
    _check_roots(roots, gradients)
    starts = [None] * len(roots) if gradients is None else gradients
    run = partial(tracker.backward, context, roots, starts, retain_graph=retain_graph, is_exact=exact)
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        run()
        return
    with record_function("torch::distributed::autograd::backward"):
        run()


def _check_roots(roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None] | None) -> None:
    if not roots:
        raise UnfitError("No tensors provided for gradient computation.")
    if gradients is not None and len(gradients) != len(roots):
        raise UnfitError(
            f"backward: {len(gradients)} gradients for {len(roots)} roots; one for each is needed."
        )
    for place, root in enumerate(roots):
        gradient = None if gradients is None else gradients[place]
        if not isinstance(root, torch.Tensor):  # pyright: ignore
            raise ConfigTypeError(
                f"backward(): incompatible function arguments: root {place} is a {type(root).__name__}."
            )
        if not root.requires_grad:
            raise UnfitError(f"requires_grad not set on root {place}: it was not made from what needs one.")
        if gradient is None and root.numel() != 1:
            raise UnfitError(
                f"root {place}, of shape {list(root.shape)}, is not a scalar, all roots need to be scalar. "
                "Give gradients= for others."
            )
        if gradient is not None and not isinstance(gradient, torch.Tensor):  # pyright: ignore
            raise ConfigTypeError(
                f"backward(): incompatible function arguments: gradient {place} is a "
                f"{type(gradient).__name__}."
            )
        if gradient is not None and gradient.shape != root.shape:
            raise UnfitError(
                f"backward: the gradient of root {place} has shape {list(gradient.shape)}, the root "
                f"{list(root.shape)}."
            )
        if root.grad_fn is None:
            raise UnfitError(f"root {place} does not have a valid gradient function: it is a leaf.")


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients of this worker's leaves, by leaf, that backwards of a context have computed."""
    return dict(_tracker().contexts.get(context_id).grads)


def _tracker() -> GraphTracker:
    agent = registry.find_agent()
    if agent is None:
        raise StateError(
            "Need to initialize distributed autograd using torch.distributed.autograd.init(): call "
            "weft.rpc.init_rpc first."
        )
    return tracker_here(agent)


def is_available() -> bool:
    """Whether distributed autograd can be used. It always can."""
    return True


# Under torch's private names


def _new_context() -> DistAutogradContext:
    contexts = _tracker().contexts
    if here.context_id and contexts.find(here.context_id) is not None:
        raise StateError(f"Already have an autograd context id for this thread: {here.context_id}")
    made = contexts.new()
    here.context_id = made.id
    return made


def _release_context(context_id: int) -> None:
    _tracker().contexts.get(context_id)
    _leave(context_id)


def _leave(context_id: int) -> None:
    if here.context_id == context_id:
        here.context_id = 0
    agent = registry.find_agent()
    if agent is not None:  # else it has gone with its worker
        tracker_here(agent).end(context_id)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return _tracker().contexts.get(context_id)


def _current_context() -> DistAutogradContext:
    if not here.context_id:
        raise StateError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: `with "
            "weft.dist_autograd.context() as context_id` to generate a valid context"
        )
    return _tracker().contexts.get(here.context_id)


def _has_valid_context() -> bool:
    return bool(here.context_id)


def _is_valid_context(context_id: int) -> None:
    _tracker().contexts.get(context_id)


def _get_max_id() -> int:
    return _tracker().contexts.max_id


def _get_debug_info() -> dict[str, str]:
    return _tracker().debug_info()


def _init(worker_id: int) -> None:
    """torch's init_rpc calls this; weft's has done it."""


tracking.make_tracker = GraphTracker
tracking.backward_in_context = backward

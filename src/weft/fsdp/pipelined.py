"""What torch's pipeline schedules ask of a sharded stage: reduce once, behind the last microbatch.

They keep gradients from being reduced in the microbatches' backwards. Those of torch 2.15 then call
`finalize_backward`; older ones turn to the state that torch's own fully_shard would have left on the module,
and weft leaves this one there.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch

from weft.autograd import current_backward
from weft.errors import InternalError, StateError
from weft.fsdp.state import ModuleState


class StageState:
    """Stands for the state of torch's fully_shard, with the names that torch's schedules use."""

    def __init__(self, state: ModuleState) -> None:
        self._state = weakref.ref(state)  # whose module holds this

    @property
    def _state_ctx(self) -> Any:
        return SimpleNamespace(all_states=())  # of torch's there are none

    def _root_post_backward_final_callback(self) -> None:
        state = self._state()
        if state is None:
            raise InternalError("the state of a sharded stage was used after its module")
        reduce_kept(state)


class GradientReductionHandle:
    """What `finalize_backward(async_op=True)` returns: of a reduction that has ended by then."""

    def wait(self) -> None:
        """Return at once: gradients may be read."""


def set_finalized_by_call(root: ModuleState, enabled: bool) -> None:
    """Whether `finalize` ends a step's backwards. It changes outside of backward alone."""
    _check_root(root, "set_manual_backward_finalization")
    if enabled != root.is_finalized_by_call and current_backward() is not None:
        raise StateError(
            "set_manual_backward_finalization cannot change mode during backward: call it before forward."
        )
    root.is_finalized_by_call = enabled


def finalize(root: ModuleState) -> None:
    """End a step's backwards, where the caller said that it would: reduce what they have kept."""
    _check_root(root, "finalize_backward")
    if not root.is_finalized_by_call:
        raise StateError(
            "finalize_backward requires manual backward finalization. Call "
            "set_manual_backward_finalization(True) before forward."
        )
    if current_backward() is not None:
        raise StateError("finalize_backward must be called after backward completes, not in a hook of it.")
    if root.is_root is not None:  # before the first forward nothing is kept
        reduce_kept(root)


def _check_root(state: ModuleState, method: str) -> None:
    if state.is_root is False:
        raise StateError(
            f"{method} must be called on the root FSDP module, the one whose forward runs first."
        )


def reduce_kept(root: ModuleState) -> None:
    """Reduce, outside of any backward, what earlier backwards have added up on this rank."""
    tree = root.ready()
    with torch.enable_grad():
        # Reductions end with a backward: here an empty one.
        start = torch.zeros((), requires_grad=True) * 1.0
    start.register_hook(lambda _: tree.enter_backward())
    start.backward()

"""Uneven inputs: what ranks with inputs announce before a step, and what joined ranks do in it.

An active rank announces each step in one small all-reduce, from the first step that not all ranks make:
whether it reduces gradients, and whether it syncs buffers. A joined rank reads that and makes the same
collectives with nothing in them (`ReplicaJoinHook`). weft.join decides when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup, ReduceOp

from weft import comm
from weft.comm.group import state_of
from weft.comm_hooks.mean import FEATURE
from weft.data_parallel.flat_gradients import is_view_of_bucket
from weft.errors import StateError
from weft.join import JoinHook
from weft.tensors import grads_of, local_of

if TYPE_CHECKING:
    from weft.data_parallel.replica import Replica

_REDUCES_GRADS, _SYNCS_BUFFERS = 1, 2  # bits of an announcement


def announce_step(replica: Replica, num_active: int) -> int:
    """Set the divisor for this many active ranks, and tell joined ranks what comes.

    Returns the rank of the group whose buffers count in this step. Raises StateError for a hook of buffers.
    """
    if replica.buffer_hook is not None:
        raise StateError(
            "Join can't stand in for ranks without inputs in a hook of buffers. Leave the hook out, or "
            "sync buffers yourself after the loop."
        )
    group = replica.group
    by_initial_size = getattr(replica.owner, "_divide_by_initial_world_size", True)
    replica.reducer.find_divisor = group.size if by_initial_size else lambda: num_active
    if num_active == group.size():  # nobody has joined
        return 0
    bits = _REDUCES_GRADS * replica.wants_sync + _SYNCS_BUFFERS * replica.will_sync_buffers()
    source, _ = _find_last(True, group, replica.device, bits)
    return source


class ReplicaJoinHook(JoinHook):
    """Shadows the collectives of a replicated module's step."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._own_grads: SavedGradients | None = None

    def main_hook(self) -> None:
        """Take part in a step of the active ranks. Until `post_hook` the parameters have their gradients."""
        replica, reducer = self._replica, self._replica.reducer
        if self._own_grads is None:
            self._own_grads = SavedGradients(reducer.params)
        reducer.has_even_inputs = False
        source, bits = _find_last(False, replica.group, replica.device)
        if bits & _SYNCS_BUFFERS:
            replica.sync_buffers(source)
        reducer.forward_state.last_forward_synced = bool(bits & _REDUCES_GRADS)
        if bits & _REDUCES_GRADS:
            reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the final parameters and buffers of a rank that trained to the end."""
        replica = self._replica
        source, _ = _find_last(is_last_joiner, replica.group, replica.device)
        replica.broadcast_state(source, with_buffers=replica.options.forward_sync_buffers)
        if self._own_grads is not None:
            self._own_grads.restore()
            self._own_grads = None


class SavedGradients:
    """The gradients that parameters had when their rank joined."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self._grads = grads_of(params)
        # Those that lie in buckets are overwritten by the steps that follow.
        self._values = [
            local_of(grad).clone() if grad is not None and is_view_of_bucket(grad) else None
            for grad in self._grads
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Make them the parameters' gradients again: the next step is the rank's own."""
        for param, grad, value in zip(self._params, self._grads, self._values, strict=True):
            if grad is not None and value is not None:
                local_of(grad).copy_(value)
            param.grad = grad


def _find_last(
    is_candidate: bool, group: ProcessGroup, device: torch.device, bits: int = 0
) -> tuple[int, int]:
    """The highest rank of the group among the candidates (-1: none), and the largest `bits` of a rank."""
    found = torch.tensor([state_of(group).rank if is_candidate else -1, bits], device=device)
    comm.all_reduce(found, ReduceOp.MAX, group, feature=FEATURE).wait()
    rank, largest = found.tolist()
    return int(rank), int(largest)

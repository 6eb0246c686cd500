"""What a replicated module does for ranks that ran out of inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.data_parallel.flat_gradients import is_view_of_bucket
from weft.data_parallel.replica import Replica
from weft.join import JoinHook
from weft.tensors import grads_of, local_of


class ReplicaJoinHook(JoinHook):
    """Shadows the collectives of a replicated module's step."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._own_grads: OwnGradients | None = None

    def main_hook(self) -> None:
        """Take part in one step of the others. Until the end the parameters have the others' gradients."""
        if self._own_grads is None:
            self._own_grads = OwnGradients([member.param for member in self._replica.parts.members])
        self._replica.shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the final parameters and buffers of a rank that trained to the end."""
        self._replica.take_final_state(is_last_joiner)
        if self._own_grads is not None:
            self._own_grads.put_back()
            self._own_grads = None


class OwnGradients:
    """The gradients that parameters had when their rank joined."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self._grads = grads_of(params)
        # Buckets are used in the meantime.
        self._values = [
            local_of(grad).clone() if grad is not None and is_view_of_bucket(grad) else None
            for grad in self._grads
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give them back: the next step is the rank's own again."""
        for param, grad, value in zip(self._params, self._grads, self._values, strict=True):
            if grad is not None and value is not None:
                local_of(grad).copy_(value)
            param.grad = grad

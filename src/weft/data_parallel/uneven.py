"""What a replicated module does for ranks that ran out of inputs."""

from __future__ import annotations

from weft.data_parallel.replica import Replica
from weft.join import JoinHook


class ReplicaJoinHook(JoinHook):
    """Shadows the collectives of a replicated module's step."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def main_hook(self) -> None:
        """Take part in one step of the others."""
        self._replica.shadow_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the final parameters and buffers of a rank that trained to the end."""
        self._replica.take_final_state(is_last_joiner)

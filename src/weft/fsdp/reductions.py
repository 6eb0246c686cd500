"""The reductions under way in a backward, in the order in which they were launched.

One group's are under way at most: they have the time of a layer's backward to arrive, and memory for
gradients is given back as backward goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.comm.record import note

if TYPE_CHECKING:
    from weft.fsdp.group_gradients import GroupGradients
    from weft.fsdp.reduce import Reduction


class Reductions:
    """A queue of them, for all groups of a model."""

    def __init__(self) -> None:
        self._queue: list[tuple[GroupGradients, Reduction]] = []
        self.mean_scale = 1.0  # of gradients, where ranks have run out of inputs

    def make_room(self) -> None:
        """Another one is about to be launched. It may use the same buffers."""
        self.finish()

    def add(self, group: GroupGradients, reduction: Reduction) -> None:
        """One more was launched."""
        self._queue.append((group, reduction))

    def finish(self) -> None:
        """Wait for all of them."""
        for _, reduction in self._queue:
            reduction.start_replicas()
        while self._queue:
            self._finish_first()

    def drop(self) -> None:
        """Wait for all of them and forget what came of it."""
        queue, self._queue = self._queue, []
        for _, reduction in queue:
            reduction.drop()

    def _finish_first(self) -> None:
        group, reduction = self._queue.pop(0)
        reduction.finish(group, self.mean_scale)
        bytes_in, bytes_out = reduction.num_bytes
        ranks = group.data.shard_group or group.data.replicate_group
        note("reduce", "fsdp", group.name, ranks, bytes_in=bytes_in, bytes_out=bytes_out)

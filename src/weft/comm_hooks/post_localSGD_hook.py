"""Post-local SGD: means over all ranks at first, then over a few that are near each other, or none.

From the switch on something else must bring all ranks together now and then: a model
averager that runs after the optimizer's steps.

Ranks that share the shards of a module must stay together: there is one copy of it between them.
"""

from __future__ import annotations

import logging
import os
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.futures import Future

from weft.comm.group import resolve_group, state_of
from weft.comm_hooks.bucket import GradBucket
from weft.comm_hooks.default_hooks import allreduce_hook
from weft.comm_hooks.in_order import completed
from weft.comm_hooks.saved import GroupFreePickle
from weft.errors import UnsupportedError

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]

logger = logging.getLogger(__name__)


class PostLocalSGDState(GroupFreePickle):
    """Options of `post_localSGD_hook`, and how many steps it has seen.

    Gradients are averaged over `process_group` (None: the world) for `start_localSGD_iter` steps, and
    over `subgroup` (None: this host's ranks) after them; or not at all if
    `post_local_gradient_allreduce` is False. It pickles without its groups.
    """

    __slots__ = [  # noqa: RUF023  (in the order of the arguments)
        "process_group",
        "subgroup",
        "start_localSGD_iter",
        "post_local_gradient_allreduce",
        "iter",
    ]
    _groups: ClassVar[tuple[str, ...]] = ("process_group", "subgroup")

    def __init__(
        self,
        process_group: ProcessGroup | None,
        subgroup: ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to go on as if nothing had happened."""
        return {"iter": self.iter}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what was saved; groups and options stay as they were given."""
        self.iter = state_dict["iter"]

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step when its last bucket comes."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_localSGD_iter:
                logger.info("Gradients are averaged locally from now on, after %s steps.", self.iter)


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the bucket over the ranks that the state says at this step."""
    _check_sharers(state, bucket)
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return allreduce_hook(state.process_group, bucket)
    if not state.post_local_gradient_allreduce:
        return completed(bucket.buffer(), bucket.buffer())
    if state.subgroup is None:
        # All ranks come here at the same bucket of the same step, as making groups needs.
        subgroup, _ = dist.new_subgroups(group_size=_num_ranks_here())
        state.subgroup = resolve_group(subgroup)
        _check_sharers(state, bucket)
    return allreduce_hook(state.subgroup, bucket)


def _check_sharers(state: PostLocalSGDState, bucket: GradBucket) -> None:
    """Raise if a part of a sharded module would be averaged over some of its ranks only."""
    sharers = bucket.sharers() or ()
    if state.post_local_gradient_allreduce and state.subgroup is None:
        return  # to be made
    near = state_of(state.subgroup).ranks if state.post_local_gradient_allreduce and state.subgroup else ()
    if len(sharers) > 1 and not set(sharers) <= set(near):
        raise UnsupportedError(
            f"post_localSGD_hook: a module is sharded over ranks {list(sharers)}, which have one copy of it "
            f"together, and gradients would be averaged over {list(near) or 'no ranks'} after "
            f"{state.start_localSGD_iter} steps. Shard it over a mesh of two axes and give the group of its "
            "shard axis as `subgroup`, with post_local_gradient_allreduce=True."
        )


def _num_ranks_here() -> int:
    """How many ranks share a host: as torchrun says, else one a GPU, else all."""
    told = os.environ.get("LOCAL_WORLD_SIZE")
    if told is not None:
        return int(told)
    return torch.cuda.device_count() or dist.get_world_size()

"""A Joinable for tests: it all-reduces ones, so that its sums count the ranks that were active."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weft.join import Join, Joinable, JoinHook

BEFORE, AFTER = 41, 42


class OnesHook(JoinHook):
    """Shadows `num_allreduces` all-reduces a step; can hand a number around at the end."""

    def __init__(self, ones: Ones, num_allreduces: int, run_post_hooks: bool) -> None:
        self.ones = ones
        self.num_allreduces = num_allreduces
        self.run_post_hooks = run_post_hooks
        self.num_shadowed = 0

    def main_hook(self) -> None:
        for _ in range(self.num_allreduces):
            dist.all_reduce(torch.zeros(1))
        self.num_shadowed += 1

    def post_hook(self, is_last_joiner: bool) -> None:
        if not self.run_post_hooks:
            return
        self.ones.is_last_joiner = is_last_joiner
        candidate = torch.tensor([dist.get_rank() if is_last_joiner else -1])
        dist.all_reduce(candidate, op=dist.ReduceOp.MAX, group=self.ones.group)
        source = int(candidate.item())
        assert source >= 0
        if dist.get_rank() == source:
            self.ones.post_value = torch.tensor([AFTER])
        dist.broadcast(self.ones.post_value, src=source)


class Ones(Joinable):
    """All-reduces a one, some times a step, and returns the total."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = dist.group.WORLD if group is None else group
        self.post_value = torch.tensor([BEFORE])
        self.is_last_joiner: bool | None = None
        self.hook: OnesHook | None = None

    def __call__(self, num_allreduces: int = 1) -> float:
        Join.notify_join_context(self)
        total = 0.0
        for _ in range(num_allreduces):
            one = torch.ones(1)
            dist.all_reduce(one)
            total += one.item()
        return total

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.hook = OnesHook(self, kwargs.get("num_allreduces", 1), kwargs.get("run_post_hooks", False))
        return self.hook

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.group


def expected_total(num_steps: int, num_more: int = 1) -> int:
    """The sum over this rank's steps of the ranks that make them: rank r makes num_steps + r * num_more."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return size * num_steps + sum((size - joined) * num_more for joined in range(1, rank + 1))

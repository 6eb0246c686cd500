"""Run a sharded optimizer's step inside backward, behind the reduction of each bucket.

Wrap a gradient hook and register the result. When a bucket's mean is there, each rank
updates those of its parameters that it owns, and gives them to the others. The two
wrappers differ in when: `hook_with_zero_step` after the last bucket has been handed to
reduction, `hook_with_zero_step_interleaved` one bucket behind the gradients.

Everything is launched from the thread that runs backward, in the order of the buckets, so
that all ranks launch the same collectives in the same order, on any backend. Owners
belong to parameters and not to buckets, so it doesn't matter that DDP makes other
buckets after its first step.

All parameters must get gradients: one that no rank used would be updated with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.futures import Future

from weft.comm_hooks.bucket import GradBucket, GradHook
from weft.comm_hooks.hook_check import check_parameters
from weft.comm_hooks.mean import FEATURE, settle
from weft.errors import ConfigError


class ShardedOptimizer(Protocol):
    """What is needed of a ZeroRedundancyOptimizer."""

    @property
    def overlaps_with_ddp(self) -> bool:
        """Whether it was made for this."""
        ...

    def prepare_overlap(self, *, shard_buckets: bool) -> None:
        """Share out the parameters."""
        ...

    def step_bucket(self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        """Update this rank's of the parameters."""
        ...

    def launch_bucket_share(self, params: Sequence[torch.Tensor], feature: str) -> list[Future[Any]]:
        """Start giving the parameters, updated, to all ranks."""
        ...


@dataclass(frozen=True, slots=True)
class _Reducing:
    """A bucket whose mean is under way."""

    params: list[torch.Tensor]
    buffer: torch.Tensor
    grads: list[torch.Tensor]  # views of the buffer
    mean: Future[Any]


class _Stepper:
    """The buckets of one backward, and the parameters that are on their way."""

    def __init__(self, zero: ShardedOptimizer) -> None:
        self._zero = zero
        self._reducing: list[_Reducing] = []
        self._sharing: list[Future[Any]] = []

    def start(self, hook: GradHook, state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        """Hand the bucket to its hook."""
        if bucket.index() == 0:  # nothing is left but of a backward that failed
            self._reducing.clear()
            self._sharing.clear()
        # Taken now: the hook may put a compressed buffer in the bucket.
        params, buffer, grads = bucket.parameters(), bucket.buffer(), bucket.gradients()
        mean = hook(state, bucket)
        self._reducing.append(_Reducing(params, buffer, grads, mean))
        return mean

    def step_all_but(self, num_left: int) -> None:
        """Update the parameters of the oldest buckets, and start sharing them."""
        while len(self._reducing) > num_left:
            reducing = self._reducing.pop(0)
            mean = settle(reducing.mean.wait(), reducing.buffer)
            grads = reducing.grads if mean is reducing.buffer else [mean]
            self._zero.step_bucket(reducing.params, grads)
            self._sharing += self._zero.launch_bucket_share(reducing.params, FEATURE)

    def finish(self) -> None:
        """Have the parameters of all ranks in place."""
        self.step_all_but(0)
        for share in self._sharing:
            share.wait()
        self._sharing.clear()


def hook_with_zero_step(
    hook: GradHook, ddp: object, zero: ShardedOptimizer, shard_buckets: bool = False
) -> GradHook:
    """Let the hook's last bucket run the optimizer: backward's computation first, then the updates.

    `zero` was made with `overlap_with_ddp=True`. With `shard_buckets` ranks share the
    work of each bucket; without, most buckets have one owner, and fewer messages.
    """
    return _wrapped(hook, zero, shard_buckets, num_behind=None)


def hook_with_zero_step_interleaved(
    hook: GradHook, ddp: object, zero: ShardedOptimizer, shard_buckets: bool = False
) -> GradHook:
    """Let each bucket run the optimizer for the one before it: updates in between backward's computation.

    For where communication is fast compared with computation; see `hook_with_zero_step`.
    """
    return _wrapped(hook, zero, shard_buckets, num_behind=1)


def _wrapped(hook: GradHook, zero: ShardedOptimizer, shard_buckets: bool, num_behind: int | None) -> GradHook:
    if not zero.overlaps_with_ddp:
        raise ConfigError(
            "ZeroRedundancyOptimizer must be constructed with `overlap_with_ddp=True` to use this hook "
            "properly. Without it, call its step() after backward and register the hook as it is."
        )
    zero.prepare_overlap(shard_buckets=shard_buckets)
    stepper = _Stepper(zero)

    def hook_with_zero(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        check_parameters(bucket, "hook_with_zero_step")
        mean = stepper.start(hook, state, bucket)
        if bucket.is_last():
            stepper.finish()
        elif num_behind is not None:
            stepper.step_all_but(num_behind)
        return mean

    return _named_after(hook, hook_with_zero)


def _named_after(hook: GradHook, wrapper: Callable[..., Future[torch.Tensor]]) -> GradHook:
    wrapper.__name__ = f"{getattr(hook, '__name__', 'hook')}_with_zero_step"
    return wrapper

"""Buckets made by hand, the same on every rank up to the rank's numbers, and their exact means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.comm_hooks import GradBucket

Shapes = Sequence[tuple[int, ...]]

SHAPES: Shapes = [(40, 20), (7,), (33, 65), (1,), (), (3, 5, 7)]


def numbers(rank: int, numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A rank's flat gradients: of differing size, some of them zero."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    wide = torch.randn(numel, generator=generator, dtype=torch.float64) * 1e-3 * (1 + rank)
    wide[:: 17 + rank] = 0.0
    return wide.to(dtype)


def parameters(shapes: Shapes) -> list[torch.Tensor]:
    return [torch.empty(shape) for shape in shapes]


def make_bucket(
    shapes: Shapes = SHAPES,
    *,
    index: int = 0,
    is_last: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> GradBucket:
    """This rank's bucket."""
    params = parameters(shapes)
    flat = numbers(dist.get_rank(), sum(param.numel() for param in params), seed, dtype)
    return GradBucket(index, flat, params, is_last=is_last)


def every_rank(shapes: Shapes = SHAPES, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What each rank's bucket holds, as rows in float64."""
    numel = sum(param.numel() for param in parameters(shapes))
    ranks = range(dist.get_world_size())
    return torch.stack([numbers(rank, numel, seed, dtype).double() for rank in ranks])


def exact_mean(shapes: Shapes = SHAPES, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return every_rank(shapes, seed=seed, dtype=dtype).mean(0)


def run(hook: Any, state: Any, bucket: GradBucket) -> torch.Tensor:
    """What the hook's future brings."""
    value = hook(state, bucket).wait()
    return value if isinstance(value, torch.Tensor) else value[0]


def assert_ranks_agree(tensor: torch.Tensor) -> None:
    """To the bit."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    for rank, other in enumerate(gathered):
        assert torch.equal(other.nan_to_num(), tensor.nan_to_num()), f"rank {rank} has another result"
        assert torch.equal(other.isnan(), tensor.isnan()), f"rank {rank} has another result"


def assert_within(seen: torch.Tensor, right: torch.Tensor, bound: torch.Tensor) -> None:
    """Every number is at most its bound away from the right one."""
    apart = (seen.double() - right).abs()
    worst = (apart - bound).max().item()
    assert worst <= 0, f"{(apart > bound).sum()} numbers are past their bounds, by {worst:.3g} at most"

"""Low-rank factors of gradients: which tensors are worth it, and the arithmetic. No communication here.

A matrix M of n rows and m columns is carried as P (n by r) and Q (m by r), M ~ P Qᵀ,
with P's columns orthonormal. Where P and Q of all matrices lie in flat memory is the plan's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Factor:
    """Matrices of one shape that are worked on together, and where their factors lie."""

    members: tuple[int, ...]  # places in the bucket's list of gradients
    num_rows: int
    num_columns: int
    rank: int
    p_start: int  # in the memory of all Ps
    q_start: int

    @property
    def p_shape(self) -> tuple[int, int, int]:
        """Of its P's."""
        return len(self.members), self.num_rows, self.rank

    @property
    def q_shape(self) -> tuple[int, int, int]:
        """Of its Q's."""
        return len(self.members), self.num_columns, self.rank


@dataclass(frozen=True, slots=True)
class LowRankPlan:
    """What becomes of each gradient of a bucket."""

    factors: tuple[Factor, ...]
    plain: tuple[int, ...]  # gradients that travel as they are
    plain_numel: int
    p_numel: int
    q_numel: int
    numel_before: int

    @property
    def numel_after(self) -> int:
        """How many numbers are sent in place of `numel_before`."""
        return self.plain_numel + self.p_numel + self.q_numel


def plan_low_rank(
    shapes: Sequence[torch.Size], rank: int, min_rate: float, *, batches_shapes: bool
) -> LowRankPlan:
    """Factor a gradient if that makes it more than `min_rate` times smaller.

    A gradient counts as a matrix of its first dim by all others. With `batches_shapes` those of one
    shape are one Factor. Factors of one shape follow each other in any case.
    """
    by_shape: dict[tuple[int, int], list[int]] = {}
    plain: list[int] = []
    for place, shape in enumerate(shapes):
        n, m = matrix_shape(shape)
        r = min(n, m, rank)
        if r and (n + m) * r * min_rate < n * m:
            by_shape.setdefault((n, m), []).append(place)
        else:
            plain.append(place)
    factors: list[Factor] = []
    p_numel = q_numel = 0
    for (n, m), places in by_shape.items():
        r = min(n, m, rank)
        for members in [places] if batches_shapes else [[place] for place in places]:
            factors.append(Factor(tuple(members), n, m, r, p_numel, q_numel))
            p_numel += len(members) * n * r
            q_numel += len(members) * m * r
    return LowRankPlan(
        tuple(factors),
        tuple(plain),
        sum(math.prod(shapes[place]) for place in plain),
        p_numel,
        q_numel,
        sum(math.prod(shape) for shape in shapes),
    )


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """A gradient's first dim, and all others in one."""
    rows = shape[0] if shape else 1
    return rows, math.prod(shape) // rows if rows else 0


def orthonormalize(matrices: torch.Tensor, epsilon: float = 0.0) -> None:
    """Make the columns of each matrix (3D: which, row, column) orthonormal, in place.

    A column of zeros stays one: there is no direction in it. One that depends on those before it
    becomes any direction that is orthogonal to them. 16-bit matrices are worked on in float32.
    """
    if matrices.dtype in (torch.float16, torch.bfloat16):
        wide = matrices.float()
        orthonormalize(wide, epsilon)
        matrices.copy_(wide)
    elif matrices.shape[2] > 2:
        # Faster for many columns, and it has no trouble with zeros.
        matrices.copy_(torch.linalg.qr(matrices).Q)
    else:
        _orthonormalize_by_columns(matrices, epsilon)


def _orthonormalize_by_columns(matrices: torch.Tensor, epsilon: float) -> None:
    for at in range(matrices.shape[2]):
        before, column = matrices[:, :, :at], matrices[:, :, at : at + 1]
        # Twice: of a column that depends on those before it only rounding errors are left, in any direction.
        for _ in range(2):
            column.sub_(before @ (before.transpose(1, 2) @ column))
            length = torch.linalg.vector_norm(column, dim=1, keepdim=True) + epsilon
            column.div_(length.masked_fill_(length == 0, 1.0))


def keep_directions(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The new Q (3D), but the old one's columns where the new ones hold no direction.

    A gradient that is zero, or not finite, for one step would else be so for ever: P is made from Q.
    """
    points_somewhere = (new != 0).any(dim=1, keepdim=True) & new.isfinite().all(dim=1, keepdim=True)
    return torch.where(points_somewhere, new, old)


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Write left @ right (3D). On the CPU 16-bit matrices go through float32: other kernels fail at some."""
    if left.device.type == "cpu" and left.dtype in (torch.float16, torch.bfloat16):
        out.copy_(torch.bmm(left.float(), right.float()))
    else:
        torch.bmm(left, right, out=out)

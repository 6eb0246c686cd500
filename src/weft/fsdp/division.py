"""How a sum of gradients becomes their mean: which operator, and what is divided by hand. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.distributed import ReduceOp


@dataclass(frozen=True, slots=True)
class Division:
    """The operator of the collectives, and divisors before and after them."""

    averages: bool
    before: float = 1.0
    after: float = 1.0

    @property
    def op(self) -> ReduceOp.RedOpType:
        """For the collectives."""
        return ReduceOp.AVG if self.averages else ReduceOp.SUM


def plan_division(
    dtype: torch.dtype, num_ranks: int, factor: float | None = None, *, sums_only: bool = False
) -> Division:
    """The mean over `num_ranks`, or the sum over `factor`.

    Half precision is divided by about the square root before and after: its sums run over, and numbers
    divided by all at once vanish.
    """
    divisor = float(num_ranks if factor is None else factor)
    if dtype is torch.float16:
        before = 2.0 ** round(math.log2(divisor) / 2) if divisor > 1 else 1.0
        return Division(averages=False, before=before, after=divisor / before)
    if factor is None and not sums_only:
        return Division(averages=True)
    return Division(averages=False, after=divisor)

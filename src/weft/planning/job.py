"""What is to be planned: a model with a batch of one rank, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from weft.training.strategies import TpPlan


@dataclass(frozen=True)
class Job:
    """A model and what it is trained with.

    `inputs` and `targets` are an example batch, sequences along dim 0; plans cut or repeat it to the batch
    of a rank. `loss(outputs, targets)` is a mean. `tp_plan` says how layers are split, for the strategies
    that split them.
    """

    model: nn.Module
    inputs: torch.Tensor
    targets: torch.Tensor
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    tp_plan: TpPlan | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = AdamW


def with_rows(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The batch with as many rows, taken from it over and over."""
    times = -(-num_rows // len(tensor))
    return tensor.repeat(times, *[1] * (tensor.dim() - 1))[:num_rows]

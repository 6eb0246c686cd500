"""Models with something that a compiler or a reducer may stumble over."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.compiler.pairs import WIDTH, filled, make_rows


def linears(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


class Checkpointed(nn.Module):
    """Its middle runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)

    def forward(self, x: Tensor) -> Tensor:
        first, middle, last = self.layers
        return last(checkpoint(lambda y: torch.tanh(middle(y)), torch.tanh(first(x)), use_reentrant=False))


class Tied(nn.Module):
    """One weight under two names, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = linears(2)
        self.leave.weight = self.enter.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(x)))


class Broken(nn.Module):
    """Not one graph: Dynamo has to leave in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)

    def forward(self, x: Tensor) -> Tensor:
        first, middle, last = self.layers
        x = torch.tanh(first(x))
        torch._dynamo.graph_break()
        return last(torch.tanh(middle(x)))


class Branches(nn.Module):
    """Uses the branches that `names` says."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "abc"})

    def forward(self, x: Tensor, names: str) -> Tensor:
        x = torch.tanh(self.trunk(x))
        return sum((self.branches[name](x) for name in names), start=x)


class ManyDtypes(nn.Module):
    """A layer in each of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.middle, self.narrow = linears(3)
        self.wide.double()
        self.middle.float()
        self.narrow.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.wide(x))
        x = torch.tanh(self.middle(x.float()))
        return self.narrow(x.bfloat16()).double()


def many_dtypes() -> nn.Module:
    model: Any = ManyDtypes()
    for seed, layer in enumerate((model.wide, model.middle, model.narrow)):
        filled(layer, seed, layer.weight.dtype)
    return model


class Conv(nn.Module):
    """A convolution whose weight is channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x)).mean((2, 3)))


def conv() -> nn.Module:
    return filled(Conv()).to(memory_format=torch.channels_last)


def image_loss(model: Any, salt: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    rows = make_rows(rank, salt, 2, 3 * 5 * 5).view(2, 3, 5, 5)
    return model(rows.to(memory_format=torch.channels_last)).square().mean()


def normed() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)]
    return filled(nn.Sequential(*layers))


def frozen() -> nn.Module:
    """The middle layer, and the first one's bias, are not trained."""
    model = filled(nn.Sequential(*linears(3)))
    model[1].requires_grad_(False)
    model[0].bias.requires_grad_(False)
    return model


def branches() -> nn.Module:
    return filled(Branches())


def tied() -> nn.Module:
    return filled(Tied())


def broken() -> nn.Module:
    return filled(Broken())


def checkpointed() -> nn.Module:
    return filled(Checkpointed())

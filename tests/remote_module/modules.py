"""The modules that workers make, and what is asked of them there."""

from __future__ import annotations

import os
import signal
import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from weft import RemoteModule, rpc
from weft.rpc import RRef

WIDTH = 3


class Net(nn.Module):
    """Parameters, a buffer and a mode that shows in the output."""

    def __init__(self, width: int = WIDTH, scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        nn.init.constant_(self.linear.weight, 0.5 * scale)
        nn.init.constant_(self.linear.bias, 0.25)

    def forward(self, rows: Tensor) -> Tensor:
        return self.norm(self.linear(rows))


class Peeking(Net):
    """Notes when its property runs."""

    seen: ClassVar[list[str]] = []

    @property
    def peeked(self) -> nn.Module:
        self.seen.append("the property ran")
        return self.linear


def strides_of(rref: RRef[Tensor]) -> tuple[int, ...]:
    return rref.local_value().stride()


class Echo(nn.Module):
    """Gives back what it was called with, and the modes it was called in."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return {"args": args, "kwargs": kwargs, "grad": torch.is_grad_enabled()}


class Moody(nn.Module):
    """Fails as it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        if error is not None:
            raise error

    def forward(self, error: Exception) -> None:
        raise error


class Watched(nn.Module):
    """Its worker knows how many of these there are."""

    alive: ClassVar[weakref.WeakSet[Watched]] = weakref.WeakSet()

    def __init__(self) -> None:
        super().__init__()
        self.alive.add(self)

    def forward(self, rows: Tensor) -> Tensor:
        return rows


def count_watched() -> int:
    return len(Watched.alive)


def make_rows(num_rows: int = 4) -> Tensor:
    return torch.arange(num_rows * WIDTH, dtype=torch.float32).view(num_rows, WIDTH) / 7


class Mortal(nn.Module):
    """Takes its worker with it."""

    def forward(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def read(remote: RemoteModule, what: str) -> Any:
    """An attribute of the module itself, "linear.weight.grad" say, read on its worker."""
    return rpc.rpc_sync(remote.on, read_there, args=(remote.get_module_rref(), what))


def read_there(module_rref: Any, what: str) -> Any:
    found = module_rref.local_value()
    for part in what.split("."):
        found = getattr(found, part)
    return found


def run_backward_there(module_rref: Any, rows: torch.Tensor) -> None:
    module = module_rref.local_value()
    module(rows.to(module.linear.weight.device)).square().sum().backward()


def call_three_ways(remote: RemoteModule, rows: torch.Tensor) -> list[torch.Tensor]:
    return [remote(rows), remote.forward(rows), remote.forward_async(rows).wait()]

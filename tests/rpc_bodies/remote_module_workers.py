"""Workers for the bodies on RemoteModule, and the modules that they make."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tests.rpc_bodies.running import Body, Worker
from weft.rpc import RRef

WIDTH = 3


def from_worker0(body: Callable[[], None]) -> Body:
    """A body that worker0 runs, while the others serve."""

    @wraps(body)
    def run(worker: Worker) -> None:
        if worker.rank == 0:
            body()

    return run


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

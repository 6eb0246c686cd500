"""One update of a model: forward, backward and the optimizer, by local or by distributed autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from weft import dist_autograd
from weft.training.remote_embedding import EmbeddingServer, RemoteEmbedding

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
Span = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Part:
    """What a rank keeps, under the names of the bare model, and what updates it. For checkpoints."""

    name: str  # "" for the model, the name of the module for one that is apart
    tensors: dict[str, torch.Tensor]  # parameters and buffers, as they lie on this rank
    params: dict[str, nn.Parameter]
    optimizer: Optimizer


class Update(Protocol):
    """What a trainer does in a step. `forward` is the module, compiled or not."""

    optimizer: Optimizer
    elsewhere: tuple[str, ...]  # how the names begin of what other ranks keep

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, span: Span) -> torch.Tensor:
        """Update the parameters; gives this rank's loss."""
        ...

    def parts(self) -> Iterator[Part]:
        """All that this rank keeps."""
        ...


class LocalUpdate:
    """Autograd as everybody knows it; data parallel modules reduce gradients inside backward."""

    def __init__(self, forward: nn.Module, bare: nn.Module, loss: Loss, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.elsewhere: tuple[str, ...] = ()
        self._forward, self._bare, self._loss = forward, bare, loss

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, span: Span) -> torch.Tensor:
        """Zero, forward, backward, step."""
        self.optimizer.zero_grad(set_to_none=True)
        with span("forward"):
            loss = self._loss(self._forward(inputs), targets)
        with span("backward"):
            loss.backward()
        with span("optimizer"):
            self.optimizer.step()
        return loss.detach()

    def parts(self) -> Iterator[Part]:
        """The one model."""
        yield _part_of(self._bare, self.optimizer)


class RemoteUpdate:
    """Distributed autograd: backward goes through the calls to the embedding's owner.

    Gradients land in a context of the step, those of the replicated layers averaged over the ranks.
    """

    def __init__(
        self,
        forward: nn.Module,
        bare: nn.Module,
        loss: Loss,
        optimizer: Optimizer,
        remote: tuple[str, RemoteEmbedding, EmbeddingServer | None],
    ) -> None:
        self.optimizer = optimizer
        self._forward, self._bare, self._loss = forward, bare, loss
        self._remote_name, self._remote, self._server = remote
        self.elsewhere: tuple[str, ...] = () if self._server is not None else (f"{self._remote_name}.",)

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor, span: Span) -> torch.Tensor:
        """Forward, backward over all workers, and a step on each."""
        with dist_autograd.context() as context_id:
            with span("forward"):
                loss = self._loss(self._forward(inputs), targets)
            with span("backward"):
                dist_autograd.backward(context_id, [loss])
            with span("optimizer"):
                self._step(context_id)
        return loss.detach()

    def _step(self, context_id: int) -> None:
        gradients = dist_autograd.get_gradients(context_id)
        for param in self._bare.parameters():
            param.grad = gradients.get(param)
        self.optimizer.step()
        self._remote.step(context_id)

    def parts(self) -> Iterator[Part]:
        """The replicated layers, and on the owner the table."""
        yield _part_of(self._bare, self.optimizer)
        if self._server is not None:
            yield _part_of(self._server.table, self._server.optimizer, self._remote_name)


def _part_of(module: nn.Module, optimizer: Optimizer, name: str = "") -> Part:
    prefix = f"{name}." if name else ""
    return Part(
        name,
        {prefix + own: tensor for own, tensor in module.state_dict().items()},
        {prefix + own: param for own, param in module.named_parameters()},
        optimizer,
    )

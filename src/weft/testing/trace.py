"""What a training run did, by name: losses, gradients, parameters and buffers of every step.

Names are those of the bare model, whatever wraps it, and tensors are full ones on the
CPU, however they are sharded: so traces of different strategies can be compared.
Comparing them is parity.py's work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from weft.errors import StateError

B = TypeVar("B")

# What wrappers put into names: torch.compile's, activation checkpointing's.
_WRAPPER_PARTS = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class StepTrace:
    """One step: the loss and the gradients it led to, and what the update made of the model."""

    loss: torch.Tensor
    gradients: Mapping[str, torch.Tensor | None]  # by fqn; None where autograd made none, which is not zero
    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Trace:
    """One rank's run. Parameters under several names are there under each of them."""

    rank: int  # in the world
    initial: Mapping[str, torch.Tensor]  # the parameters before the first step
    steps: tuple[StepTrace, ...]

    @property
    def losses(self) -> list[float]:
        """The loss of each step."""
        return [float(step.loss) for step in self.steps]

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The parameters at the end."""
        return self.steps[-1].parameters if self.steps else self.initial


class Tracer:
    """Records a training loop that is not `train`'s: with accumulation, several backwards, Join.

    In each step call `note_backward` once the gradients are there and `note_update` once the parameters
    have changed. Sharded tensors are gathered, so all ranks of their mesh must call together.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = plan_names(
            [
                *(name for name, _ in model.named_parameters(remove_duplicate=False)),
                *(name for name, _ in model.named_buffers(remove_duplicate=False)),
            ]
        )
        self._initial = self._parameters()
        self._pending: tuple[torch.Tensor, dict[str, torch.Tensor | None]] | None = None
        self._steps: list[StepTrace] = []

    def note_backward(self, loss: torch.Tensor) -> None:
        """Record the loss and the gradients as they are now."""
        gradients = {
            self._names[name]: None if parameter.grad is None else full_copy(parameter.grad)
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
        }
        self._pending = (full_copy(loss), gradients)

    def note_update(self) -> None:
        """Record the parameters and buffers as they are now, and end the step."""
        if self._pending is None:
            raise StateError("Tracer.note_update: call note_backward first, once in each step.")
        buffers = {
            self._names[name]: full_copy(buffer)
            for name, buffer in self._model.named_buffers(remove_duplicate=False)
        }
        self._steps.append(StepTrace(*self._pending, self._parameters(), buffers))
        self._pending = None

    def trace(self) -> Trace:
        """All that was recorded."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return Trace(rank, self._initial, tuple(self._steps))

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {
            self._names[name]: full_copy(parameter)
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
        }


def plain_sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The optimizer that shows gradients best: the update is the gradient, to a factor."""
    return SGD(parameters, lr=0.1)


def squared_error(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean squared error of a models.Batch."""
    return (model(batch.inputs) - batch.targets).square().mean()


def train(
    model: nn.Module,
    batches: Iterable[B],
    *,
    loss_fn: Callable[[nn.Module, B], torch.Tensor] = squared_error,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = plain_sgd,
    before_step: Callable[[], object] | None = None,
) -> Trace:
    """Train the model, a step a batch, and record it.

    `optimizer` is made from the model's parameters as they are when train is called, that is after sharding;
    with None nothing is updated here (it runs in backward, say). `before_step` is called as each step
    begins: an Injection's next_step, say. Gradients are set to None before each step.
    """
    update = None if optimizer is None else optimizer(model.parameters())
    tracer = Tracer(model)
    for batch in batches:
        if before_step is not None:
            before_step()
        model.zero_grad(set_to_none=True)
        loss = loss_fn(model, batch)
        loss.backward()
        tracer.note_backward(loss)
        if update is not None:
            update.step()
        tracer.note_update()
    return tracer.trace()


def plan_names(names: Sequence[str]) -> dict[str, str]:
    """The bare model's name for each name of a wrapped one.

    A `module.` in front of all of them is a data-parallel wrapper's. A model whose only child is really
    called so loses it too, in every trace alike.
    """
    bare = [".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS) for name in names]
    while bare and all(name.startswith("module.") for name in bare):
        bare = [name.removeprefix("module.") for name in bare]
    return dict(zip(names, bare, strict=True))


def full_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU that nothing changes any more; of a DTensor, gathered. Sparse ones stay sparse."""
    detached = tensor.detach()
    if isinstance(detached, DTensor):
        detached = detached.full_tensor()
    if detached.layout is torch.sparse_coo:
        detached = detached.coalesce()
    return detached.to("cpu", copy=True)

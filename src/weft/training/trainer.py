"""`Trainer`: a model, a loss and an optimizer on many ranks, by the name of a strategy.

The few lines behind `weft train`. It does what a loop written by hand does (examples/ has them), so it can be
left at any time: `trainer.module` is the spread model.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from weft import comm
from weft.errors import ConfigError
from weft.join import Join, Joinable
from weft.launcher import World, init
from weft.observe import Observer, StepFigures
from weft.training.gradient_hooks import check_hook, register_hook
from weft.training.layout import Layout, plan_layout
from weft.training.remote_embedding import RemoteEmbedding, end_sharing, share_embedding
from weft.training.strategies import Placed, TpPlan, place
from weft.training.traffic import describe_traffic
from weft.training.updates import LocalUpdate, Loss, MakeOptimizer, RemoteUpdate, Update


@dataclass(frozen=True)
class Strategy:
    """A strategy with what its name leaves open.

    `tp` and `shard` are sizes of axes (see plan_layout), `tp_plan` says how layers are split, `remote` is the
    name of the module that strategy rpc puts on rank 0.
    """

    name: str
    tp: int | None = None
    shard: int | None = None
    tp_plan: TpPlan | None = None
    remote: str = "embed"


class Trainer:
    """Trains a model on all ranks of the world, which all make one with equal models.

    `loss(outputs, targets)` is the mean over a batch; `optimizer` makes one of the spread parameters.
    `strategy` is a name ("ddp", "fsdp", "ddp+tp", ...) or a Strategy. `hook` names a gradient hook ("fp16",
    "bf16", "int8", "powersgd"). `compile` runs the model through torch.compile. `record` is a directory for
    the record of the run, which `weft report` shows.

    Raises ConfigError for what can't be put together; the model is unchanged then.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: MakeOptimizer,
        strategy: str | Strategy = "ddp",
        *,
        hook: str = "none",
        compile: bool = False,
        record: Path | str | None = None,
    ) -> None:
        wanted = Strategy(strategy) if isinstance(strategy, str) else strategy
        self.world: World = init()
        self.layout: Layout = plan_layout(wanted.name, self.world.size, tp=wanted.tp, shard=wanted.shard)
        check_together(self.layout, hook, compile=compile)
        self.num_steps = 0  # made so far, those before a checkpoint included
        # Before it is spread: that may change its class.
        about_model = {
            "name": type(model).__name__,
            "num_parameters": sum(param.numel() for param in model.parameters()),
        }
        if self.layout.kind.data == "remote":
            self.placed, self._update = _place_remote(model, self.layout, self.world, loss, optimizer, wanted)
        else:
            self.placed = place(model, self.layout, self.world.device, wanted.tp_plan)
            forward = cast(nn.Module, torch.compile(self.placed.module)) if compile else self.placed.module
            made = optimizer(self.placed.module.parameters())
            self._update: Update = LocalUpdate(forward, self.placed.bare, loss, made)
        self.hook = hook
        self.hook_state: Any = register_hook(hook, self.placed)
        self._about = {
            "strategy": self.layout.strategy,
            "ranks": self.world.size,
            "mesh": {"names": list(self.layout.names), "shape": list(self.layout.shape)},
            "model": about_model,
            "options": {"hook": hook, "compile": compile, "backend": self.world.backend},
        }
        self._steps_to_plan = 2  # buckets follow the order in which the first step's gradients came
        self._observer = Observer(None, self._about)
        if record is not None:
            self.start_record(record)

    @property
    def module(self) -> nn.Module:
        """The spread model, as it is called."""
        return self.placed.module

    @property
    def update(self) -> Update:
        """What a step does, and what it keeps: for checkpoints."""
        return self._update

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> StepFigures:
        """Update the model with this rank's part of a batch, and say how it went.

        The figures' loss is the mean over all ranks. All ranks call together, but under `uneven`.
        """
        device = self.world.device
        with self._observer.step(self.num_steps) as step:
            with self._observer.span("data"):
                inputs, targets = inputs.to(device), targets.to(device)
            loss = self._update(inputs, targets, self._observer.span)
            mean, num_active = mean_loss(loss, self.placed.data_group)
            step.note(loss=mean, tokens=targets.numel() * num_active)
        self.num_steps += 1
        self._steps_to_plan -= 1
        if self._steps_to_plan == 0:
            self._observer.tell(buckets=describe_traffic(self.placed.module))
        return step.figures

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the steps to come, in every optimizer of this rank."""
        for part in self._update.parts():
            for group in part.optimizer.param_groups:
                group["lr"] = rate

    def start_record(self, directory: Path | str, *, go_on_at: int | None = None) -> None:
        """Record all further steps. All ranks call, before a step or between two.

        With `go_on_at` the existing record is kept up to that step and continued.
        """
        self._observer.close()
        self._observer = Observer(directory, self._about, go_on_at=go_on_at)
        self._steps_to_plan = max(self._steps_to_plan, 1)  # a new record doesn't have the buckets yet

    @contextmanager
    def uneven(self) -> Generator[None]:
        """Let ranks make different numbers of steps in the block: one that is done stands in for itself."""
        check_uneven(self.layout)
        keywords: dict[str, Any] = (
            {"optimizer": self._update.optimizer} if self.layout.kind.data == "fsdp" else {}
        )
        with Join([cast(Joinable, self.placed.module)], **keywords):
            yield

    def span(self, name: str) -> AbstractContextManager[None]:
        """Name what the rank does in a block, for the record: "checkpoint", "evaluation"."""
        return self._observer.span(name)

    def close(self, *, has_failed: bool = False) -> None:
        """End the record, and RPC where it was started. Calls of other ranks are served until all close.

        After a failure nobody is waited for.
        """
        try:
            self._observer.close()
        finally:
            if self.layout.kind.data == "remote":
                end_sharing(waits=not has_failed)


def mean_loss(loss: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[float, int]:
    """The loss over all ranks of the group that have a batch in this step, and how many those are."""
    if group is None or group.size() == 1:
        return loss.item(), 1
    both = torch.stack([loss.float(), torch.ones_like(loss, dtype=torch.float32)])
    total, count = comm.all_reduce(both, group=group, label="mean loss").wait().tolist()
    return total / count, round(count)


def check_together(layout: Layout, hook: str, *, compile: bool) -> None:
    """Raise ConfigError for options that can't be put together."""
    check_hook(hook, layout)
    if compile and layout.kind.data == "remote":
        raise ConfigError(
            "train: --compile and strategy rpc can't be together: torch.compile can't see through remote "
            "calls. Leave one of them out."
        )


def check_uneven(layout: Layout) -> None:
    """Raise ConfigError for strategies whose ranks must make the same number of steps."""
    if layout.kind.data in (None, "remote"):
        raise ConfigError(
            f"train: uneven inputs and strategy {layout.strategy} can't be together: all of its ranks take "
            "part in every batch. Take a strategy with data-parallel ranks."
        )


def _place_remote(
    model: nn.Module, layout: Layout, world: World, loss: Loss, optimizer: MakeOptimizer, wanted: Strategy
) -> tuple[Placed, Update]:
    try:
        table = model.get_submodule(wanted.remote)
    except AttributeError:
        raise ConfigError(
            f"Trainer: strategy rpc puts module '{wanted.remote}' on rank 0, and the model has none of that "
            "name. Name another one: Strategy('rpc', remote=...)."
        ) from None
    stand_in = RemoteEmbedding()
    server = share_embedding(table.to(world.device), optimizer, world.device)
    model.set_submodule(wanted.remote, stand_in)
    placed = place(model, layout, world.device)
    made = optimizer(placed.module.parameters())
    remote = (wanted.remote, stand_in, server)
    return placed, RemoteUpdate(placed.module, placed.bare, loss, made, remote)

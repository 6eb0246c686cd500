"""Run a few training steps of the real code in an imagined world, and say what the last one needs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from weft.comm import record
from weft.planning.clock import Clock, StepTime
from weft.planning.imagined_values import Imagining
from weft.planning.imagined_world import imagined_world
from weft.planning.job import Job, with_rows
from weft.planning.machine import Machine
from weft.planning.memory import Memory, StorageLog, assign_model, followed_resizes
from weft.planning.on_gpu import as_on_gpu
from weft.planning.traffic import Traffic, traffic_of
from weft.planning.work import work_of
from weft.training.gradient_hooks import register_hook
from weft.training.layout import Layout
from weft.training.strategies import place
from weft.training.trainer import mean_loss
from weft.training.updates import LocalUpdate

_NUM_STEPS = 3  # the first learns the order of gradients, the second makes buffers for it
_NUM_STEPS_POWERSGD = 5  # it begins to compress at its third


@dataclass(frozen=True)
class Simulated:
    """A step of one rank."""

    time: StepTime
    memory: Memory
    traffic: tuple[Traffic, ...]
    num_parameters: int
    num_tokens: int  # of this rank's batch


class _Watch:
    """Tells the clock and the log of memory of each operation."""

    def __init__(self, machine: Machine, clock: Clock, log: StorageLog) -> None:
        self._machine = machine
        self._clock = clock
        self._log = log

    def saw(
        self, op: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *, is_view: bool
    ) -> None:
        self._clock.compute(self._machine.work_secs(work_of(op, inputs, outputs, is_view=is_view)))
        self._log.see(outputs)

    def saw_dtensor(self) -> None:
        self._clock.compute(self._machine.dtensor_secs)


def simulate(
    make_job: Callable[[], Job],
    layout: Layout,
    machine: Machine,
    *,
    batch: int,
    hook: str = "none",
    dtype: torch.dtype = torch.float32,
) -> Simulated:
    """What a step takes on rank 0 of this layout. `batch` is the rank's own; the job is made inside.

    Raises what the code raises that can't run so: ConfigError for a plan of layers that doesn't fit, say.
    """
    num_ranks = layout.num_shares * layout.tp_size
    clock, log = Clock(machine.links), StorageLog()
    with (
        imagined_world(num_ranks, clock, is_local=machine.links.reads_peers),
        as_on_gpu(is_on=machine.device == "cuda"),
        Imagining(_Watch(machine, clock, log)),
        followed_resizes(log),
    ):
        job = make_job()
        model = job.model.to(dtype)
        num_parameters = sum(param.numel() for param in model.parameters())
        placed = place(model, layout, torch.device("cpu"), job.tp_plan)
        optimizer = _make_optimizer(job, placed.module, machine)
        register_hook(hook, placed)
        update = LocalUpdate(placed.module, placed.bare, job.loss, optimizer)
        inputs, targets = with_rows(job.inputs, batch), with_rows(job.targets, batch)
        span = _span_of(clock, log, placed.module, optimizer)
        traffic: tuple[Traffic, ...] = ()
        for _ in range(_NUM_STEPS_POWERSGD if hook == "powersgd" else _NUM_STEPS):
            log.begin_window()
            clock.begin_step()
            with record() as events:
                mean_loss(update(inputs, targets, span), placed.data_group)
            traffic = traffic_of(events)
        return Simulated(clock.step_time(), log.peak(), traffic, num_parameters, targets.numel())


def _span_of(clock: Clock, log: StorageLog, model: nn.Module, optimizer: Optimizer) -> Any:
    @contextmanager
    def span(name: str) -> Generator[None]:
        yield
        if name == "backward":
            clock.backward_ends()
        if name != "forward":  # after which modules may still have gathered parameters
            assign_model(log, model, optimizer)

    return span


def _make_optimizer(job: Job, model: nn.Module, machine: Machine) -> Optimizer:
    params: Iterable[nn.Parameter] = model.parameters()
    optimizer = job.optimizer(params)
    # On a GPU torch's optimizers work on all plain parameters at once, unless they were told otherwise.
    if machine.device == "cuda" and all(type(param) is nn.Parameter for param in model.parameters()):
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
    return optimizer

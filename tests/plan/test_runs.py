"""A plan is what a run does: its collectives, to the byte, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
from torch.optim import AdamW

from weft.comm import record
from weft.planning import PlanOptions, plan
from weft.planning.calibrate import as_machine
from weft.planning.job import Job, with_rows
from weft.planning.machine import Link, Links, Machine
from weft.planning.measure import measure_rank
from weft.planning.memory import Following, Memory, StorageLog, assign_model, followed_resizes, local_part
from weft.planning.profile import load_profile, save_profile
from weft.planning.simulate import Simulated, simulate
from weft.planning.traffic import Traffic, traffic_of
from weft.testing.pool import shared_pool
from weft.training.layout import plan_layout
from weft.training.model import ModelSize, make_model, next_byte_loss
from weft.training.strategies import transformer_plan
from weft.training.trainer import Strategy, Trainer

pytestmark = pytest.mark.processes

# Large enough for two buckets and for pieces that gloo packs, small enough for a second.
SIZE = ModelSize(width=128, depth=2, num_heads=4, hidden=352, context=32)
GLOBAL_BATCH = 8
CASES: Sequence[tuple[str, str]] = (
    ("ddp", "none"),
    ("replicate", "none"),
    ("fsdp", "none"),
    ("hsdp", "none"),
    ("tp", "none"),
    ("ddp+tp", "none"),
    ("fsdp+tp", "none"),
    ("ddp", "bf16"),
    ("ddp", "int8"),
    ("fsdp", "bf16"),
    ("fsdp", "int8"),
)


@dataclass(frozen=True)
class Measured:
    """The last step of a real run on one rank."""

    traffic: tuple[Traffic, ...]
    memory: Memory | None


def make_job() -> Job:
    """The model and its batch."""
    tokens = torch.zeros(1, SIZE.context, dtype=torch.long)
    return Job(make_model(SIZE, 0), tokens, tokens, next_byte_loss, transformer_plan())


def machine(*, reads_peers: bool) -> Machine:
    """Any machine: bytes don't depend on it."""
    link = Link(10e9, 1e-5)
    links = Links(link, link, ranks_per_host=8, reads_peers=reads_peers)
    return Machine("any", "cpu", 1 << 34, 1e11, 1e10, 1e-5, 1e-6, links)


def plan_all(num_ranks: int, backend: str) -> dict[tuple[str, str], Simulated]:
    """What a plan says of each case."""
    plans: dict[tuple[str, str], Simulated] = {}
    for strategy, hook in CASES:
        layout = plan_layout(strategy, num_ranks)
        batch = GLOBAL_BATCH // layout.num_shares
        plans[strategy, hook] = simulate(
            make_job, layout, machine(reads_peers=backend == "weft"), batch=batch, hook=hook
        )
    return plans


def run_all(num_steps: int = 3) -> dict[tuple[str, str], Measured]:
    """Train in each case, for real, on all ranks; what this rank's last step had."""
    return {case: _run(*case, num_steps) for case in CASES}


def _run(strategy: str, hook: str, num_steps: int) -> Measured:
    job = make_job()
    trainer = Trainer(job.model, job.loss, AdamW, Strategy(strategy, tp_plan=transformer_plan()), hook=hook)
    batch = GLOBAL_BATCH // trainer.layout.num_shares
    inputs, targets = with_rows(job.inputs, batch), with_rows(job.targets, batch)
    for _ in range(num_steps - 1):
        trainer.step(inputs, targets)
    with record() as events:
        trainer.step(inputs, targets)
    memory = None if hook != "none" else _measure(trainer, inputs, targets)
    trainer.close()
    return Measured(traffic_of(events), memory)


def _measure(trainer: Trainer, inputs: torch.Tensor, targets: torch.Tensor) -> Memory:
    """The peak of two more steps, the first of which shows what memory there is."""
    log = StorageLog()
    update = trainer.update

    def assign() -> None:
        assign_model(log, trainer.module, update.optimizer)

    with Following(log), followed_resizes(log):
        log.see(map(local_part, trainer.module.parameters()))
        for _ in range(2):
            log.begin_window()
            update.optimizer.zero_grad(set_to_none=True)
            loss = next_byte_loss(trainer.module(inputs), targets)
            loss.backward()
            assign()
            update.optimizer.step()
            assign()
            del loss
    return log.peak()


@pytest.mark.full
@pytest.mark.parametrize("backend", ["gloo", "weft"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_traffic_and_memory_are_those_of_a_run(num_ranks: int, backend: str) -> None:
    planned = plan_all(num_ranks, backend)
    measured = shared_pool(num_ranks).run(run_all, backend=backend, timeout=120, collective_timeout=30)[0]
    for case in CASES:
        assert planned[case].traffic == measured[case].traffic, case
    for case in CASES:
        memory = measured[case].memory
        if memory is not None:
            assert_close(planned[case].memory, memory, f"{case} on {num_ranks} ranks over {backend}")


def test_a_measured_machine_can_be_planned_for(tmp_path: Path) -> None:
    found = shared_pool(2).run(measure_rank, args=(1, 1), backend="weft", timeout=120, collective_timeout=30)
    machine = as_machine(found, reads_peers=True)
    assert machine.flops_per_sec > 1e8
    assert {"aten::mm", "aten::mul", "aten::addcdiv_"} <= set(machine.curves)
    assert {"all_reduce", "all_gather", "reduce_scatter", "control"} <= set(machine.links.curves)
    assert all(secs > 0 for curve in machine.links.curves.values() for _, secs in curve.points)
    assert 0 <= machine.links.overlap_cost <= 1
    save_profile(machine, tmp_path / "machine.json")
    again = load_profile(tmp_path / "machine.json")
    (plan_,) = plan("tiny", PlanOptions(ranks=2, strategies=("ddp",), batch=4), again)
    assert plan_.step is not None
    assert 1e-4 < plan_.step.time.total_secs < 100


def assert_close(planned: Memory, measured: Memory, words: str) -> None:
    """Within 10%, each kind; what is less than a hundredth of all may be anything.

    How many buffers of collectives are in use at once depends on how soon ranks come: they count in the sum.
    """
    little = measured.total / 100
    for field in fields(Memory):
        if field.name == "communication":
            continue
        here, there = getattr(planned, field.name), getattr(measured, field.name)
        assert abs(here - there) <= max(0.1 * there, little), f"{words}: {field.name}\n{planned}\n{measured}"
    assert abs(planned.total - measured.total) <= 0.1 * measured.total, f"{words}\n{planned}\n{measured}"

"""Fit a measured machine to whole training steps.

An operation in a step takes longer than the same one over and over: memory is cold, the interpreter has other
things to do between two of them, and two ranks share caches. And where ranks meet, the faster waits. Three
numbers stand for that: how much longer the work of an operation takes, what each one takes beside its work,
and what each collective takes beside its bytes. They are chosen so that plans of a few small steps are what
these steps take here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.optim import AdamW

from weft.planning.job import Job, with_rows
from weft.planning.machine import Machine
from weft.planning.simulate import simulate
from weft.training.layout import plan_layout
from weft.training.model import ModelSize, make_model, next_byte_loss
from weft.training.trainer import Trainer

NUM_RANKS = 2
_BATCH = 4  # of each rank
_NUM_WARM, _NUM_TIMED = 4, 25
_NUDGE_SECS = 1e-6
_NUM_ROUNDS = 3
_SLOWEST, _FASTEST = 4.0, 0.5  # what work may take in a step, over what it takes alone


@dataclass(frozen=True)
class Anchor:
    """A step that is measured and planned."""

    strategy: str
    size: ModelSize


# Mostly calls, mostly work, and mostly collectives.
ANCHORS = (
    Anchor("ddp", ModelSize(width=64, depth=2, num_heads=4, hidden=160, context=32)),
    Anchor("ddp", ModelSize(width=320, depth=2, num_heads=8, hidden=832, context=96)),
    Anchor("fsdp", ModelSize(width=64, depth=4, num_heads=4, hidden=160, context=32)),
)


def measure_steps(num_threads: int) -> list[float]:
    """What a step of each anchor takes, in the median. Every rank calls it."""
    torch.set_num_threads(num_threads)
    found: list[float] = []
    for anchor in ANCHORS:
        job = _make_job(anchor)
        trainer = Trainer(job.model, job.loss, AdamW, anchor.strategy)
        inputs, targets = with_rows(job.inputs, _BATCH), with_rows(job.targets, _BATCH)
        took: list[float] = []
        for _ in range(_NUM_WARM + _NUM_TIMED):
            start = time.perf_counter()
            trainer.step(inputs, targets)
            took.append(time.perf_counter() - start)
        trainer.close()
        found.append(statistics.median(took[_NUM_WARM:]))
    return found


def fit(machine: Machine, measured: Sequence[float]) -> Machine:
    """The machine on which plans of the anchors take what was measured, as nearly as three numbers can."""
    calls, work, collectives = ANCHORS
    # Each needs the other, a little: steps of operations have collectives in them.
    for _ in range(_NUM_ROUNDS):
        machine = _fit_operations(machine, (calls, work), measured[:2])
        machine = _fit_collectives(machine, collectives, measured[2])
    return machine


def plan_secs(anchor: Anchor, machine: Machine) -> float:
    """What a plan says that a step of the anchor takes."""
    layout = plan_layout(anchor.strategy, NUM_RANKS)
    return simulate(partial(_make_job, anchor), layout, machine, batch=_BATCH).time.total_secs


def _fit_operations(machine: Machine, anchors: Sequence[Anchor], measured: Sequence[float]) -> Machine:
    """Choose what work takes more, and what each operation takes beside it: two numbers for two steps."""
    rows: list[tuple[float, float, float]] = []  # seconds of work, number of operations, what is missing
    for anchor, secs in zip(anchors, measured, strict=True):
        planned = plan_secs(anchor, machine)
        with_twice = plan_secs(anchor, replace(machine, work_factor=2 * machine.work_factor))
        with_more = plan_secs(anchor, _with_op_secs(machine, _NUDGE_SECS))
        rows.append((with_twice - planned, (with_more - planned) / _NUDGE_SECS, secs - planned))
    (work_0, ops_0, missing_0), (work_1, ops_1, missing_1) = rows
    determinant = work_0 * ops_1 - work_1 * ops_0
    factor, op_secs = 1.0, 0.0
    if abs(determinant) > 1e-9 * max(work_0 * ops_1, work_1 * ops_0):
        factor = 1 + (missing_0 * ops_1 - missing_1 * ops_0) / determinant
        op_secs = (work_0 * missing_1 - work_1 * missing_0) / determinant
    factor = min(_SLOWEST, max(_FASTEST, factor))
    return replace(
        _with_op_secs(machine, max(op_secs, -0.9 * machine.op_secs)), work_factor=machine.work_factor * factor
    )


def _fit_collectives(machine: Machine, anchor: Anchor, measured: float) -> Machine:
    before = machine.links.call_secs
    planned = plan_secs(anchor, machine)
    nudged = plan_secs(anchor, _with_call_secs(machine, before + _NUDGE_SECS))
    num_calls = (nudged - planned) / _NUDGE_SECS
    missing = (measured - planned) / num_calls if num_calls > 0 else 0.0
    return _with_call_secs(machine, max(0.0, before + missing))


def _with_call_secs(machine: Machine, secs: float) -> Machine:
    return replace(machine, links=replace(machine.links, call_secs=secs))


def _with_op_secs(machine: Machine, more_secs: float) -> Machine:
    return replace(
        machine, op_secs=machine.op_secs + more_secs, view_secs=max(0.0, machine.view_secs + more_secs)
    )


def _make_job(anchor: Anchor) -> Job:
    tokens = torch.zeros(1, anchor.size.context, dtype=torch.long)
    return Job(make_model(anchor.size, 0), tokens, tokens, next_byte_loss)

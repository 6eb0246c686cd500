"""Runs of the main job inside ranks of a pool: many in one job, since starting ranks takes longer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

import weft
from weft.training.data import Share, Text, read_text
from weft.training.job import Outcome, run_rank
from weft.training.model import make_model, next_byte_loss
from weft.training.options import TrainOptions

# Small enough for milliseconds a step, and a batch that 1, 2 and 4 ranks can share. No warm-up: in its first
# steps a hook that did not run would not be seen.
SMALL = TrainOptions(ranks=1, steps=6, rate=3e-3, warmup=0, decay=200, batch=8, context=16)

# A loss is about 5 and float32 has 7 digits: the same terms summed over ranks instead of rows move it by some
# 1e-6, and six updates of AdamW carry that along. A forgotten rank or factor moves it by 1e-2 and more.
SAME = 1e-5


def run_each(runs: Sequence[TrainOptions]) -> list[Outcome]:
    """Run these one after the other, as one rank of each."""
    return [run_rank(options) for options in runs]


def same_as(losses: Sequence[float]) -> object:
    return pytest.approx(list(losses), rel=0, abs=SAME)


@cache
def alone(options: TrainOptions = SMALL) -> tuple[float, ...]:
    """The losses of a plain loop in one process: no weft but for the model and its text."""
    return _train_plainly(options, options.steps)[0]


def alone_but_last(options: TrainOptions = SMALL, *, share: Share) -> float:
    """The loss of one share of the last batch, with the parameters that a plain loop has come to by then."""
    return _train_plainly(options, options.steps - 1, share)[1]


def _train_plainly(
    options: TrainOptions, steps: int, last: Share | None = None
) -> tuple[tuple[float, ...], float]:
    model = make_model(options.size, options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, eps=1e-6)
    text = Text(
        read_text(options.data, context=options.num_context),
        context=options.num_context,
        batch=options.batch,
        seed=options.seed,
    )
    losses: list[float] = []
    for step in range(steps):
        inputs, targets = text.batch(step, Share(0, 1))
        optimizer.param_groups[0]["lr"] = options.learning_rate(step)
        optimizer.zero_grad()
        loss = next_byte_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if last is None:
        return tuple(losses), 0.0
    inputs, targets = text.batch(steps, last)
    return tuple(losses), next_byte_loss(model(inputs), targets).item()


def gradient_bytes(runs: Sequence[TrainOptions]) -> list[int]:
    """What went into the reductions of gradients in each of these runs, in bytes."""
    seen: list[int] = []
    for options in runs:
        with weft.record() as events:
            run_rank(options)
        seen.append(sum(event.bytes_in for event in events if event.label.startswith("bucket")))
    return seen

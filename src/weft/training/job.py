"""What each rank of `weft train` runs: make the model, go on from a checkpoint, step, save."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from weft.errors import ConfigError
from weft.launcher import World, init
from weft.observe.folder_lock import check_free
from weft.training.checkpoints import Checkpoints, broadcast_from_first
from weft.training.data import Text, read_text
from weft.training.directories import make_writable
from weft.training.model import make_model, next_byte_loss
from weft.training.options import TrainOptions, check_options, check_same_run, with_saved_decay
from weft.training.progress import Progress, make_progress
from weft.training.strategies import transformer_plan
from weft.training.trainer import Strategy, Trainer


@dataclass(frozen=True)
class Outcome:
    """How a run ended, on one rank."""

    first_step: int  # where it began: 0, or the checkpoint's step
    losses: tuple[float, ...]  # of the steps from there on, means over all ranks
    secs: float
    num_parameters: int


def run_rank(options: TrainOptions) -> Outcome:
    """Be one rank of the run that the options describe. torch.distributed may be initialised already."""
    world = init(options.backend)
    _check_world(options, world)
    _share_cores(world)
    try:
        run = _Run(options, world)
        try:
            return run.train()
        finally:
            run.release()
    except OSError as error:
        record = None if options.record is None else str(options.record)
        if record is None or not str(error.filename).startswith(record):
            raise
        raise ConfigError(
            f"train: {error.filename} can't be written: {error.strerror}. Make room, or leave --record out."
        ) from error


class _Run:
    """One rank's run."""

    def __init__(self, options: TrainOptions, world: World) -> None:
        self._options = options
        check_options(options)
        self._checkpoints = (
            None if options.checkpoint is None else Checkpoints(options.checkpoint, keep=options.keep)
        )
        if self._checkpoints is not None:
            _hold(self._checkpoints, options, world)
        text = read_text(options.data, context=options.num_context)
        self._about = options.fixed(text)
        self._text = Text(text, context=options.num_context, batch=options.batch, seed=options.seed)
        model = make_model(options.size, options.seed)
        self._num_parameters = sum(param.numel() for param in model.parameters())
        self._trainer = Trainer(
            model,
            next_byte_loss,
            self._make_optimizer,
            Strategy(options.strategy, options.tp, options.shard, transformer_plan()),
            hook=options.hook,
            compile=options.compile,
            # A resumed run continues its record, at a step that is known when the checkpoint is loaded.
            record=None if options.resume else options.record,
        )
        self._share = self._trainer.layout.share_of(world.rank)
        self._progress: Progress = make_progress(options.steps, is_shown=world.rank == 0)

    def train(self) -> Outcome:
        """Make all steps that are left."""
        first_step = self._go_on()
        trainer, options = self._trainer, self._options  # with the checkpoint's decay
        losses: list[float] = []
        secs = 0.0
        if options.resume and options.record is not None and first_step < options.steps:
            trainer.start_record(options.record, go_on_at=first_step or None)
        # With uneven inputs a data-parallel rank has one batch less than the one before it.
        last_step = max(1, options.steps - self._share.index) if options.uneven else options.steps
        try:
            with self._progress, trainer.uneven() if options.uneven else nullcontext():
                for step in range(first_step, last_step):
                    trainer.set_learning_rate(options.learning_rate(step))
                    figures = trainer.step(*self._text.batch(step, self._share))
                    losses.append(figures.scalars["loss"])
                    secs += figures.secs
                    self._progress.show(step + 1, figures)
                    self._save_if_due(step + 1)
        except BaseException:
            trainer.close(has_failed=True)
            raise
        trainer.close()
        return Outcome(first_step, tuple(losses), secs, self._num_parameters)

    def release(self) -> None:
        """Release the lock on the directory of checkpoints."""
        if self._checkpoints is not None:
            self._checkpoints.release()

    def _go_on(self) -> int:
        """Load the newest checkpoint where that is asked for; gives the step to begin with."""
        if self._checkpoints is None or not self._options.resume:
            return 0
        # One rank looks: the others might see a directory that is changing.
        newest = broadcast_from_first(self._checkpoints.steps()[-1:])
        if not newest:
            self._progress.say(f"no checkpoint in {self._checkpoints.directory} yet: beginning at step 0")
            return 0
        step = newest[0]
        where = self._checkpoints.path_of(step)
        saved = self._checkpoints.about(step)
        self._options = with_saved_decay(self._options, saved)
        self._about["decay"] = self._options.num_decay
        check_same_run(saved, self._about, where)
        if not self._checkpoints.load(self._trainer, step):
            self._progress.say(
                f"no state of hook {self._options.hook} for {self._options.ranks} ranks: it begins anew"
            )
        self._progress.say(f"going on from {where}")
        if self._options.num_decay < self._options.steps:
            self._progress.say(
                f"the learning rate stays at a tenth from step {self._options.num_decay} on, as the first "
                "run has planned: its --steps, or its --decay"
            )
        return step

    def _save_if_due(self, step: int) -> None:
        options = self._options
        if self._checkpoints is not None and (step % options.every == 0 or step == options.steps):
            with self._trainer.span("checkpoint"):
                self._checkpoints.save(self._trainer, self._about)

    def _make_optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        given = list(params)
        # torch's batched updates, the default on a GPU, take no mixture of DTensors and other tensors.
        is_mixed = len({isinstance(param, DTensor) for param in given}) > 1
        return AdamW(given, lr=self._options.rate, eps=1e-6, foreach=False if is_mixed else None)


def check_files(options: TrainOptions, made: list[Path]) -> None:
    """Raise ConfigError for files that can't be read or written, before any rank starts.

    `made` gets the directories that were not there before.
    """
    text = read_text(options.data, context=options.num_context)
    # First what may be refused: a record that is there is replaced as soon as ranks start.
    if options.checkpoint is not None:
        _check_checkpoints(Checkpoints(options.checkpoint, keep=options.keep), options, text, made)
    if options.record is not None:
        make_writable(options.record, "a record", made)


def _check_checkpoints(
    checkpoints: Checkpoints, options: TrainOptions, text: bytes, made: list[Path]
) -> None:
    _check_begins(checkpoints, options)
    steps = checkpoints.steps()
    if steps:
        saved = checkpoints.about(steps[-1])
        wanted = with_saved_decay(options, saved).fixed(text)
        check_same_run(saved, wanted, checkpoints.path_of(steps[-1]))
    make_writable(checkpoints.directory, "checkpoints", made)
    check_free(checkpoints.directory)


def _check_begins(checkpoints: Checkpoints, options: TrainOptions) -> None:
    steps = checkpoints.steps()
    if steps and not options.resume:
        raise ConfigError(
            f"train: {checkpoints.directory} has checkpoints already, up to step {steps[-1]}. Give --resume "
            "to go on from there, or another directory."
        )


def _hold(checkpoints: Checkpoints, options: TrainOptions, world: World) -> None:
    """Lock the directory for this run and tidy it up. Raises ConfigError on every rank."""
    problem: str | None = None
    if world.rank == 0:
        try:
            checkpoints.hold()
            checkpoints.clean()
            _check_begins(checkpoints, options)
        except (ConfigError, OSError) as error:
            checkpoints.release()
            problem = str(error)
    problem = broadcast_from_first(problem)
    if problem is not None:
        raise ConfigError(problem)


def _check_world(options: TrainOptions, world: World) -> None:
    if world.size != options.ranks:
        raise ConfigError(
            f"train: --ranks {options.ranks} was given, but torchrun has started {world.size}. Leave it out."
        )


def _share_cores(world: World) -> None:
    """Give each rank of this host its part of the cores; torch would take all of them for each."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))

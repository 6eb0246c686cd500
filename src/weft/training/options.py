"""What `weft train` can be told, and which of it can't be together. Pure but for reading the data file."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.training.layout import Layout, plan_layout
from weft.training.model import SIZES, ModelSize
from weft.training.trainer import check_together, check_uneven

# What decides the losses of a run. A checkpoint goes on only where these are the same.
_FIXED = ("model", "context", "batch", "rate", "warmup", "decay", "seed", "data")
# What is left of the learning rate when it has decayed.
_LAST_RATE = 0.1


@dataclass(frozen=True)
class TrainOptions:
    """A run. Picklable: every rank gets it."""

    ranks: int = 2
    strategy: str = "ddp"
    tp: int | None = None
    shard: int | None = None
    hook: str = "none"
    compile: bool = False
    uneven: bool = False
    backend: str | None = None
    model: str = "tiny"
    context: int | None = None
    data: Path | None = None
    steps: int = 200
    batch: int = 16  # sequences a step, of all ranks together
    rate: float = 1e-3  # the highest learning rate, at the end of the warm-up
    warmup: int = 20  # steps in which the rate rises to it
    decay: int | None = None  # the step by which it has fallen, along a cosine; None: `steps`
    seed: int = 0
    checkpoint: Path | None = None
    every: int = 50
    keep: int = 3
    resume: bool = False
    record: Path | None = None

    @property
    def size(self) -> ModelSize:
        """The model's size."""
        return SIZES[self.model]

    @property
    def num_context(self) -> int:
        """How long a sequence is."""
        return self.size.context if self.context is None else self.context

    @property
    def num_decay(self) -> int:
        """The step by which the learning rate has decayed."""
        return self.steps if self.decay is None else self.decay

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0: linear warm-up, then a cosine down to a tenth."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.num_decay - self.warmup))
        return self.rate * (_LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * progress)))

    def fixed(self, text: bytes) -> dict[str, Any]:
        """What a run that goes on must have in common with the one that wrote the checkpoint."""
        return {
            "model": asdict(self.size),
            "context": self.num_context,
            "batch": self.batch,
            "rate": self.rate,
            "warmup": self.warmup,
            "decay": self.num_decay,
            "seed": self.seed,
            "data": f"of {len(text)} bytes, sha256 {hashlib.sha256(text).hexdigest()}",
        }


def check_options(options: TrainOptions) -> Layout:
    """Raise ConfigError, with the reason, for what can't be trained; gives the layout of what can."""
    _check_numbers(options)
    layout = plan_layout(options.strategy, options.ranks, tp=options.tp, shard=options.shard)
    check_together(layout, options.hook, compile=options.compile)
    if options.batch % layout.num_shares:
        raise ConfigError(
            f"train: --batch {options.batch} can't be cut into {layout.num_shares} equal parts, one for each "
            "data-parallel rank. Take a multiple of it."
        )
    if options.size.num_heads % layout.tp_size:
        raise ConfigError(
            f"train: model {options.model} has {options.size.num_heads} heads, which {layout.tp_size} ranks "
            "of a tp axis can't share out. Take a --tp that divides them."
        )
    if options.uneven:
        check_uneven(layout)
        if options.checkpoint is not None:
            raise ConfigError(
                "train: --uneven and --checkpoint can't be together: ranks end at different steps, so there "
                "is no step that a checkpoint could be of."
            )
    if options.checkpoint is None and options.resume:
        raise ConfigError("train: --resume goes on from a checkpoint: say where with --checkpoint DIR.")
    return layout


def with_saved_decay(options: TrainOptions, saved: dict[str, Any]) -> TrainOptions:
    """The options with the checkpoint's decay where none is given, so that more steps can be asked for."""
    decay = saved.get("decay")
    return replace(options, decay=decay) if options.decay is None and isinstance(decay, int) else options


def check_same_run(saved: dict[str, Any], wanted: dict[str, Any], where: Path) -> None:
    """Raise ConfigError where a checkpoint is of a run with other losses than this one would have."""
    if "warmup" not in saved or "decay" not in saved:
        raise ConfigError(
            f"train: the checkpoint {where} is of an earlier weft without a learning-rate schedule: its rate "
            f"was constant ({saved.get('rate')}). `weft train` can't go on with that: take another "
            "--checkpoint directory, or load it in a loop of your own with weft.training.Checkpoints."
        )
    for name in _FIXED:
        if saved.get(name) != wanted[name]:
            raise ConfigError(
                f"train: the checkpoint {where} is of a run with {name} {saved.get(name)}; this one has "
                f"{wanted[name]}. Go on with the same, or take another --checkpoint directory."
            )


def _check_numbers(options: TrainOptions) -> None:
    if options.model not in SIZES:
        raise ConfigError(f"train: there is no model {options.model!r}; there are {', '.join(SIZES)}.")
    for name in ("ranks", "steps", "batch", "every", "keep", "num_context", "num_decay"):
        value = getattr(options, name)
        if value < 1:
            raise ConfigError(f"train: --{name.removeprefix('num_')} must be at least 1; got {value}.")
    if options.warmup < 0:
        raise ConfigError(f"train: --warmup must be at least 0; got {options.warmup}.")
    if not 0 <= options.seed < 2**32:
        raise ConfigError(f"train: --seed must be from 0 to {2**32 - 1}; got {options.seed}.")
    if not (options.rate > 0 and math.isfinite(options.rate)):
        raise ConfigError(f"train: --rate must be a number above 0; got {options.rate}.")

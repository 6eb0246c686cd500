"""The bytes to train on, and which of them a rank sees in a step.

Batches depend on the seed and the step alone, never on the number of ranks: a rank takes its share of the
same global batch. So runs on different numbers of ranks see the same data, and a run that goes on after a
checkpoint needs nothing but its step.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch

from weft.errors import ConfigError


@dataclass(frozen=True)
class Share:
    """Which part of a global batch is this rank's: part `index` of `count` equal ones."""

    index: int
    count: int


class Text:
    """A text as bytes, and random pieces of it."""

    def __init__(self, text: bytes, *, context: int, batch: int, seed: int) -> None:
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._context = context
        self._batch = batch
        self._seed = seed

    def batch(self, step: int, share: Share) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's inputs and targets of a step: (sequences, context) each, the targets one byte on."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        last_start = len(self._bytes) - self._context - 1
        starts = torch.randint(last_start + 1, (self._batch,), generator=generator)
        mine = starts.tensor_split(share.count)[share.index]
        pieces = torch.stack([self._bytes[start : start + self._context + 1] for start in mine.tolist()])
        tokens = pieces.long()
        return tokens[:, :-1], tokens[:, 1:]


def read_text(path: Path | None, *, context: int) -> bytes:
    """The bytes of a file, or of the text that comes with weft.

    Raises ConfigError when it can't be read or is too short for one sequence.
    """
    try:
        text = (files("weft.training") / "weft.txt").read_bytes() if path is None else path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"train: the data {path} can't be read: {error.strerror or error}. Give --data a file of text."
        ) from None
    if len(text) < context + 2:
        raise ConfigError(
            f"train: the data {path} has {len(text)} bytes; a sequence takes {context + 1}. Give a longer "
            "text, or a smaller --context."
        )
    return text

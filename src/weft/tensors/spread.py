"""How tensors lie in one flat shard a rank, and in one flat whole. Pure: sizes in, plan out.

Each tensor is cut into one piece a rank, all of the same length, the last ones padded:

    shard of rank r   piece r of tensor 0 | piece r of tensor 1 | ...
    whole             tensor 0: piece 0, piece 1, ... | tensor 1: piece 0, piece 1, ... | ...

In the whole a tensor is contiguous, so that a view of it is the tensor. Invariant:
every rank computes the same plan from the same sizes. Moving the elements is
weft.comm's work.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from weft.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """Where the pieces of every tensor lie, in elements."""

    num_ranks: int
    numels: tuple[int, ...]  # of tensor i, without padding
    piece_numels: tuple[int, ...]  # of one rank's piece of tensor i, padding included
    shard_starts: tuple[int, ...]  # of a rank's piece i in its flat shard
    whole_starts: tuple[int, ...]  # of tensor i in the flat whole
    shard_numel: int
    whole_numel: int
    # What others derive from the plan and need again at every step: indices, offsets.
    kept: dict[Hashable, Any] = field(
        default_factory=dict[Hashable, Any], init=False, repr=False, compare=False
    )

    def piece_start(self, index: int, rank: int) -> int:
        """Where a rank's piece of a tensor begins in the whole."""
        return self.whole_starts[index] + rank * self.piece_numels[index]

    def filled_numel(self, index: int, rank: int) -> int:
        """How many elements of a rank's piece of a tensor are no padding."""
        piece_numel = self.piece_numels[index]
        return min(max(self.numels[index] - rank * piece_numel, 0), piece_numel)

    def is_padded(self, index: int) -> bool:
        """Whether the pieces of a tensor hold more than the tensor."""
        return self.numels[index] != self.num_ranks * self.piece_numels[index]

    def kept_or_made(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gave when this key was first asked for."""
        found = self.kept.get(key)
        if found is None:
            found = self.kept[key] = make()
        return found

    # The plan never changes, so a copy of a model shares it; what is kept beside it stays at home.

    def __deepcopy__(self, memo: dict[int, Any]) -> Spread:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {part.name: getattr(self, part.name) for part in fields(self)} | {"kept": {}}


def plan_spread(
    numels: Sequence[int], piece_numels: Sequence[int], num_ranks: int, align: int = 16
) -> Spread:
    """Lay tensors out: pieces without gaps in a shard, tensors at multiples of `align` in the whole.

    Raises ConfigError where the pieces of all ranks together can't hold their tensor.
    """
    if num_ranks < 1 or align < 1:
        raise ConfigError(
            f"plan_spread: num_ranks and align must be at least 1, got {num_ranks} and {align}."
        )
    if len(numels) != len(piece_numels):
        raise ConfigError(
            f"plan_spread: {len(numels)} tensors have {len(piece_numels)} pieces a rank; one each is needed."
        )
    shard_starts: list[int] = []
    whole_starts: list[int] = []
    shard_end = whole_end = 0
    for index, (numel, piece_numel) in enumerate(zip(numels, piece_numels, strict=True)):
        if numel < 0 or num_ranks * piece_numel < numel:
            raise ConfigError(
                f"plan_spread: tensor {index} has {numel} elements, and {num_ranks} pieces of {piece_numel} "
                "can't hold them."
            )
        shard_starts.append(shard_end)
        shard_end += piece_numel
        start = -(-whole_end // align) * align
        whole_starts.append(start)
        whole_end = start + num_ranks * piece_numel
    return Spread(
        num_ranks,
        tuple(numels),
        tuple(piece_numels),
        tuple(shard_starts),
        tuple(whole_starts),
        shard_end,
        whole_end,
    )

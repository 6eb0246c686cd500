"""Where the ranks of a strategy stand: the axes of its mesh. Pure: numbers in, layout out.

What is done to a model on that mesh is strategies.py's work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from weft.errors import ConfigError
from weft.training.data import Share

DataParallel = Literal["ddp", "replicate", "fsdp", "remote"]


@dataclass(frozen=True)
class Kind:
    """What a strategy is made of: how data-parallel ranks share the model, and whether layers are split."""

    data: DataParallel | None
    has_tp: bool = False
    is_hybrid: bool = False  # shards, copied over another axis


KINDS: Mapping[str, Kind] = {
    "ddp": Kind("ddp"),
    "replicate": Kind("replicate"),
    "fsdp": Kind("fsdp"),
    "hsdp": Kind("fsdp", is_hybrid=True),
    "tp": Kind(None, has_tp=True),
    "ddp+tp": Kind("ddp", has_tp=True),
    "fsdp+tp": Kind("fsdp", has_tp=True),
    "rpc": Kind("remote"),
}


@dataclass(frozen=True)
class Layout:
    """The mesh of a strategy: names and sizes of its axes, the outermost first."""

    strategy: str
    axes: tuple[tuple[str, int], ...]

    @property
    def kind(self) -> Kind:
        """What the strategy is made of."""
        return KINDS[self.strategy]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return tuple(size for _, size in self.axes)

    @property
    def data_names(self) -> tuple[str, ...]:
        """The axes along which ranks have different data."""
        return tuple(name for name in self.names if name != "tp")

    @property
    def tp_size(self) -> int:
        """Over how many ranks a layer is split."""
        return dict(self.axes).get("tp", 1)

    @property
    def num_shares(self) -> int:
        """Into how many parts a global batch is cut."""
        ranks = 1
        for _, size in self.axes:
            ranks *= size
        return ranks // self.tp_size

    def share_of(self, rank: int) -> Share:
        """The part of a global batch that this rank computes. Ranks of one tp axis have the same part."""
        return Share(rank // self.tp_size, self.num_shares)


def plan_layout(strategy: str, ranks: int, *, tp: int | None = None, shard: int | None = None) -> Layout:
    """Lay `ranks` ranks out for a strategy.

    `tp` is the size of the tensor-parallel axis: 2 by default, all ranks where there is no other axis.
    `shard` is over how many ranks hsdp shards: half of them by default.
    Raises ConfigError for a strategy that isn't there, and for sizes that don't fit.
    """
    if strategy not in KINDS:
        raise ConfigError(f"train: there is no strategy {strategy!r}; there are {', '.join(KINDS)}.")
    kind = KINDS[strategy]
    _check_axis_options(strategy, kind, tp, shard)
    if kind.has_tp and kind.data is None:
        if tp not in (None, ranks):
            raise ConfigError(
                f"train: strategy tp splits layers over all {ranks} ranks, so --tp can't be {tp}. Leave it "
                "out, or take ddp+tp or fsdp+tp."
            )
        return Layout(strategy, (("tp", ranks),))
    if kind.has_tp:
        tp = min(2, ranks) if tp is None else tp
        return Layout(strategy, (("dp", _divide(ranks, tp, "--tp")), ("tp", tp)))
    if kind.is_hybrid:
        if shard is None:
            shard = ranks // 2 if ranks > 2 and ranks % 2 == 0 else ranks
        return Layout(strategy, (("replicate", _divide(ranks, shard, "--shard")), ("shard", shard)))
    return Layout(strategy, (("dp", ranks),))


def _check_axis_options(strategy: str, kind: Kind, tp: int | None, shard: int | None) -> None:
    if tp is not None and not kind.has_tp:
        raise ConfigError(
            f"train: --tp {tp} needs a strategy that splits layers (tp, ddp+tp, fsdp+tp); {strategy} doesn't."
        )
    if shard is not None and not kind.is_hybrid:
        raise ConfigError(f"train: --shard {shard} is of strategy hsdp; {strategy} has no such axis.")


def _divide(ranks: int, size: int, option: str) -> int:
    if size < 1 or ranks % size:
        raise ConfigError(f"train: {option} {size} must divide the number of ranks, {ranks}.")
    return ranks // size

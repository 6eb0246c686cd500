"""Checks of what callers hand to the local group. Each raises before anything is moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch.distributed import ReduceOp

from weft.errors import ConfigError
from weft.local.calls import Op

T = TypeVar("T")
UNSET = timedelta(milliseconds=-1)  # c10d's way to say that no timeout was given


@dataclass(frozen=True)
class Options:
    """What c10d's options objects hold, with c10d's names and defaults."""

    timeout: timedelta = UNSET
    asyncOp: bool = True
    reduceOp: object = ReduceOp.SUM
    rootRank: int = 0


DEFAULTS = Options()


def words(op: Op) -> str:
    """The collective's name, as users write it."""
    return op.name.lower()


def only(items: Sequence[T], op: Op) -> T:
    """The one item of a list that c10d's interface makes of a single argument."""
    if len(items) != 1:
        raise ConfigError(f"{words(op)}: one tensor (or one list) a rank is needed, got {len(items)}.")
    return items[0]


def dense(tensor: torch.Tensor, op: Op) -> torch.Tensor:
    """The tensor, if its memory can be moved as it is."""
    if tensor.is_cpu and tensor.layout is torch.strided:
        return tensor
    if tensor.layout is not torch.strided:
        raise ConfigError(
            f"{words(op)}: a tensor of layout {tensor.layout} can't be moved. Only all_reduce takes sparse "
            "tensors (COO); call to_dense() for the others."
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{words(op)}: the local group moves tensors of cpu and cuda, not {tensor.device}.")
    return tensor


def check_rank(rank: int, size: int, op: Op) -> int:
    """The rank, if it is one of the group."""
    if not 0 <= rank < size:
        raise ConfigError(f"{words(op)}: rank {rank} is not in a group of {size} ranks (0 to {size - 1}).")
    return rank


def check_parts(
    parts: Sequence[torch.Tensor], numel: int | None, dtype: torch.dtype, size: int, op: Op
) -> None:
    """A list with one tensor a rank, of one dtype, and of `numel` elements each where it is given."""
    if len(parts) != size:
        raise ConfigError(f"{words(op)}: a list of {size} tensors is needed, one a rank; got {len(parts)}.")
    for index, part in enumerate(parts):
        dense(part, op)
        if part.dtype is not dtype:
            raise ConfigError(f"{words(op)}: tensor {index} of the list is {part.dtype}; {dtype} is needed.")
        if numel is not None and part.numel() != numel:
            raise ConfigError(
                f"{words(op)}: tensor {index} of the list has {part.numel()} elements (shape "
                f"{tuple(part.shape)}); {numel} are needed."
            )


def check_whole(whole: torch.Tensor, part: torch.Tensor, size: int, op: Op) -> None:
    """A tensor that holds one part for each rank."""
    dense(whole, op)
    dense(part, op)
    if whole.dtype is not part.dtype:
        raise ConfigError(f"{words(op)}: input and output differ in dtype: {whole.dtype} and {part.dtype}.")
    if whole.numel() != part.numel() * size:
        raise ConfigError(
            f"{words(op)}: the large tensor has {whole.numel()} elements (shape {tuple(whole.shape)}); "
            f"{size} ranks of {part.numel()} elements each (shape {tuple(part.shape)}) need "
            f"{part.numel() * size}."
        )


def split_numels(tensor: torch.Tensor, splits: Sequence[int], size: int, which: str) -> list[int]:
    """How many elements of the tensor belong to each rank. Empty splits: equal ones."""
    dense(tensor, Op.ALL_TO_ALL)
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ConfigError(
                f"all_to_all: the {which} has {rows} rows, which don't divide by {size} ranks. "
                f"Give {which}_split_sizes."
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ConfigError(
            f"all_to_all: {which}_split_sizes {list(splits)} must be {size} counts that add up to the "
            f"{rows} rows of the {which}."
        )
    row_numel = tensor.numel() // rows if rows else 0
    return [count * row_numel for count in splits]

"""Which tensors of a Spread travel by themselves and which packed together, and the packing.

A collective moves one contiguous piece a rank. A large tensor is worth a collective
of its own, straight into place. The others share one: packed side by side, a row a
rank, and unpacked on arrival. Where they are small, making a view of each costs more
than moving it, so their elements are moved by one index for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from weft.tensors.flat import copy_all
from weft.tensors.spread import Spread

LARGE_PIECE_BYTES = 2**20
# Up to here, on the average, gathering elements by index is faster than copying view by view.
_SMALL_NUMEL = 4096


@dataclass(frozen=True)
class Run:
    """Neighbours in the spread that travel packed. Pairs are start and end, in elements."""

    indices: range
    whole: tuple[int, int]
    shard: tuple[int, int]
    packed: tuple[int, int]  # in a row
    is_small: bool


@dataclass(frozen=True)
class Packing:
    """How one collective of a spread is done."""

    spread: Spread
    direct: tuple[int, ...]  # tensors with a collective of their own
    runs: tuple[Run, ...]
    row_numel: int  # of the packed ones, one rank's pieces

    @property
    def is_all_packed(self) -> bool:
        """Whether a rank's row is its shard."""
        return self.row_numel == self.spread.shard_numel


def plan_packing(spread: Spread, itemsize: int, *, is_reduction: bool) -> Packing:
    """The packing for elements of this size; the same on every rank."""
    return spread.kept_or_made(
        ("packing", itemsize, is_reduction), lambda: _plan_packing(spread, itemsize, is_reduction)
    )


def _plan_packing(spread: Spread, itemsize: int, is_reduction: bool) -> Packing:
    indices = [index for index, numel in enumerate(spread.piece_numels) if numel]
    direct = [index for index in indices if spread.piece_numels[index] * itemsize >= LARGE_PIECE_BYTES]
    if len(indices) - len(direct) == 1:
        direct = indices  # the one that is left has nobody to be packed with
    if is_reduction:  # the tensors themselves are given, and have no padding
        direct = [index for index in direct if not spread.is_padded(index)]
    if spread.num_ranks == 1:
        direct = []
    runs = _plan_runs(spread, direct)
    return Packing(spread, tuple(direct), tuple(runs), runs[-1].packed[1] if runs else 0)


def _plan_runs(spread: Spread, direct: Sequence[int]) -> list[Run]:
    runs: list[Run] = []
    start, packed = 0, 0
    for end in [*direct, len(spread.numels)]:
        run = _run(spread, range(start, end), packed)
        if run.shard[0] < run.shard[1]:
            runs.append(run)
            packed = run.packed[1]
        start = end + 1
    return runs


def _run(spread: Spread, indices: range, packed: int) -> Run:
    if not indices:
        return Run(indices, (0, 0), (0, 0), (packed, packed), False)
    first, last = indices[0], indices[-1]
    shard = (spread.shard_starts[first], spread.shard_starts[last] + spread.piece_numels[last])
    whole = (spread.whole_starts[first], spread.piece_start(last, spread.num_ranks))
    numel = shard[1] - shard[0]
    is_small = len(indices) > 1 and numel * spread.num_ranks <= _SMALL_NUMEL * len(indices)
    return Run(indices, whole, shard, (packed, packed + numel), is_small)


# -- shards and rows --------------------------------------------------------------------


def row_of_shard(packing: Packing, shard: torch.Tensor) -> torch.Tensor:
    """What this rank gives to the packed collective: its pieces, without those that travel alone."""
    if packing.is_all_packed:
        return shard
    return torch.cat([shard[slice(*run.shard)] for run in packing.runs])


def row_into_shard(packing: Packing, row: torch.Tensor, shard: torch.Tensor) -> None:
    """The reverse."""
    for run in packing.runs:
        shard[slice(*run.shard)].copy_(row[slice(*run.packed)])


# -- rows of all ranks, to and from whole tensors ------------------------------------------


def unpack(packing: Packing, rows: torch.Tensor, whole: torch.Tensor) -> None:
    """Spread every rank's row, one behind the other in `rows`, into the whole."""
    spread = packing.spread
    table = rows.view(spread.num_ranks, packing.row_numel)
    for run in packing.runs:
        if run.is_small:
            purpose = ("unpack", run.indices)
            index = _index_on(packing, purpose, rows.device, partial(_unpack_index, packing, run))
            torch.index_select(rows, 0, index, out=whole[slice(*run.whole)])
            continue
        sizes = [spread.piece_numels[i] for i in run.indices]
        sources = table[:, slice(*run.packed)]
        targets = [_region(spread, whole, i) for i in run.indices]
        if rows.is_cpu:
            copy_all(targets, sources.split(sizes, dim=1))
        else:
            torch.split_with_sizes_copy(sources, sizes, 1, out=targets)  # one kernel for all of them


def pack(packing: Packing, tensors: Sequence[torch.Tensor | None], rows: torch.Tensor) -> None:
    """Cut tensors into every rank's row. None counts as zeros, and padding is zeros."""
    spread = packing.spread
    table = rows.view(spread.num_ranks, packing.row_numel)
    for run in packing.runs:
        first, last = run.indices.start, run.indices.stop
        given = [
            rows.new_zeros(numel) if tensor is None else tensor
            for tensor, numel in zip(tensors[first:last], spread.numels[first:last], strict=True)
        ]
        target = table[:, slice(*run.packed)]
        if not run.is_small:
            parts = [_padded(spread, i, tensor) for i, tensor in zip(run.indices, given, strict=True)]
            torch.cat(parts, 1, out=target)
            continue
        index = _index_on(packing, ("pack", run.indices), rows.device, partial(_pack_index, spread, run))
        flat = _flatten([*given, rows.new_zeros(1)])
        if packing.row_numel == run.packed[1] - run.packed[0]:
            torch.index_select(flat, 0, index, out=rows)
        else:
            target.copy_(flat.index_select(0, index).view(target.shape))


def _region(spread: Spread, whole: torch.Tensor, index: int) -> torch.Tensor:
    shape = (spread.num_ranks, spread.piece_numels[index])
    return whole.as_strided(shape, (shape[1], 1), whole.storage_offset() + spread.whole_starts[index])


def _padded(spread: Spread, index: int, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as one row a rank."""
    shape = (spread.num_ranks, spread.piece_numels[index])
    if not spread.is_padded(index):
        return tensor.view(shape)
    padded = tensor.new_zeros(shape)
    padded.view(-1)[: tensor.numel()].copy_(tensor.view(-1))
    return padded


def _flatten(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Tensors of any shape, one behind the other. The one use of a private name, `flatten_dense_tensors`."""
    return torch._C._nn.flatten_dense_tensors(tensors)  # type: ignore[reportPrivateImportUsage]


def _index_on(
    packing: Packing, purpose: object, device: torch.device, make: Callable[[], np.ndarray]
) -> torch.Tensor:
    return packing.spread.kept_or_made(
        ("index", packing.direct, purpose, device), lambda: torch.from_numpy(make()).to(device)
    )


def _unpack_index(packing: Packing, run: Run) -> np.ndarray:
    """For each element of the run in the whole, where it lies in the rows."""
    spread = packing.spread
    lo, hi = run.whole
    kind = np.int32 if spread.num_ranks * packing.row_numel < 2**31 else np.int64
    index = np.zeros(hi - lo, dtype=kind)  # between tensors is room that may hold anything
    row_starts = np.arange(spread.num_ranks, dtype=kind)[:, None] * packing.row_numel
    for i in run.indices:
        numel = spread.piece_numels[i]
        start = spread.shard_starts[i] - run.shard[0] + run.packed[0]
        here = spread.whole_starts[i] - lo
        region = index[here : here + spread.num_ranks * numel].reshape(spread.num_ranks, numel)
        region[:] = row_starts + np.arange(start, start + numel, dtype=kind)
    return index


def _pack_index(spread: Spread, run: Run) -> np.ndarray:
    """For each element of the run's rows, where it lies in the flattened tensors and the zero behind them."""
    numels = [spread.numels[i] for i in run.indices]
    zero = sum(numels)
    table = np.full((spread.num_ranks, run.shard[1] - run.shard[0]), zero, dtype=np.int32)
    start = 0
    for i, numel in zip(run.indices, numels, strict=True):
        padded = np.full(spread.num_ranks * spread.piece_numels[i], zero, dtype=np.int32)
        padded[:numel] = np.arange(start, start + numel)
        column = spread.shard_starts[i] - run.shard[0]
        table[:, column : column + spread.piece_numels[i]] = padded.reshape(spread.num_ranks, -1)
        start += numel
    return table.reshape(-1)

"""All-reduce of sparse COO tensors: gather every rank's entries, then add them up."""

from __future__ import annotations

import torch

from weft.errors import ConfigError, DesyncError
from weft.local.engine import Engine


def all_reduce_sparse(engine: Engine, tensor: torch.Tensor, reduce_name: str, timeout_secs: float) -> None:
    """Sum (or average) a sparse tensor over all ranks, in place.

    Ranks may bring different numbers of entries. Their shapes and numbers of sparse
    dimensions must agree: DesyncError on every rank otherwise.
    """
    if reduce_name not in ("SUM", "AVG"):
        raise ConfigError(f"all_reduce of a sparse tensor: SUM and AVG are there, {reduce_name} is not.")
    movements = engine.device_of(tensor).movements
    mine = tensor.detach().coalesce()
    rows = movements.exchange_counts([mine.sparse_dim(), mine.dim(), mine._nnz()], timeout_secs)
    found: list[list[int]] = [row[:2] for row in rows]
    is_alike = all(row == found[0] for row in found)
    if is_alike:
        found = movements.exchange_counts(list(mine.shape), timeout_secs)
        is_alike = all(row == found[0] for row in found)
        words = [f"brings shape {row}" for row in found]
    else:
        words = [f"brings {row[0]} sparse dimensions of {row[1]}" for row in found]
    if not is_alike:
        raise DesyncError(
            f"all_reduce: the ranks' sparse tensors differ: {movements.by_rank(words)}. No data was moved.",
            movements.odd_ones(words),
        )
    entries = [row[2] for row in rows]
    indices = movements.gather_uneven(
        mine.indices().contiguous().view(-1), [count * mine.sparse_dim() for count in entries], timeout_secs
    )
    value_numel = mine.values()[0].numel() if mine._nnz() else _dense_numel(mine)
    values = movements.gather_uneven(
        mine.values().contiguous().view(-1), [count * value_numel for count in entries], timeout_secs
    )
    dense_shape = mine.shape[mine.sparse_dim() :]
    total = torch.sparse_coo_tensor(
        torch.cat([part.view(mine.sparse_dim(), -1) for part in indices], dim=1),
        torch.cat([part.view(-1, *dense_shape) for part in values]),
        mine.shape,
        check_invariants=False,
    ).coalesce()
    if reduce_name == "AVG":
        total = total / engine.size
    with torch.no_grad():
        tensor.copy_(total)


def _dense_numel(tensor: torch.Tensor) -> int:
    numel = 1
    for length in tensor.shape[tensor.sparse_dim() :]:
        numel *= length
    return numel

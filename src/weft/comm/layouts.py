"""Bring a tensor from one layout over a group to another, by the one collective that does it.

A layout is a placement of torch's on one axis of a mesh: Replicate (every rank has the whole), Shard(dim)
(every rank has a chunk) or Partial (the whole is a sum that hasn't been made). Chunks are cut as torch.chunk
does it: the first ranks have equal ones, the last may have less, or nothing. So ranks' chunks, each padded to
the first one's size and put in a row, have the whole at their beginning.

| from, to  | Replicate  | Shard(b)       |
|-----------|------------|----------------|
| Replicate |            | cut            |
| Shard(a)  | all-gather | all-to-all     |
| Partial   | all-reduce | reduce-scatter |
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as nn_functional

from weft.comm.fresh import all_gathered, all_reduced, done, exchanged, reduce_scattered
from weft.comm.group import state_of
from weft.comm.handle import Handle
from weft.comm.simulated import check_one_rank
from weft.errors import UnsupportedError
from weft.tensors import local_of

_SUM = Partial()


def chunk_sizes(full_size: int, num_chunks: int) -> list[int]:
    """How many of `full_size` rows each rank has."""
    chunk = -(-full_size // num_chunks)
    return [max(0, min(chunk, full_size - rank * chunk)) for rank in range(num_chunks)]


def cut(full: torch.Tensor, dim: int, num_chunks: int, rank: int) -> torch.Tensor:
    """A rank's chunk of a tensor, as a view."""
    sizes = chunk_sizes(full.shape[dim], num_chunks)
    return full.narrow(dim, sum(sizes[:rank]), sizes[rank])


def launch_move(
    local: torch.Tensor,
    have: Placement,
    want: Placement,
    group: ProcessGroup,
    full_size: int | None = None,
    *,
    feature: str = "user",
    label: str = "",
    is_ours: bool = False,
    is_waited: bool = False,
) -> Handle[torch.Tensor]:
    """What the rank has in the wanted layout of a tensor of which it has `local` in another.

    `full_size` is the whole's along the dim of a Shard that it has; chunks are taken to be equal without it.
    With `is_ours` the memory of `local` may be taken for the result; `is_waited` as in collectives.py. Every
    rank of the group calls.
    """
    if have == want or group.size() == 1:
        return done(local)
    if _is_sum(have) and isinstance(want, Replicate):
        return all_reduced(
            local, group=group, feature=feature, label=label, is_ours=is_ours, is_waited=is_waited
        )
    check_one_rank("redistributing a tensor")
    check_layout(have)
    check_layout(want)
    if isinstance(want, Partial):
        raise UnsupportedError(
            f"redistributing to Partial is for internal use only! Got {have}; a tensor becomes a sum over "
            "ranks only by being computed as one."
        )
    if isinstance(have, Partial):
        assert isinstance(want, Shard)
        return _launch_scatter(local, want.dim % local.ndim, group, (feature, label), is_waited)
    if isinstance(have, Shard):
        dim = have.dim % local.ndim
        full_size = local.shape[dim] * group.size() if full_size is None else full_size
        if isinstance(want, Replicate):
            return _launch_gather(local, dim, full_size, group, (feature, label), is_waited)
        assert isinstance(want, Shard)
        return _launch_exchange(local, (dim, want.dim % local.ndim), full_size, group, (feature, label))
    assert isinstance(want, Shard)
    part = cut(local, want.dim % local.ndim, group.size(), state_of(group).rank)
    # Memory of its own: who gets it may write to it, and the whole may be freed.
    return done(part.clone(memory_format=torch.contiguous_format))


def local_in(tensor: DTensor, placements: Sequence[Placement], *, feature: str = "user") -> torch.Tensor:
    """What this rank has of a DTensor in other placements on its mesh. Every rank of the mesh calls.

    On one axis, and where sums are to be made, by the collectives of this file; else as DTensor does it.
    """
    pairs = list(zip(tensor.placements, placements, strict=True))
    axes = [axis for axis, (have, want) in enumerate(pairs) if have != want]
    is_simple = all(pair == (Partial(), Replicate()) for pair in (pairs[axis] for axis in axes)) or (
        len(pairs) == 1 and _is_layout(pairs[0][0]) and _is_layout(pairs[0][1])
    )
    if not is_simple:
        with torch.no_grad():
            return local_of(tensor.redistribute(placements=placements))
    local = local_of(tensor).detach()
    for axis in axes:
        have, want = pairs[axis]
        size = tensor.shape[have.dim] if isinstance(have, Shard) else None
        group = tensor.device_mesh.get_group(axis)
        local = launch_move(local, have, want, group, size, feature=feature, is_waited=True).wait()
    return local


def check_layout(layout: Placement) -> None:
    """Raise for a layout that isn't one of the three."""
    if not _is_layout(layout):
        raise UnsupportedError(
            f"tensors are moved between Replicate(), Shard(dim) and Partial() (a sum); got {layout}. "
            "Redistribute the DTensor to one of them first."
        )


def _is_layout(layout: Placement) -> bool:
    # Not by `type(layout)`: older Dynamos don't know that of a layout that is made while they trace.
    return _is_sum(layout) or isinstance(layout, (Replicate, Shard))


def _is_sum(layout: Placement) -> bool:
    """Whether ranks have addends: not rows of which others have the rest, or norms, which torch adds too."""
    return isinstance(layout, Partial) and layout == _SUM


def _launch_gather(
    local: torch.Tensor,
    dim: int,
    full_size: int,
    group: ProcessGroup,
    about: tuple[str, str],
    is_waited: bool,
) -> Handle[torch.Tensor]:
    (feature, label), num_ranks = about, group.size()
    chunk = -(-full_size // num_ranks)
    padded = pad(local, dim, chunk - local.shape[dim])
    if dim == 0:
        handle = all_gathered(padded, group, feature=feature, label=label, is_waited=is_waited)
        return handle if full_size == chunk * num_ranks else handle.then(lambda row: row[:full_size])
    handle = all_gathered(padded.unsqueeze(0), group, feature=feature, label=label, is_waited=is_waited)
    return handle.then(lambda pile: pile.movedim(0, dim).flatten(dim, dim + 1).narrow(dim, 0, full_size))


def _launch_scatter(
    full: torch.Tensor, dim: int, group: ProcessGroup, about: tuple[str, str], is_waited: bool
) -> Handle[torch.Tensor]:
    feature, label = about
    num_ranks, full_size = group.size(), full.shape[dim]
    chunk = -(-full_size // num_ranks)
    own_size = chunk_sizes(full_size, num_ranks)[state_of(group).rank]
    padded = pad(full, dim, chunk * num_ranks - full_size)
    if dim == 0:
        handle = reduce_scattered(padded, group=group, feature=feature, label=label, is_waited=is_waited)
        return handle if own_size == chunk else handle.then(lambda row: row[:own_size])
    pile = padded.unflatten(dim, (num_ranks, chunk)).movedim(dim, 0)
    handle = reduce_scattered(pile, group=group, feature=feature, label=label, is_waited=is_waited)
    return handle.then(lambda part: part[0].narrow(dim, 0, own_size))


def _launch_exchange(
    local: torch.Tensor, dims: tuple[int, int], full_size: int, group: ProcessGroup, about: tuple[str, str]
) -> Handle[torch.Tensor]:
    """From chunks along the first of the dims to chunks along the second."""
    (given_dim, wanted_dim), (feature, label) = dims, about
    num_ranks, rank = group.size(), state_of(group).rank
    wanted_sizes = chunk_sizes(local.shape[wanted_dim], num_ranks)
    pieces = local.split(wanted_sizes, wanted_dim)
    shapes: list[list[int]] = []
    for size in chunk_sizes(full_size, num_ranks):
        shape = list(local.shape)
        shape[given_dim], shape[wanted_dim] = size, wanted_sizes[rank]
        shapes.append(shape)
    numels = [math.prod(shape) for shape in shapes]
    flat = torch.cat([piece.reshape(-1) for piece in pieces])
    handle = exchanged(flat, numels, [piece.numel() for piece in pieces], group, feature=feature, label=label)

    def assemble(received: torch.Tensor) -> torch.Tensor:
        parts = received.split(numels)
        return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], given_dim)

    return handle.then(assemble)


def pad(tensor: torch.Tensor, dim: int, num_rows: int) -> torch.Tensor:
    """The tensor with so many rows of zeros behind it along the dim."""
    if not num_rows:
        return tensor
    return nn_functional.pad(tensor, [*([0, 0] * (tensor.ndim - 1 - dim)), 0, num_rows])

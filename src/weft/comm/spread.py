"""Collectives between flat shards and whole tensors, as a Spread lays them out.

A group that reads its peers' memory (the local one, on the CPU) does them without a
copy in or out. On any other they are one collective over packed pieces, and one for
each tensor that is large enough to be worth it: see spread_packing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from weft.comm.door import launch_call
from weft.comm.group import resolve_group, state_of
from weft.comm.handle import Handle
from weft.comm.names import all_gather_single, op_name, reduce_scatter_single
from weft.comm.spread_packing import pack, plan_packing, row_into_shard, row_of_shard, unpack
from weft.comm.staging import Borrowed, Staging
from weft.errors import ConfigError
from weft.tensors.spread import Spread

# gloo's reduce-scatter moves as much as its all-reduce. From here on, exchanging pieces and
# adding them up takes less than half of its time.
_EXCHANGE_BYTES = 2**20
_AVERAGING_BACKENDS = ("nccl", "weft")


def all_gather_spread(
    whole: torch.Tensor,
    shard: torch.Tensor,
    spread: Spread,
    group: ProcessGroup | None = None,
    *,
    feature: str = "user",
    name: str = "",
) -> Handle[torch.Tensor]:
    """Fill the flat whole with the pieces of every rank's flat shard. Padding in it may hold anything.

    `name` says whose tensors they are, in records and errors; it must agree between ranks.
    """
    group = resolve_group(group)
    _check("all_gather_spread", "whole", whole, spread.whole_numel, shard.dtype)
    _check("all_gather_spread", "shard", shard, spread.shard_numel, shard.dtype)
    _check_ranks("all_gather_spread", spread, group)
    call = _Gather(whole.data, shard.data, spread, group)
    handle = launch_call(
        "all_gather_spread", group, feature, call.start, whole, (shard,), (whole,), name, label=name
    )
    return handle.then(call.finish) if call.has_end else handle


def reduce_scatter_spread(
    out: torch.Tensor,
    tensors: Sequence[torch.Tensor | None],
    spread: Spread,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    *,
    feature: str = "user",
    name: str = "",
) -> Handle[torch.Tensor]:
    """Reduce whole tensors over all ranks; the flat `out` gets this rank's pieces, and zeros for padding.

    None counts as zeros, and ranks may differ in where they have it. `op` is SUM or AVG.
    """
    group = resolve_group(group)
    _check("reduce_scatter_spread", "out", out, spread.shard_numel, out.dtype)
    _check_ranks("reduce_scatter_spread", spread, group)
    if op_name(op) not in ("sum", "avg"):
        raise ConfigError(f"reduce_scatter_spread: the op must be SUM or AVG, got {op_name(op)}.")
    _check_tensors(tensors, spread, out)
    call = _Reduction(out.data, tensors, spread, op, group)
    handle = launch_call(
        "reduce_scatter_spread",
        group,
        feature,
        call.start,
        out,
        (_all_given(spread, out),),
        (out,),
        f"{op_name(op)}, {name}" if name else op_name(op),
        label=name,
    )
    return handle.then(call.finish) if call.has_end else handle


class _Gather:
    """One all_gather_spread on its way."""

    def __init__(self, whole: torch.Tensor, shard: torch.Tensor, spread: Spread, group: ProcessGroup) -> None:
        self._whole = whole
        self._shard = shard
        self._spread = spread
        self._group = group
        self._packing = plan_packing(spread, shard.element_size(), is_reduction=False)
        self._rows: Staging | None = None
        self._borrowed = Borrowed((whole, shard))

    @property
    def has_end(self) -> bool:
        """Whether something is left to do when the collective is done."""
        return self._rows is not None or self._borrowed.is_on_stream

    def start(self) -> Any:
        """Start the group's own, or what stands in for it."""
        whole, shard, spread, plan = self._whole, self._shard, self._spread, self._packing
        if spread.num_ranks == 1:
            return unpack(plan, shard, whole)
        if _is_native(self._group, shard):
            native: Any = self._group
            return native.all_gather_spread(whole, shard, spread)
        works: list[Any] = []
        for index in plan.direct:
            start, numel = spread.shard_starts[index], spread.piece_numels[index]
            target = whole[spread.whole_starts[index] : spread.piece_start(index, spread.num_ranks)]
            works.append(all_gather_single(target, shard[start : start + numel], self._group))
        if plan.runs:
            self._rows = Staging(self._group, spread.num_ranks * plan.row_numel, shard)
            row = row_of_shard(plan, shard)
            self._borrowed = Borrowed((whole, shard, row))
            works.append(all_gather_single(self._rows.flat, row, self._group))
        return works

    def finish(self, result: torch.Tensor) -> torch.Tensor:
        """Unpack what arrived packed."""
        if self._rows is not None:
            unpack(self._packing, self._rows.flat, self._whole)
            self._rows.give_back()
        self._borrowed.give_back()
        return result


class _Reduction:
    """One reduce_scatter_spread on its way."""

    def __init__(
        self,
        out: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        spread: Spread,
        op: Any,
        group: ProcessGroup,
    ) -> None:
        self._out = out
        self._tensors = tensors
        self._spread = spread
        self._op = op
        self._group = group
        self._packing = plan_packing(spread, out.element_size(), is_reduction=True)
        self._used: list[Staging] = []
        self._borrowed = Borrowed((out, *tensors))
        self._ends: list[Callable[[], object]] = []  # in order, when the collectives are done

    @property
    def has_end(self) -> bool:
        """Whether something is left to do when the collective is done."""
        return bool(self._used or self._ends) or self._borrowed.is_on_stream

    def start(self) -> Any:
        """Start the group's own, or what stands in for it."""
        with torch.no_grad():  # the tensors may be part of a graph
            return self._start()

    def _start(self) -> Any:
        out, spread, plan = self._out, self._spread, self._packing
        if spread.num_ranks == 1:
            return pack(plan, self._tensors, out)
        if _is_native(self._group, out):
            native: Any = self._group
            return native.reduce_scatter_spread(out, self._tensors, spread, self._op)
        backend = _backend_of(self._group, out.device)
        is_divided_here = op_name(self._op) == "avg" and backend not in _AVERAGING_BACKENDS
        op = ReduceOp.SUM if is_divided_here else self._op
        works: list[Any] = []
        for index in plan.direct:
            start, numel = spread.shard_starts[index], spread.piece_numels[index]
            tensor = self._tensors[index]
            source = self._zeros(spread.num_ranks * numel) if tensor is None else tensor.view(-1)
            works.append(self._start_one(out[start : start + numel], source, op, backend))
        if plan.runs:
            rows = self._take(spread.num_ranks * plan.row_numel)
            pack(plan, self._tensors, rows)
            row = out if plan.is_all_packed else self._take(plan.row_numel)
            works.append(self._start_one(row, rows, op, backend))
            if not plan.is_all_packed:
                self._ends.append(lambda: row_into_shard(plan, row, out))
        if is_divided_here:
            self._ends.append(lambda: _divide(out, spread.num_ranks))
        return works

    def _start_one(self, out: torch.Tensor, source: torch.Tensor, op: Any, backend: str) -> Any:
        num_bytes = source.numel() * source.element_size()
        if backend != "gloo" or not source.is_cpu or num_bytes < _EXCHANGE_BYTES:
            return reduce_scatter_single(out, source, op, self._group)
        if self._spread.num_ranks == 2:
            return self._exchange_halves(out, source)
        pieces = self._take(source.numel())
        self._ends.append(lambda: torch.sum(pieces.view(self._spread.num_ranks, -1), 0, out=out))
        return dist.all_to_all_single(pieces, source, group=self._group, async_op=True)

    def _exchange_halves(self, out: torch.Tensor, source: torch.Tensor) -> Any:
        """Between two ranks: give the other its half, and keep the own where it is."""
        rank, numel = state_of(self._group).rank, out.numel()
        theirs = self._take(numel)
        halves = source.view(2, numel)
        self._ends.append(lambda: torch.add(halves[rank], theirs, out=out))
        splits = [0, numel] if rank == 0 else [numel, 0]
        return dist.all_to_all_single(theirs, halves[1 - rank], splits, splits, self._group, async_op=True)

    def _take(self, numel: int) -> torch.Tensor:
        self._used.append(Staging(self._group, numel, self._out))
        return self._used[-1].flat

    def _zeros(self, numel: int) -> torch.Tensor:
        return self._take(numel).zero_()

    def finish(self, result: torch.Tensor) -> torch.Tensor:
        """Do what the collectives left to do."""
        for end in self._ends:
            end()
        for staging in self._used:
            staging.give_back()
        self._borrowed.give_back()
        self._ends.clear()
        return result


def _is_native(group: ProcessGroup, tensor: torch.Tensor) -> bool:
    can_spread = getattr(group, "can_spread", None)  # the local group's
    return can_spread is not None and can_spread(tensor)


def _backend_of(group: ProcessGroup, device: torch.device) -> str:
    """The name of the backend that the group has for the device."""
    config = dist.get_backend_config(group)
    for pair in config.split(","):
        kind, _, backend = pair.partition(":")
        if kind == device.type:
            return backend
    return config


def _divide(out: torch.Tensor, num_ranks: int) -> None:
    if out.is_floating_point() or out.is_complex():
        out.div_(num_ranks)
    else:
        out.div_(num_ranks, rounding_mode="trunc")


def _all_given(spread: Spread, out: torch.Tensor) -> torch.Tensor:
    """What a rank gives, for records: as many elements on every rank, whichever tensors are missing."""
    numel = spread.num_ranks * spread.shard_numel
    return spread.kept_or_made(
        ("given", out.dtype), lambda: torch.empty(numel, dtype=out.dtype, device="meta")
    )


def _check_ranks(op: str, spread: Spread, group: ProcessGroup) -> None:
    if spread.num_ranks != group.size():
        raise ConfigError(f"{op}: the spread is for {spread.num_ranks} ranks, the group has {group.size()}.")


def _check(op: str, what: str, tensor: torch.Tensor, numel: int, dtype: torch.dtype) -> None:
    if tensor.numel() != numel or tensor.dim() != 1 or not tensor.is_contiguous() or tensor.dtype != dtype:
        raise ConfigError(
            f"{op}: {what} must be flat, contiguous, of {numel} elements and {dtype}; it has shape "
            f"{list(tensor.shape)}, strides {list(tensor.stride())} and {tensor.dtype}."
        )


def _check_tensors(tensors: Sequence[torch.Tensor | None], spread: Spread, out: torch.Tensor) -> None:
    if len(tensors) != len(spread.numels):
        raise ConfigError(
            f"reduce_scatter_spread: the spread has {len(spread.numels)} tensors, {len(tensors)} are given."
        )
    given = [tensor for tensor in tensors if tensor is not None]
    numels = spread.numels
    if len(given) < len(tensors):
        numels = tuple(n for n, tensor in zip(numels, tensors, strict=True) if tensor is not None)
    # Hundreds of small tensors are usual, so no loop of Python looks at them unless one is wrong.
    are_contiguous = all(map(torch.Tensor.is_contiguous, given))
    if tuple(map(torch.Tensor.numel, given)) == numels and are_contiguous:
        dtypes = {tensor.dtype for tensor in given}
        if dtypes <= {out.dtype}:
            return
    for index, (tensor, numel) in enumerate(zip(tensors, spread.numels, strict=True)):
        if tensor is None:
            continue
        if tensor.numel() != numel or tensor.dtype != out.dtype or not tensor.is_contiguous():
            raise ConfigError(
                f"reduce_scatter_spread: tensor {index} must be contiguous, of {numel} elements and "
                f"{out.dtype}; it has shape {list(tensor.shape)}, strides {list(tensor.stride())} and "
                f"{tensor.dtype}."
            )

"""Movements between the ranks of a host: gather, broadcast, scatter, all-to-all.

Every rank exposes what it gives and reads what it gets, straight into the tensor
where it is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.errors import DesyncError
from weft.local.calls import Op
from weft.local.meeting import Call, Meeting
from weft.local.memory import Memory


class Movements:
    """The movements of one group on one device. Tensors are flat and contiguous."""

    def __init__(self, meeting: Meeting, memory: Memory, counts_memory: Memory) -> None:
        self._meeting = meeting
        self._memory = memory
        self._counts_memory = counts_memory  # of the CPU, for the sizes that go before the data

    def barrier(self, timeout_secs: float) -> None:
        """Wait until every rank is here."""
        if self._meeting.size > 1:
            with self._meeting.meet(Call(Op.BARRIER, numel=0), self._memory, None, timeout_secs):
                pass

    def all_gather(self, outs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout_secs: float) -> None:
        """Read every rank's tensor into `outs`, by rank."""
        call = Call(Op.ALL_GATHER, tensor.dtype, tensor.numel())
        self._gather(call, outs, tensor, timeout_secs)

    def gather(
        self, outs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int, timeout_secs: float
    ) -> None:
        """Read every rank's tensor into the root's `outs`."""
        call = Call(Op.GATHER, tensor.dtype, tensor.numel(), root=root)
        self._gather(call, outs, tensor, timeout_secs)

    def _gather(
        self, call: Call, outs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, timeout_secs: float
    ) -> None:
        if self._meeting.size == 1:
            if outs is not None:
                self._copy(outs[0], tensor)
            return
        with self._meeting.meet(call, self._memory, tensor, timeout_secs) as round_:
            if outs is not None:
                for out, window in zip(outs, round_.windows(tensor.numel()), strict=True):
                    if window is None:
                        self._copy(out, tensor)
                    else:
                        window.read_into(0, tensor.numel(), out)

    def broadcast(self, tensor: torch.Tensor, root: int, timeout_secs: float) -> None:
        """Read the root's tensor into every rank's."""
        if self._meeting.size == 1:
            return
        is_root = self._meeting.rank == root
        call = Call(Op.BROADCAST, tensor.dtype, tensor.numel(), root=root)
        with self._meeting.meet(call, self._memory, tensor if is_root else None, timeout_secs) as round_:
            if not is_root:
                round_.window(root, tensor.dtype, tensor.numel()).read_into(0, tensor.numel(), tensor)

    def scatter(self, out: torch.Tensor, tensor: torch.Tensor | None, root: int, timeout_secs: float) -> None:
        """Read this rank's part of the root's tensor into `out`."""
        rank, numel = self._meeting.rank, out.numel()
        if self._meeting.size == 1 and tensor is not None:
            return self._copy(out, tensor)
        total = numel * self._meeting.size
        call = Call(Op.SCATTER, out.dtype, total, root=root)
        with self._meeting.meet(call, self._memory, tensor, timeout_secs) as round_:
            lo, hi = rank * numel, (rank + 1) * numel
            if tensor is not None:
                self._copy(out, tensor[lo:hi])
            else:
                round_.window(root, out.dtype, total).read_into(lo, hi, out)
        return None

    def all_to_all(
        self,
        outs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        splits: Sequence[int],
        timeout_secs: float,
    ) -> None:
        """Read from each rank the part of its tensor that is meant for this one.

        `splits` are the element counts of `tensor`'s parts, by rank. Parts that don't
        fit the tensors waiting for them raise DesyncError on every rank.
        """
        rank, size = self._meeting.rank, self._meeting.size
        if size == 1:
            return self._copy(outs[0], tensor)
        given, wanted = self._all_splits(splits, [out.numel() for out in outs], timeout_secs)
        self._check_splits(given, wanted)
        call = Call(Op.ALL_TO_ALL, tensor.dtype, may_inline=False)
        with self._meeting.meet(call, self._memory, tensor, timeout_secs) as round_:
            for peer, out in enumerate(outs):
                start = sum(given[peer][:rank])
                end = start + out.numel()
                if peer == rank:
                    self._copy(out, tensor[start:end])
                elif out.numel():
                    round_.window(peer, tensor.dtype, sum(given[peer])).read_into(start, end, out)
        return None

    def _all_splits(
        self, given: Sequence[int], wanted: Sequence[int], timeout_secs: float
    ) -> tuple[list[list[int]], list[list[int]]]:
        rows = self.exchange_counts([*given, *wanted], timeout_secs)
        size = self._meeting.size
        return [row[:size] for row in rows], [row[size:] for row in rows]

    def exchange_counts(
        self, counts: Sequence[int], timeout_secs: float, op: Op = Op.ALL_TO_ALL
    ) -> list[list[int]]:
        """Every rank's integers, by rank, for a collective that needs them or for their own sake."""
        mine = torch.tensor(counts, dtype=torch.int64)
        if self._meeting.size == 1:
            return [list(counts)]
        outs = torch.empty(self._meeting.size, len(counts), dtype=torch.int64)
        outs[self._meeting.rank] = mine
        call = Call(op, torch.int64, mine.numel())
        with self._meeting.meet(call, self._counts_memory, mine, timeout_secs) as round_:
            for out, window in zip(outs, round_.windows(mine.numel()), strict=True):
                if window is not None:
                    window.read_into(0, mine.numel(), out)
        return outs.tolist()

    def _check_splits(self, given: list[list[int]], wanted: list[list[int]]) -> None:
        size = self._meeting.size
        odd = {
            rank
            for source in range(size)
            for target in range(size)
            if given[source][target] != wanted[target][source]
            for rank in (source, target)
        }
        if odd:
            rows = [f"gives {given[rank]} elements, has room for {wanted[rank]}" for rank in range(size)]
            raise DesyncError(
                f"all_to_all: what ranks give and what ranks have room for don't fit: {self.by_rank(rows)}. "
                "The input splits of one rank must be the output splits of the others. No data was moved.",
                [self._meeting.roster.members[rank].global_rank for rank in sorted(odd)],
            )

    def by_rank(self, rows: Sequence[object]) -> str:
        """What each rank said, for an error."""
        roster = self._meeting.roster
        return "; ".join(f"{roster.name(rank)} {row}" for rank, row in enumerate(rows))

    def odd_ones(self, told: Sequence[object]) -> list[int]:
        """The ranks, of the world, that say something else than most."""
        return self._meeting.roster.odd_ones(told)

    def check_same_count(self, count: int, what: str, timeout_secs: float) -> None:
        """Raise DesyncError on every rank if they bring different counts of something."""
        rows = [row[0] for row in self.exchange_counts([count], timeout_secs)]
        if len(set(rows)) > 1:
            raise DesyncError(
                f"{what}: ranks bring different numbers of tensors: "
                f"{self.by_rank([f'brings {row}' for row in rows])}. No data was moved.",
                self.odd_ones(rows),
            )

    def gather_uneven(
        self, tensor: torch.Tensor, numels: Sequence[int], timeout_secs: float
    ) -> list[torch.Tensor]:
        """Every rank's flat tensor, of `numels[rank]` elements, copied here."""
        outs = [torch.empty(numel, dtype=tensor.dtype, device=tensor.device) for numel in numels]
        outs[self._meeting.rank].copy_(tensor)
        if self._meeting.size == 1:
            return outs
        call = Call(Op.ALL_REDUCE_SPARSE, tensor.dtype, may_inline=False)
        with self._meeting.meet(call, self._memory, tensor, timeout_secs) as round_:
            for peer, out in enumerate(outs):
                if peer != self._meeting.rank and out.numel():
                    round_.window(peer, tensor.dtype, out.numel()).read_into(0, out.numel(), out)
        return outs

    def _copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        if out.data_ptr() != source.data_ptr():
            out.copy_(source)

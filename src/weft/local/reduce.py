"""Reductions between the ranks of a host: all-reduce, reduce, reduce-scatter.

A large tensor is cut into one share a rank. Each rank reads its share from every
peer, folds, and writes the result where it is wanted, piece by piece so that the
data stays in the core's cache. A small tensor is read whole by every rank: one
wait instead of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from weft.local.arithmetic import REDUCE_NUMBER, Fold
from weft.local.calls import Op
from weft.local.meeting import Call, Meeting, Round
from weft.local.memory import Memory, Share
from weft.local.windows import Scratch, Window


def plan_pieces(lo: int, hi: int, piece_numel: int) -> Iterator[tuple[int, int]]:
    """Cut lo..hi into pieces of at most `piece_numel` elements."""
    for start in range(lo, hi, piece_numel):
        yield start, min(start + piece_numel, hi)


class Reductions:
    """The reductions of one group on one device."""

    def __init__(self, meeting: Meeting, memory: Memory) -> None:
        self._meeting = meeting
        self._memory = memory

    def all_reduce(self, tensor: torch.Tensor, fold: Fold, factor: float, timeout_secs: float) -> None:
        """Fold every rank's flat tensor into every rank's."""
        if self._meeting.size == 1:
            return self._reduce_alone(tensor, fold, factor)
        own = self._memory.plan_share(tensor.numel(), self._meeting.size, self._meeting.rank)
        call = _reduce_call(Op.ALL_REDUCE, tensor, fold, factor, own, is_written=True)
        with self._meeting.meet(call, self._memory, tensor, timeout_secs) as round_:
            folding = _Folding(self._memory.scratch, round_, fold, tensor.numel())
            if round_.is_inline:
                folding.piece_into(0, tensor.numel(), tensor, tensor)
                return None
            for start, end in plan_pieces(*own, self._piece_numel(tensor)):
                here = tensor[start:end]
                folding.piece_into(start, end, here, here)
                for window in folding.peers:
                    window.write(start, here)
        return None

    def reduce(self, tensor: torch.Tensor, fold: Fold, factor: float, root: int, timeout_secs: float) -> None:
        """Fold every rank's flat tensor into the root's; the others keep theirs."""
        if self._meeting.size == 1:
            return self._reduce_alone(tensor, fold, factor)
        is_root = self._meeting.rank == root
        own = self._memory.plan_share(tensor.numel(), self._meeting.size, self._meeting.rank)
        call = _reduce_call(Op.REDUCE, tensor, fold, factor, own, is_written=is_root, root=root)
        with self._meeting.meet(call, self._memory, tensor, timeout_secs) as round_:
            folding = _Folding(self._memory.scratch, round_, fold, tensor.numel())
            if round_.is_inline:
                if is_root:
                    folding.piece_into(0, tensor.numel(), tensor, tensor)
                return None
            for start, end in plan_pieces(*own, self._piece_numel(tensor)):
                here = tensor[start:end]
                if is_root:
                    folding.piece_into(start, end, here, here)
                else:
                    result = folding.piece(start, end, here)
                    folding.window(root).write(start, result.to(tensor.dtype))
        return None

    def reduce_scatter(
        self, out: torch.Tensor, tensor: torch.Tensor, fold: Fold, factor: float, timeout_secs: float
    ) -> None:
        """Fold every rank's flat tensor; rank r keeps its r-th part in `out`."""
        numel = out.numel()
        start_of_part = self._meeting.rank * numel
        if self._meeting.size == 1:
            out.copy_(tensor)
            return self._reduce_alone(out, fold, factor)
        own = (start_of_part, start_of_part + numel)
        call = _reduce_call(Op.REDUCE_SCATTER, tensor, fold, factor, own)
        with self._meeting.meet(call, self._memory, tensor, timeout_secs) as round_:
            folding = _Folding(self._memory.scratch, round_, fold, tensor.numel())
            for start, end in plan_pieces(0, numel, self._piece_numel(tensor)):
                there = (start_of_part + start, start_of_part + end)
                folding.piece_into(*there, tensor[slice(*there)], out[start:end])
        return None

    def _reduce_alone(self, tensor: torch.Tensor, fold: Fold, factor: float) -> None:
        if fold.is_scaled:
            tensor.mul_(factor)

    def _piece_numel(self, tensor: torch.Tensor) -> int:
        return max(1, self._memory.piece_bytes // tensor.element_size())


class _Folding:
    """The folding of one round: reads every rank's pieces, in rank order."""

    __slots__ = ("_by_rank", "_factors", "_fold", "_is_simple", "_scratch", "peers")

    def __init__(self, scratch: Scratch, round_: Round, fold: Fold, numel: int) -> None:
        self._scratch = scratch
        self._fold = fold
        self._by_rank: Sequence[Window | None] = round_.windows(numel)
        self.peers = [window for window in self._by_rank if window is not None]
        self._factors = round_.factors() if fold.is_scaled else None
        # Two ranks: the operators are commutative, so the order can't show.
        self._is_simple = len(self.peers) == 1 and fold.is_plain

    def window(self, rank: int) -> Window:
        """A peer's window."""
        window = self._by_rank[rank]
        assert window is not None
        return window

    def piece_into(self, lo: int, hi: int, own: torch.Tensor, out: torch.Tensor) -> None:
        """Fold elements lo..hi of every rank into `out`; `own` are this rank's."""
        if self._is_simple:
            self._fold.combine(own, self.peers[0].read(lo, hi), out=out)
        elif self._fold.is_plain:
            self._plain_piece_into(lo, hi, own, out)
        else:
            out.copy_(self.piece(lo, hi, own))

    def _plain_piece_into(self, lo: int, hi: int, own: torch.Tensor, out: torch.Tensor) -> None:
        """The same with the fewest passes over memory. `out` may be `own`: it is written last."""
        total = self._scratch.get("total", own.dtype, hi - lo)
        first, *rest = self._by_rank
        so_far = own
        if first is not None:
            so_far = first.read_kept(lo, hi, total)
        for window in rest:
            part = own if window is None else window.read(lo, hi)
            target = out if window is rest[-1] else total
            so_far = self._fold.combine(so_far, part, out=target)

    def piece(self, lo: int, hi: int, own: torch.Tensor) -> torch.Tensor:
        """Fold elements lo..hi of every rank into scratch memory, and return that."""
        fold = self._fold
        total = self._scratch.get("total", fold.wide_dtype, hi - lo)
        for rank, window in enumerate(self._by_rank):
            part = own if window is None else window.read(lo, hi)
            factor = 1.0 if self._factors is None else self._factors[rank]
            if rank == 0:
                fold.start(part, factor, total)
            else:
                fold.add(total, part, factor)
        fold.finish(total)
        return total


def _reduce_call(
    op: Op,
    tensor: torch.Tensor,
    fold: Fold,
    factor: float,
    own: Share,
    *,
    is_written: bool = False,
    root: int = -1,
) -> Call:
    return Call(
        op,
        tensor.dtype,
        tensor.numel(),
        REDUCE_NUMBER[fold.name],
        root=root,
        factor=factor,
        is_written=is_written,
        own=own,
    )

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
from weft.local.windows import Window


def plan_pieces(lo: int, hi: int, piece_numel: int) -> Iterator[tuple[int, int]]:
    """Cut lo..hi into pieces of at most `piece_numel` elements."""
    for start in range(lo, hi, piece_numel):
        yield start, min(start + piece_numel, hi)


class Reductions:
    """The reductions of one group on one device."""

    def __init__(self, meeting: Meeting, memory: Memory) -> None:
        self._meeting = meeting
        self._memory = memory
        self._scratch: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    def all_reduce(self, tensor: torch.Tensor, fold: Fold, factor: float, timeout_secs: float) -> None:
        """Fold every rank's flat tensor into every rank's."""
        if self._meeting.size == 1:
            return self._reduce_alone(tensor, fold, factor)
        own = self._memory.plan_share(tensor.numel(), self._meeting.size, self._meeting.rank)
        call = _reduce_call(Op.ALL_REDUCE, tensor, fold, factor, own, is_written=True)
        with self._meeting.meet(call, self._memory, tensor, timeout_secs) as round_:
            folding = _Folding(self, round_, fold, tensor.numel())
            if round_.is_inline:
                tensor.copy_(folding.piece(0, tensor.numel(), tensor))
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
            folding = _Folding(self, round_, fold, tensor.numel())
            if round_.is_inline:
                if is_root:
                    tensor.copy_(folding.piece(0, tensor.numel(), tensor))
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
            folding = _Folding(self, round_, fold, tensor.numel())
            for start, end in plan_pieces(0, numel, self._piece_numel(tensor)):
                there = (start_of_part + start, start_of_part + end)
                folding.piece_into(*there, tensor[slice(*there)], out[start:end])
        return None

    def _reduce_alone(self, tensor: torch.Tensor, fold: Fold, factor: float) -> None:
        if fold.is_scaled:
            tensor.mul_(factor)

    def _piece_numel(self, tensor: torch.Tensor) -> int:
        return max(1, self._memory.piece_bytes // tensor.element_size())

    def scratch(self, dtype: torch.dtype, which: int, numel: int, device: torch.device) -> torch.Tensor:
        """A buffer of at least `numel` elements, kept for the next call."""
        buffer = self._scratch.get((dtype, which))
        if buffer is None or buffer.numel() < numel:
            buffer = self._scratch[dtype, which] = torch.empty(numel, dtype=dtype, device=device)
        return buffer[:numel]


class _Folding:
    """The folding of one round: reads every rank's pieces, in rank order."""

    def __init__(self, reductions: Reductions, round_: Round, fold: Fold, numel: int) -> None:
        self._reductions = reductions
        self._fold = fold
        self._by_rank: Sequence[Window | None] = round_.windows(numel)
        self.peers = [window for window in self._by_rank if window is not None]
        self._factors = round_.factors() if fold.is_scaled else [1.0] * len(self._by_rank)

    def window(self, rank: int) -> Window:
        """A peer's window."""
        window = self._by_rank[rank]
        assert window is not None
        return window

    def piece_into(self, lo: int, hi: int, own: torch.Tensor, out: torch.Tensor) -> None:
        """Fold elements lo..hi of every rank into `out`; `own` are this rank's."""
        if self._fold.is_plain and len(self.peers) == 1:
            # Two ranks: the operators are commutative, so the order can't show.
            scratch = self._reductions.scratch(own.dtype, 0, hi - lo, own.device)
            self._fold.combine(own, self.peers[0].read(lo, hi, scratch), out=out)
        else:
            out.copy_(self.piece(lo, hi, own))

    def piece(self, lo: int, hi: int, own: torch.Tensor) -> torch.Tensor:
        """Fold elements lo..hi of every rank into a scratch buffer, and return that."""
        fold = self._fold
        scratch = self._reductions.scratch(own.dtype, 0, hi - lo, own.device)
        total = self._reductions.scratch(fold.wide_dtype, 1, hi - lo, own.device)
        for rank, (window, factor) in enumerate(zip(self._by_rank, self._factors, strict=True)):
            part = own if window is None else window.read(lo, hi, scratch)
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

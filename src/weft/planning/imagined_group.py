# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false
# torch's stubs of ProcessGroup leave out the options objects that c10d passes.
"""A process group whose other ranks are imagined: each of them says and does what this one does.

Nothing moves but values that are known (imagined_values.py), which are few: sums of them are this rank's
times the number of ranks, gathered rows are all alike. A Timeline hears of every call and of every wait, and
says how long it takes.

Private names of torch, used here and nowhere else: `torch.utils._python_dispatch._disable_current_modes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes

from weft.local.labels import Labels
from weft.planning.imagined_values import is_known, set_known

BACKEND = "imagined"
Tensors = list[torch.Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Move:
    """A collective as links see it. `num_bytes` are those of the whole: what is reduced, what is gathered."""

    op: str  # "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "control"
    num_bytes: int
    group: dist.ProcessGroup


class Timeline(Protocol):
    """Whoever says how long collectives take."""

    def launched(self, move: Move) -> float:
        """A collective is called now; when will it be done?"""
        ...

    def waited(self, end_secs: float) -> None:
        """The rank waits until then."""
        ...

    def owed(self, end_secs: float) -> None:
        """The rank waits until then before its backward ends."""
        ...

    def aside(self) -> AbstractContextManager[None]:
        """What is done in the block happens beside the computation, one block after the other."""
        ...


class ImaginedWork(dist.Work):
    """A collective that is done whenever somebody asks, at a time that the timeline knows."""

    def __init__(self, timeline: Timeline, end_secs: float, results: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._timeline = timeline
        self._end_secs = end_secs
        self._results = list(results)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The rank's time goes on to the end of the collective."""
        self._timeline.waited(self._end_secs)
        return True

    def is_completed(self) -> bool:
        """Always: nothing has to move."""
        return True

    def get_future(self) -> Future[Any]:
        """A future that has the result: whoever uses it in backward is behind it when backward ends."""
        self._timeline.owed(self._end_secs)
        future: Future[Any] = Future()
        future.set_result(self._results)
        return future


class ImaginedGroup(Labels, dist.ProcessGroup):
    """This rank, and peers that do as it does."""

    has_imagined_peers = True  # see weft.comm.group

    def __init__(self, rank: int, size: int, timeline: Timeline, *, is_local: bool) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._rank_here = rank
        self._num_ranks = size
        self._timeline = timeline
        self._is_local = is_local  # does what weft's local group does: no packing

    def getBackendName(self) -> str:
        """The name under which c10d knows the backend."""
        return BACKEND

    def rank(self) -> int:
        """This rank in the group."""
        return self._rank_here

    def size(self) -> int:
        """How many ranks the group would have."""
        return self._num_ranks

    def shutdown(self) -> None:
        """Nothing is there to end."""

    def run_aside(self, body: Callable[[], T]) -> T:
        """Run a gradient hook's body as if on a thread of its own."""
        with self._timeline.aside():
            return body()

    # -- what weft.comm asks beside c10d's collectives --

    def exchange_rows(self, rows: torch.Tensor, mine: torch.Tensor) -> dist.Work:
        """All rows are this rank's, which is how the caller has filled them."""
        return self._move("control", rows, [rows])

    def can_spread(self, tensor: torch.Tensor) -> bool:
        """Whether shards and wholes move without being packed."""
        return self._is_local

    def all_gather_spread(self, whole: torch.Tensor, shard: torch.Tensor, spread: Any) -> dist.Work:
        """Gather shards as the local group does."""
        return self._move("all_gather", whole, [whole])

    def reduce_scatter_spread(self, out: torch.Tensor, tensors: Any, spread: Any, op: Any) -> dist.Work:
        """Reduce wholes as the local group does."""
        return self._moved("reduce_scatter", spread.num_ranks * _num_bytes(out), [out])

    # -- c10d's collectives --

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Sums become this rank's values, times the number of ranks."""
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        is_sum = opts is None or opts.reduceOp == dist.ReduceOp.SUM
        for tensor in tensors:
            if is_sum and is_known(tensor):
                _really(lambda tensor=tensor: tensor.mul_(self._num_ranks))
        return self._moved("all_reduce", sum(map(_num_bytes, tensors)), tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """The same for several."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """As an all-reduce; only the root may look."""
        return self._moved("broadcast", sum(map(_num_bytes, tensors)), tensors)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """The root has what this rank has."""
        return self._moved("broadcast", sum(map(_num_bytes, tensors)), tensors)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Every rank has this rank's tensor."""
        for outs, tensor in zip(outputs, inputs, strict=True):
            for out in outs:
                _copy_known(out, tensor, 1)
        outs = [out for some in outputs for out in some]
        return self._moved("all_gather", sum(map(_num_bytes, outs)), outs)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Every rank has this rank's tensor."""
        _copy_known(output, input, self._num_ranks)
        return self._move("all_gather", output, [output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """The same for several."""
        return self._moved("all_gather", sum(map(_num_bytes, outputs)), outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        """This rank's part of the sum."""
        return self._moved(
            "reduce_scatter", sum(_num_bytes(part) for parts in inputs for part in parts), outputs
        )

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """This rank's part of the sum."""
        return self._move("reduce_scatter", input, [output])

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """The same for several."""
        return self._moved("reduce_scatter", sum(map(_num_bytes, inputs)), outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """A part from each rank."""
        return self._moved("all_to_all", sum(map(_num_bytes, inputs)), outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Any,
        input_splits: Any,
        opts: Any = None,
    ) -> dist.Work:
        """A part from each rank."""
        return self._move("all_to_all", input, [output])

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Every rank's tensor at the root."""
        return self._moved("all_gather", self._num_ranks * sum(map(_num_bytes, inputs)), inputs)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        """The root's tensors, one to each rank."""
        return self._moved("broadcast", self._num_ranks * sum(map(_num_bytes, outputs)), outputs)

    def barrier(self, opts: Any = None) -> dist.Work:
        """All are there."""
        return self._moved("control", 0, [])

    def _move(self, op: str, whole: torch.Tensor, results: Tensors) -> dist.Work:
        return self._moved(op, _num_bytes(whole), results)

    def _moved(self, op: str, num_bytes: int, results: Tensors) -> dist.Work:
        end_secs = self._timeline.launched(Move(op, num_bytes, self))
        return ImaginedWork(self._timeline, end_secs, results)

    # Before torch 2.13 c10d called these by other names.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy_known(out: torch.Tensor, tensor: torch.Tensor, times: int) -> None:
    if is_known(tensor):
        _really(lambda: out.copy_(tensor.reshape(-1).repeat(times).view(out.shape)))
        set_known(out, True)
    else:
        set_known(out, False)


def _really(do: Callable[[], object]) -> None:
    """Do it, whoever imagines: it is no operation of the model."""
    with _disable_current_modes(), torch.no_grad():
        do()

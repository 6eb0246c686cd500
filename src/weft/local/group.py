# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false
# torch's stubs of ProcessGroup name parameters that c10d never passes by name, and
# leave out the options objects that it does pass.
"""The process group of ranks that share a host, as c10d sees it.

This file turns c10d's calls (lists, options, tensors of any stride) into flat,
contiguous work for reduce.py and move.py, and hands it to the lane. What a
collective does is written there; how ranks meet, in meeting.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.door import check_movable
from weft.local import arguments, spread
from weft.local.arithmetic import plan_fold, resolve_reduce_op, with_arithmetic
from weft.local.calls import Op
from weft.local.engine import Engine
from weft.local.flat import Flat, flat_input, flat_outputs
from weft.local.labels import Labels
from weft.local.mailbox import ANY_SOURCE
from weft.local.sparse import all_reduce_sparse
from weft.local.work import Lane, LocalWork

Tensors = list[torch.Tensor]


class LocalGroup(Labels, dist.ProcessGroup):
    """Ranks of one host: processes through shared memory, threads through their own, GPUs through IPC."""

    def __init__(self, engine: Engine, timeout: timedelta) -> None:
        super().__init__(engine.rank, engine.size)  # pyright: ignore[reportCallIssue]
        self.engine = engine
        self._timeout_secs = timeout.total_seconds()
        self._lane = Lane(f"weft-lane-{engine.rank}", engine.late_ranks)

    # -- what the group is ------------------------------------------------------

    def getBackendName(self) -> str:
        """The name under which c10d knows the backend."""
        return "weft"

    def rank(self) -> int:
        """This process's rank in the group."""
        return self.engine.rank

    def size(self) -> int:
        """How many ranks the group has."""
        return self.engine.size

    def set_timeout(self, timeout: timedelta) -> None:
        """From now on, wait this long for the other ranks."""
        self._timeout_secs = timeout.total_seconds()

    def allocate(
        self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """A zeroed tensor that peers read and write in place: no copy in, no copy out.

        It is a call of this rank alone. The memory is freed with the last view of it.
        """
        return self.engine.allocate(shape, dtype, torch.device(device))

    def late_ranks(self) -> list[int]:
        """The ranks, of the world, that the collective under way waits for."""
        return self.engine.late_ranks()

    def abort(self, reason: str = "the group was aborted") -> None:
        """Close the group for every rank: their pending and later calls raise PeerError."""
        self.engine.abort(reason)

    def shutdown(self) -> None:
        """Leave the group, after the works that are under way."""
        if self.engine.is_in_its_process:
            self._lane.close(self.engine.abort)
            self.engine.close("it was destroyed")

    # -- reductions ---------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce the tensor over all ranks, in place."""
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        tensor = arguments.only(tensors, Op.ALL_REDUCE)
        options = opts or arguments.DEFAULTS
        if tensor.layout is torch.sparse_coo:
            name, _ = resolve_reduce_op(options.reduceOp)
            return self._submit(
                Op.ALL_REDUCE_SPARSE,
                tensors,
                options,
                lambda secs: all_reduce_sparse(self.engine, tensor, name, secs),
            )
        return self._submit(Op.ALL_REDUCE, tensors, options, self._all_reduce_task(tensors, options))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce several tensors over all ranks, in place."""
        options = opts or arguments.DEFAULTS
        task = self._all_reduce_task(tensors, options)
        return self._submit(Op.ALL_REDUCE, tensors, options, task, num_tensors=len(tensors))

    def _all_reduce_task(self, tensors: Tensors, options: Any) -> Callable[[float], None]:
        name, factor = resolve_reduce_op(options.reduceOp)
        tensors = [with_arithmetic(arguments.dense(tensor, Op.ALL_REDUCE), name) for tensor in tensors]
        folds = [plan_fold(name, tensor.dtype, self.engine.size) for tensor in tensors]

        def task(secs: float) -> None:
            for tensor, fold in zip(tensors, folds, strict=True):
                on = self.engine.device_of(tensor)
                with Flat(tensor) as flat:
                    on.reductions.all_reduce(flat, fold, factor, secs)

        return task

    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce the tensor over all ranks into the root's."""
        options = opts or arguments.DEFAULTS
        name, factor = resolve_reduce_op(options.reduceOp)
        tensor = arguments.dense(arguments.only(tensors, Op.REDUCE), Op.REDUCE)
        tensor = with_arithmetic(tensor, name)
        fold = plan_fold(name, tensor.dtype, self.engine.size)
        root = self._rank_of(options.rootRank, Op.REDUCE)

        def task(secs: float) -> None:
            on = self.engine.device_of(tensor)
            with Flat(tensor, is_written=root == self.rank()) as flat:
                on.reductions.reduce(flat, fold, factor, root, secs)

        return self._submit(Op.REDUCE, tensors, options, task)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        """Reduce a list of tensors, one a rank; keep this rank's."""
        out = arguments.only(outputs, Op.REDUCE_SCATTER)
        parts = arguments.only(inputs, Op.REDUCE_SCATTER)
        self._check_parts(parts, out.numel(), out.dtype, Op.REDUCE_SCATTER)
        return self._reduce_scatter([out], [parts], opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Reduce a tensor and keep this rank's part of it."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Reduce several tensors and keep this rank's part of each."""
        for out, tensor in zip(outputs, inputs, strict=True):
            self._check_whole(whole=tensor, part=out, op=Op.REDUCE_SCATTER)
        return self._reduce_scatter(outputs, [[tensor] for tensor in inputs], opts)

    def _reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        options = opts or arguments.DEFAULTS
        name, factor = resolve_reduce_op(options.reduceOp)
        outs = [with_arithmetic(arguments.dense(out, Op.REDUCE_SCATTER), name) for out in outputs]
        inputs = [[with_arithmetic(part, name) for part in parts] for parts in inputs]
        folds = [plan_fold(name, out.dtype, self.engine.size) for out in outs]

        def task(secs: float) -> None:
            for out, parts, fold in zip(outs, inputs, folds, strict=True):
                on = self.engine.device_of(out)
                with Flat(out, is_read=False) as flat:
                    on.reductions.reduce_scatter(flat, flat_input(parts), fold, factor, secs)

        return self._submit(Op.REDUCE_SCATTER, outputs, options, task, num_tensors=len(outs))

    # -- movements ------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Copy the root's tensor to every rank."""
        tensor = arguments.dense(arguments.only(tensors, Op.BROADCAST), Op.BROADCAST)
        options = opts or arguments.DEFAULTS
        root = self._rank_of(options.rootRank, Op.BROADCAST)

        def task(secs: float) -> None:
            on, is_root = self.engine.device_of(tensor), root == self.rank()
            with Flat(tensor, is_read=is_root, is_written=not is_root) as flat:
                on.movements.broadcast(flat, root, secs)

        return self._submit(Op.BROADCAST, tensors, options, task)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Copy every rank's tensor into a list on every rank."""
        tensor = arguments.only(inputs, Op.ALL_GATHER)
        outs = arguments.only(outputs, Op.ALL_GATHER)
        self._check_parts(outs, tensor.numel(), tensor.dtype, Op.ALL_GATHER)
        return self._all_gather([(outs, tensor)], outs, opts)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Copy several tensors of every rank; `outputs[rank][i]` gets the i-th."""
        pairs = [([outs[i] for outs in outputs], tensor) for i, tensor in enumerate(inputs)]
        for outs, tensor in pairs:
            self._check_parts(outs, tensor.numel(), tensor.dtype, Op.ALL_GATHER)
        return self._all_gather(pairs, [out for outs in outputs for out in outs], opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        """Copy every rank's tensor into one tensor on every rank."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Copy several tensors of every rank, each into one tensor."""
        for out, tensor in zip(outputs, inputs, strict=True):
            self._check_whole(whole=out, part=tensor, op=Op.ALL_GATHER)

        def task(secs: float) -> None:
            for out, tensor in zip(outputs, inputs, strict=True):
                on = self.engine.device_of(tensor)
                with Flat(out, is_read=False) as flat:
                    parts = flat.chunk(self.size()) if flat.numel() else [flat] * self.size()
                    on.movements.all_gather(parts, flat_input([tensor]), secs)

        options = opts or arguments.DEFAULTS
        return self._submit(Op.ALL_GATHER, outputs, options, task, num_tensors=len(inputs))

    def _all_gather(
        self, pairs: Sequence[tuple[Tensors, torch.Tensor]], results: Tensors, opts: Any
    ) -> dist.Work:
        def task(secs: float) -> None:
            for outs, tensor in pairs:
                on = self.engine.device_of(tensor)
                with flat_outputs(outs) as flats:
                    on.movements.all_gather(flats, flat_input([tensor]), secs)

        options = opts or arguments.DEFAULTS
        return self._submit(Op.ALL_GATHER, results, options, task, num_tensors=len(pairs))

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        """Copy every rank's tensor into a list on the root."""
        options = opts or arguments.DEFAULTS
        tensor = arguments.only(inputs, Op.GATHER)
        root = self._rank_of(options.rootRank, Op.GATHER)
        outs: Tensors | None = None
        if root == self.rank():
            outs = arguments.only(outputs, Op.GATHER)
            self._check_parts(outs, tensor.numel(), tensor.dtype, Op.GATHER)

        def task(secs: float) -> None:
            on = self.engine.device_of(tensor)
            if outs is None:
                return on.movements.gather(None, flat_input([tensor]), root, secs)
            with flat_outputs(outs) as flats:
                return on.movements.gather(flats, flat_input([tensor]), root, secs)

        return self._submit(Op.GATHER, outs or [], options, task, device_of=tensor)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> dist.Work:
        """Copy the root's tensors, one to each rank."""
        options = opts or arguments.DEFAULTS
        out = arguments.only(outputs, Op.SCATTER)
        root = self._rank_of(options.rootRank, Op.SCATTER)
        parts: Tensors | None = None
        if root == self.rank():
            parts = arguments.only(inputs, Op.SCATTER)
            self._check_parts(parts, out.numel(), out.dtype, Op.SCATTER)

        def task(secs: float) -> None:
            on = self.engine.device_of(out)
            with Flat(out, is_read=False) as flat:
                tensor = None if parts is None else flat_input(parts)
                on.movements.scatter(flat, tensor, root, secs)

        return self._submit(Op.SCATTER, outputs, options, task)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Give the i-th tensor to rank i; get one from each rank."""
        for tensors in (outputs, inputs):
            self._check_parts(tensors, None, inputs[0].dtype, Op.ALL_TO_ALL)

        def task(secs: float) -> None:
            on = self.engine.device_of(inputs[0])
            with flat_outputs(outputs) as flats:
                splits = [tensor.numel() for tensor in inputs]
                on.movements.all_to_all(flats, flat_input(inputs), splits, secs)

        return self._submit(Op.ALL_TO_ALL, outputs, opts or arguments.DEFAULTS, task)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Give the i-th part of a tensor (along dim 0) to rank i; get one from each rank."""
        out_numels = arguments.split_numels(output, output_splits, self.engine.size, "output")
        in_numels = arguments.split_numels(input, input_splits, self.engine.size, "input")

        def task(secs: float) -> None:
            on = self.engine.device_of(output)
            with Flat(output, is_read=False) as flat:
                outs = flat.split(out_numels)
                on.movements.all_to_all(outs, flat_input([input]), in_numels, secs)

        return self._submit(Op.ALL_TO_ALL, [output], opts or arguments.DEFAULTS, task)

    # -- messages ---------------------------------------------------------------------

    def send(self, tensors: Tensors, target: int, tag: int) -> dist.Work:
        """Send a tensor to a rank. Done when it is on its way."""
        tensor = arguments.dense(arguments.only(tensors, Op.SEND), Op.SEND)
        self._rank_of(target, Op.SEND)
        self.engine.mailbox.send(flat_input([tensor]).cpu(), target, tag, self._timeout_secs)
        work = LocalWork("send", tensors)
        work.finish()
        return work

    def recv(self, tensors: Tensors, source: int, tag: int) -> dist.Work:
        """Receive a tensor from a rank."""
        tensor = arguments.dense(arguments.only(tensors, Op.RECV), Op.RECV)
        self._rank_of(source, Op.RECV)
        return self.engine.mailbox.receive(tensor, source, tag, self._timeout_secs)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        """Receive a tensor from whichever rank sends first."""
        tensor = arguments.dense(arguments.only(tensors, Op.RECV), Op.RECV)
        return self.engine.mailbox.receive(tensor, ANY_SOURCE, tag, self._timeout_secs)

    # -- barriers ---------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for every rank."""
        options = opts or arguments.DEFAULTS
        return self._submit(Op.BARRIER, [], options, self.engine.cpu.movements.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the ranks that did not come. All of them, always."""
        self.barrier(arguments.Options(timeout=timeout or arguments.UNSET, asyncOp=False)).wait()

    # -- how a call runs ---------------------------------------------------------------

    def _submit(
        self,
        op: Op,
        results: Tensors,
        options: Any,
        task: Callable[[float], None],
        *,
        num_tensors: int = 1,
        device_of: torch.Tensor | None = None,  # where it is not that of the results
    ) -> LocalWork:
        check_movable(results)  # bare torch.distributed comes here without passing the door
        secs = options.timeout.total_seconds()
        if secs <= 0:  # c10d's way to say that none was given
            secs = self._timeout_secs
        if device_of is None and results:
            device_of = results[0]
        work = self.engine.work_for(arguments.words(op), results, device_of)

        def run() -> None:
            if num_tensors > 1:  # a rank with one tensor differs from the others by its call
                movements = self.engine.cpu.movements
                movements.check_same_count(num_tensors, f"coalesced {arguments.words(op)}", secs)
            work.run(task, secs)

        self._lane.submit(work, run, is_async=getattr(options, "asyncOp", True))
        return work

    def _rank_of(self, rank: int, op: Op) -> int:
        return arguments.check_rank(rank, self.engine.size, op)

    def _check_parts(
        self, parts: Sequence[torch.Tensor], numel: int | None, dtype: torch.dtype, op: Op
    ) -> None:
        arguments.check_parts(parts, numel, dtype, self.engine.size, op)

    def _check_whole(self, whole: torch.Tensor, part: torch.Tensor, op: Op) -> None:
        arguments.check_whole(whole, part, self.engine.size, op)

    can_spread = spread.can_spread
    all_gather_spread = spread.all_gather_spread
    reduce_scatter_spread = spread.reduce_scatter_spread
    exchange_rows = spread.exchange_rows

    # Before torch 2.13 c10d called these by other names.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

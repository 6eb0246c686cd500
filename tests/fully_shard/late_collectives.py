"""Collectives that are late, as nccl's can be: the host is ahead, and another stream still reads and writes.

The local group's host waits for the GPU now and then, which hides memory that was given back too early. Here
data are exchanged at once, but the tensors of the call are read and written by a stream of their own, after
a while: inputs must hold then what they held, and outputs get their values then. Between layers `poisoned`
takes memory that was given back and fills it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import weft.comm.spread as spread_calls

LATE_CYCLES = 4_000_000  # some two milliseconds
NAN = float("nan")


class LateWork:
    """Holds the tensors until it is waited for, as nccl's does, and no longer."""

    def __init__(self, done: torch.Event, held: Sequence[torch.Tensor]) -> None:
        self._done = done
        self._held: Sequence[torch.Tensor] = held

    def wait(self, timeout: object = None) -> bool:
        torch.cuda.current_stream().wait_event(self._done)
        self._held = ()
        return True

    def is_completed(self) -> bool:
        return True


class LateCollectives:
    """What stands in for torch's two, on one rank."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._gather, self._reduce = spread_calls.all_gather_single, spread_calls.reduce_scatter_single
        self._num_spoiled = torch.zeros((), dtype=torch.int64, device="cuda")
        self.num_calls = 0

    def check(self) -> None:
        """Raise if an input had changed when it was read."""
        torch.cuda.synchronize()
        assert self.num_calls > 0
        assert self._num_spoiled.item() == 0, "memory of a collective's input was given back too early"

    def gather(self, out: torch.Tensor, tensor: torch.Tensor, group: Any) -> LateWork:
        arrived = torch.empty_like(out)
        self._gather(arrived, tensor, group).wait()
        return self._finish_late(out, arrived, tensor)

    def reduce(self, out: torch.Tensor, tensor: torch.Tensor, op: Any, group: Any) -> LateWork:
        arrived = torch.empty_like(out)
        self._reduce(arrived, tensor, op, group).wait()
        return self._finish_late(out, arrived, tensor)

    def _finish_late(self, out: torch.Tensor, arrived: torch.Tensor, tensor: torch.Tensor) -> LateWork:
        self.num_calls += 1
        seen = tensor.clone()
        for own in (arrived, seen):
            own.record_stream(self._stream)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(LATE_CYCLES)
            self._num_spoiled += (tensor != seen).any()
            out.copy_(arrived)
            done = self._stream.record_event()
        return LateWork(done, (out, tensor))


@contextmanager
def late_collectives() -> Iterator[LateCollectives]:
    """On a rank that is a process: the names are replaced for all of it."""
    late = LateCollectives()
    with (
        mock.patch.object(spread_calls, "all_gather_single", late.gather),
        mock.patch.object(spread_calls, "reduce_scatter_single", late.reduce),
    ):
        yield late
    late.check()


class _Poisoned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sizes: Sequence[int], cycles: int) -> torch.Tensor:
        ctx.sizes, ctx.cycles = sizes, cycles
        _spoil(sizes, cycles)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        _spoil(ctx.sizes, ctx.cycles)
        return grad.clone(), None, None


def _spoil(sizes: Sequence[int], cycles: int) -> None:
    taken = [torch.full((size,), NAN, dtype=torch.float64, device="cuda") for size in sizes for _ in range(3)]
    del taken
    torch.cuda._sleep(cycles)


def poisoned(rows: torch.Tensor, sizes: Sequence[int], cycles: int = 0) -> torch.Tensor:
    """The rows. On the way, in forward and in backward, memory that was given back on this stream, of as many
    elements of float64, is spoiled, and then the GPU is kept busy.
    """
    return _Poisoned.apply(rows, sizes, cycles)  # type: ignore[no-any-return]

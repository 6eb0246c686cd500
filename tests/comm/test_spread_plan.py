"""The plan of a spread, what is computed from it, and the copies that follow it."""

from __future__ import annotations

import copy
import ctypes
import os
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.comm import spread_packing, staging
from weft.errors import ConfigError, PeerError
from weft.local import kernel
from weft.local.kernel import MOST_SPANS, OWN_MEMORY, RemoteMemory
from weft.local.spread_plan import chunks_of_shard, packing_batches, spans_in_whole
from weft.tensors.spread import Spread, plan_spread


@st.composite
def plans(draw: st.DrawFn) -> Spread:
    num_ranks = draw(st.integers(1, 5))
    pieces = draw(st.lists(st.integers(0, 40), max_size=8))
    numels = [draw(st.integers(0, num_ranks * piece)) for piece in pieces]
    return plan_spread(numels, pieces, num_ranks, draw(st.sampled_from([1, 4, 16])))


def test_a_plan() -> None:
    spread = plan_spread([10, 0, 3], [5, 0, 2], 2, align=8)
    assert spread.shard_starts == (0, 5, 5)
    assert spread.whole_starts == (0, 16, 16)
    assert (spread.shard_numel, spread.whole_numel) == (7, 20)
    assert spread.piece_start(2, 1) == 18
    assert [spread.filled_numel(2, rank) for rank in range(2)] == [2, 1]
    assert [spread.is_padded(index) for index in range(3)] == [False, False, True]


@given(plans(), st.sampled_from([1, 4, 16]))
def test_tensors_lie_apart(spread: Spread, align: int) -> None:
    again = plan_spread(spread.numels, spread.piece_numels, spread.num_ranks, align)
    end = shard_end = 0
    for index, piece in enumerate(again.piece_numels):
        assert again.whole_starts[index] % align == 0
        assert end <= again.whole_starts[index] < end + align
        assert again.shard_starts[index] == shard_end
        filled = sum(again.filled_numel(index, rank) for rank in range(again.num_ranks))
        assert filled == again.numels[index]
        end, shard_end = again.piece_start(index, again.num_ranks), shard_end + piece
    assert (again.whole_numel, again.shard_numel) == (end, shard_end)


def test_a_plan_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="tensor 1 has 9 elements, and 2 pieces of 4"):
        plan_spread([1, 9], [1, 4], 2)
    with pytest.raises(ConfigError, match="2 tensors have 1 pieces"):
        plan_spread([1, 9], [1], 2)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        plan_spread([1], [1], 0)


def test_what_is_kept_stays_at_home() -> None:
    spread = plan_spread([4], [2], 2)
    assert spread.kept_or_made("key", lambda: object()) is spread.kept_or_made("key", lambda: object())
    assert copy.deepcopy({"plan": spread})["plan"] is spread
    sent = pickle.loads(pickle.dumps(plan_spread([4], [2], 2)))
    assert sent == spread
    assert hash(sent) == hash(spread)
    assert sent.kept == {}


def tensors_of(spread: Spread) -> list[torch.Tensor]:
    return [torch.arange(1, numel + 1) + 100 * index for index, numel in enumerate(spread.numels)]


def rows_of(spread: Spread, tensors: list[torch.Tensor]) -> torch.Tensor:
    rows = torch.zeros(spread.num_ranks, spread.shard_numel, dtype=torch.int64)
    for index, tensor in enumerate(tensors):
        for rank in range(spread.num_ranks):
            start, piece = spread.shard_starts[index], spread.piece_numels[index]
            part = tensor[rank * piece : (rank + 1) * piece]
            rows[rank, start : start + part.numel()] = part
    return rows.view(-1)


@pytest.mark.parametrize("small_numel", [0, 4096])
@pytest.mark.parametrize("large_bytes", [160, 2**20])
@given(spread=plans())
def test_packing_and_unpacking(spread: Spread, small_numel: int, large_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spread_packing, "_SMALL_NUMEL", small_numel)
        patch.setattr(spread_packing, "LARGE_PIECE_BYTES", large_bytes)
        packing = spread_packing.plan_packing(spread, 8, is_reduction=True)
    tensors = tensors_of(spread)
    columns = [
        column
        for run in packing.runs
        for index in run.indices
        for column in range(
            spread.shard_starts[index], spread.shard_starts[index] + spread.piece_numels[index]
        )
    ]
    want = rows_of(spread, tensors).view(spread.num_ranks, -1)[:, columns].reshape(-1)
    rows = torch.full_like(want, -1)
    spread_packing.pack(packing, tensors, rows)
    assert torch.equal(rows, want)
    whole = torch.full((spread.whole_numel,), -1)
    spread_packing.unpack(packing, rows, whole)
    for index, tensor in enumerate(tensors):
        start = spread.whole_starts[index]
        if index not in packing.direct:
            assert torch.equal(whole[start : start + tensor.numel()], tensor)


@given(plans(), st.integers(1, 30))
def test_chunks_cover_a_shard_once(spread: Spread, chunk_numel: int) -> None:
    tensors = tensors_of(spread)
    for rank in range(spread.num_ranks):
        shard = torch.full((spread.shard_numel,), -1)
        end = 0
        for chunk in chunks_of_shard(spread, rank, 8, 8 * chunk_numel):
            assert chunk.start == end
            assert 0 < chunk.end - chunk.start <= chunk_numel
            end = chunk.end
            part = torch.zeros(chunk.end - chunk.start, dtype=torch.int64)
            columns = (chunk.tensors, chunk.offsets, chunk.places, chunk.lengths)
            for tensor, *numbers in zip(*(column.tolist() for column in columns), strict=True):
                offset, place, length = (number // 8 for number in numbers)
                part[place : place + length] = tensors[tensor][offset : offset + length]
                if chunk.stretch is not None:
                    assert chunk.stretch == (tensor, 8 * offset, 8 * length)
                    assert length == part.numel()
            assert chunk.has_padding == bool((part == 0).any())
            shard[chunk.start : chunk.end] = part
        assert end == spread.shard_numel
        assert torch.equal(shard, rows_of(spread, tensors).view(spread.num_ranks, -1)[rank])


def test_batches_and_spans_keep_to_what_one_call_takes() -> None:
    spread = plan_spread([3] * 1500, [2] * 1500, 2)
    batches = packing_batches(spread, 4)
    assert sum(len(batch.tensors) for batch in batches) == 1500
    assert all(len(batch.places) <= MOST_SPANS for batch in batches)
    assert len(spans_in_whole(spread, 1, 4, 0)) == 1500
    assert all(len(chunk.tensors) <= MOST_SPANS for chunk in chunks_of_shard(spread, 0, 4, 2**20))


class _StoppingLibrary:
    """The kernel's copy, which gives up after `stop` bytes the first time; with -1 always."""

    def __init__(self, stop: int, out: torch.Tensor, source: torch.Tensor) -> None:
        self.real: Any = kernel._libc
        self.stop, self.out, self.source = stop, out, source

    def process_vm_readv(self, *arguments: Any) -> int:
        stop = self.stop
        if stop == 0:
            return self.real.process_vm_readv(*arguments)
        if stop > 0:
            self.stop = 0
            ctypes.memmove(self.out.data_ptr(), self.source.data_ptr(), stop)
        return stop


@pytest.mark.parametrize("stop", [0, 1, 8 * 7, 1001, -1])
@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("step", [7, 16, 4000])
def test_spans_are_read_in_order(is_own: bool, stop: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut differently here and there; also where the kernel stops short, and where it refuses."""
    memory = OWN_MEMORY if is_own else RemoteMemory(os.getpid(), 3)
    source = torch.arange(8000, dtype=torch.int16)
    for is_cut_there in (False, True):
        out = torch.zeros(8000, dtype=torch.int16)
        monkeypatch.setattr(kernel, "_libc", _StoppingLibrary(stop, out, source))
        here = spans(out.data_ptr(), 16000, step)
        if stop == -1 and not is_own:
            with pytest.raises(PeerError, match="memory of rank 3"):
                memory.read_into_spans(here, source.data_ptr())
            return
        if is_cut_there and len(here) <= MOST_SPANS:
            memory.read_spans(here, spans(source.data_ptr(), 16000, 200))
        else:
            memory.read_into_spans(here, source.data_ptr())
        assert torch.equal(out, source)
        monkeypatch.undo()


def spans(address: int, num_bytes: int, step: int) -> kernel.Spans:
    starts = range(0, num_bytes, step)
    return np.array([[address + start, min(step, num_bytes - start)] for start in starts], dtype=np.uint64)


def test_staging_is_used_again_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_LIMIT_BYTES", 4000)
    shelf: Any = staging._Shelf()
    first, second = shelf.take(500, torch.float32), shelf.take(600, torch.float32)
    assert first.data_ptr() != second.data_ptr()
    shelf.put(first)
    assert shelf.take(400, torch.float32) is first
    assert shelf.take(400, torch.float64).dtype is torch.float64
    shelf.put(first)
    shelf.put(second)  # together they are too much: the larger one stays
    assert shelf.take(1, torch.float32) is second
    shelf.put(torch.empty(2000))
    assert shelf.take(1, torch.float32).numel() == 1


def test_torch_has_the_private_names() -> None:
    """`ProcessGroup._get_backend` (comm/rows.py) and flatten_dense_tensors (comm/spread_packing.py)."""
    assert callable(torch.distributed.ProcessGroup._get_backend)
    flat = torch._C._nn.flatten_dense_tensors([torch.ones(2, 2), torch.zeros(1)])  # type: ignore[attr-defined]
    assert flat.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]

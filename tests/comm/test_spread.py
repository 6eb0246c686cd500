"""The spread collectives, against results computed by hand.

Thread-ranks read each other's memory in place, process-ranks of the local group through the kernel; on gloo,
and where ranks may not read each other's memory, the packed way stands in.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from tests.local.inputs import me, num_ranks
from tests.ranks import Place, at_each_rank, run_on
from weft import comm
from weft.comm import spread as door
from weft.comm import spread_packing
from weft.local import kernel
from weft.tensors.spread import Spread, plan_spread
from weft.testing import Fault, inject, on_ranks, shared_pool

pytestmark = [
    run_on(threads=(1, 3), way=["usual"], timeout=60),
    run_on(threads=2, way=["packed"], timeout=60),
    run_on(weft=(1, 2, 4), gloo=(1, 2, 4), way=["low"], timeout=60, full=True),
]
# Threads need no leave of the kernel to read each other's memory.
BY_THREADS_ALONE = run_on(threads=2, way=["refused"], timeout=60, also=True)

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64, torch.uint8)
LARGE = 2**12  # elements of float32 in a piece that travels alone, with the bounds of `low_bounds`
CASES: dict[str, Sequence[tuple[int, int]]] = {  # a tensor's elements for each rank, and how many are missing
    "even": [(32, 0), (3, 0), (17, 0)],
    "padded": [(32, 5), (3, 1), (1, 0), (7, 6)],
    "alone": [(640, 0)],
    "alone, padded": [(640, 3)],
    "alone among empty ones": [(0, 0), (640, 0), (0, 0)],
    "empty": [(0, 0), (5, 0), (0, 0), (9, 2)],
    "nothing": [(0, 0)],
    "no tensors": [],
    "tiny": [(16, 0), (2, 1)] * 60,
    "medium": [(9000, 0), (70, 3), (2000, 1), (1, 0)],
    "several chunks": [(140000, 5), (40000, 0), (40, 1), (9000, 0)],
    "a large one": [(70, 0), (LARGE, 0), (5, 1), (3, 0)],
    "a large padded one": [(LARGE + 5, 3), (70, 0)],
    "large ones": [(LARGE, 0), (LARGE + 1, 0), (0, 0), (9, 0)],
    "a large one and tiny ones": [*[(16, 0), (2, 1)] * 20, (LARGE, 0), *[(16, 1), (2, 0)] * 20],
}


def spread_of(case: str, size: int, align: int = 16) -> Spread:
    """The case's spread. Where more is missing than a tensor has, the tensor is empty."""
    pieces = [piece for piece, _ in CASES[case]]
    return plan_spread([max(0, size * n - gone) for n, gone in CASES[case]], pieces, size, align)


@contextmanager
def low_bounds() -> Generator[None]:
    """Have tensors of LARGE elements travel alone, and be exchanged, which larger ones would be otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spread_packing, "LARGE_PIECE_BYTES", 4 * LARGE)
        patch.setattr(door, "_EXCHANGE_BYTES", 4 * LARGE)
        yield


@pytest.fixture
def bounds(way: str, collected_for: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Have tensors travel so: as usual, with low bounds, packed, or against the kernel's refusal to copy."""
    if way == "refused":
        monkeypatch.setattr(kernel, "_libc", _Refusing(kernel._libc))
    if way == "packed":  # ranks may not read each other's memory
        monkeypatch.setenv("WEFT_DIRECT_COPY", "0")
    if way in ("usual", "refused"):
        yield None
    elif collected_for.kind == "thread":
        with low_bounds():  # once for all of them
            yield None
    else:
        yield at_each_rank(low_bounds)


class _Refusing:
    def __init__(self, library: Any) -> None:
        self._library = library

    def process_vm_readv(self, *_: Any) -> int:
        return -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


def tensors_of(rank: int, spread: Spread, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """What a rank gives: small integers, so that every order of summing gives the same."""
    return [
        ((torch.arange(numel) * 5 + index + rank) % 7).to(dtype).view(-1, 2 if numel % 2 == 0 else 1)
        for index, numel in enumerate(spread.numels)
    ]


def shard_of(rank: int, spread: Spread, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A rank's pieces of the tensors, zeros for padding."""
    shard = torch.zeros(spread.shard_numel, dtype=tensors[0].dtype if tensors else torch.float32)
    for start, numel, tensor in zip(spread.shard_starts, spread.piece_numels, tensors, strict=True):
        piece = tensor.reshape(-1)[rank * numel : (rank + 1) * numel]
        shard[start : start + piece.numel()] = piece
    return shard


def gather(spread: Spread, dtype: torch.dtype, device: str = "cpu") -> None:
    """All-gather the shards of known tensors; the whole holds these tensors."""
    tensors = tensors_of(7, spread, dtype)
    whole = torch.full((spread.whole_numel,), 99, dtype=dtype, device=device)
    shard = shard_of(me(), spread, tensors).to(device, dtype)
    result = comm.all_gather_spread(whole, shard, spread, name="here").wait()
    assert result is whole
    for index, (start, tensor) in enumerate(zip(spread.whole_starts, tensors, strict=True)):
        assert torch.equal(whole[start : start + tensor.numel()].cpu(), tensor.view(-1)), index


def reduce(
    spread: Spread,
    dtype: torch.dtype,
    op: dist.ReduceOp.RedOpType,
    missing: bool,
    device: str = "cpu",
) -> None:
    """Reduce every rank's tensors; with `missing`, each rank lacks some of its own."""
    given = [
        [None if missing and (index + rank) % 3 == 0 else tensor for index, tensor in enumerate(tensors)]
        for rank, tensors in enumerate(tensors_of(rank, spread, dtype) for rank in range(num_ranks()))
    ]
    totals = [torch.zeros(numel, dtype=torch.float64) for numel in spread.numels]
    for tensors in given:
        for total, tensor in zip(totals, tensors, strict=True):
            if tensor is not None:
                total += tensor.view(-1).double()
    if op == dist.ReduceOp.AVG:
        totals = [total / num_ranks() for total in totals]
        if not dtype.is_floating_point:
            totals = [total.trunc() for total in totals]
    out = torch.full((spread.shard_numel,), 99, dtype=dtype, device=device)
    mine = [None if tensor is None else tensor.to(device) for tensor in given[me()]]
    result = comm.reduce_scatter_spread(out, mine, spread, op, name="here").wait()
    assert result is out
    assert torch.equal(out.cpu(), shard_of(me(), spread, totals).to(dtype))


@BY_THREADS_ALONE
def test_all_gather_of_every_case(bounds: None) -> None:
    for case in CASES:
        gather(spread_of(case, num_ranks()), torch.float32)
        gather(spread_of(case, num_ranks(), align=1), torch.bfloat16)


def test_all_gather_of_every_dtype(bounds: None) -> None:
    for dtype in (*FLOATS, *INTEGERS):
        for case in ("padded", "medium"):
            gather(spread_of(case, num_ranks()), dtype)


@BY_THREADS_ALONE
def test_reduce_scatter_of_every_case(bounds: None) -> None:
    for case in CASES:
        for missing in (False, True):
            reduce(spread_of(case, num_ranks()), torch.float32, dist.ReduceOp.SUM, missing)


def test_reduce_scatter_to_the_mean(bounds: None) -> None:
    for dtype in FLOATS:
        for case in ("padded", "a large one"):
            reduce(spread_of(case, num_ranks()), dtype, dist.ReduceOp.AVG, missing=True)


def test_reduce_scatter_of_every_dtype(bounds: None) -> None:
    for dtype in (*FLOATS, *INTEGERS):
        for case in ("padded", "medium"):
            reduce(spread_of(case, num_ranks()), dtype, dist.ReduceOp.SUM, missing=False)


def test_buffers_that_are_used_again_hold_nothing(bounds: None) -> None:
    """What one call left in them doesn't show in the next."""
    for _ in range(2):
        for case in ("tiny", "padded", "a large padded one", "a large one"):
            reduce(spread_of(case, num_ranks()), torch.float32, dist.ReduceOp.SUM, missing=True)
            gather(spread_of(case, num_ranks()), torch.float32)


def test_several_are_under_way(bounds: None) -> None:
    """They are waited for in the reverse order."""
    spreads = [spread_of(case, num_ranks()) for case in ("tiny", "tiny", "medium")]
    outs = [torch.zeros(spread.shard_numel) for spread in spreads]
    handles = [
        comm.reduce_scatter_spread(out, tensors_of(me(), spread), spread)
        for out, spread in zip(outs, spreads, strict=True)
    ]
    for handle in reversed(handles):
        handle.wait()
    for out, spread in zip(outs, spreads, strict=True):
        all_tensors = zip(*(tensors_of(rank, spread) for rank in range(num_ranks())), strict=True)
        totals = [torch.stack(tensors).sum(0) for tensors in all_tensors]
        assert torch.equal(out, shard_of(me(), spread, totals))


def test_versions_stay(bounds: None) -> None:
    """Autograd may hold views of the whole: filling it again is nothing it should notice."""
    for case in ("tiny", "medium", "alone"):
        spread = spread_of(case, num_ranks())
        whole = torch.zeros(spread.whole_numel)
        before = whole._version
        comm.all_gather_spread(whole, torch.ones(spread.shard_numel), spread).wait()
        assert whole._version == before


def test_records_are_left(bounds: None) -> None:
    spread = spread_of("padded", num_ranks())
    tensors = [None if me() == 0 else tensor for tensor in tensors_of(me(), spread)]
    with weft.record() as events, weft.desync_check():
        shard = torch.zeros(spread.shard_numel)
        comm.reduce_scatter_spread(shard, tensors, spread, feature="fsdp", name="blocks.1").wait()
        whole = torch.zeros(spread.whole_numel)
        comm.all_gather_spread(whole, shard, spread, feature="fsdp", name="blocks.1").wait()
    reduction, gathering = events
    assert (reduction.op, gathering.op) == ("reduce_scatter_spread", "all_gather_spread")
    assert (reduction.detail, gathering.detail) == ("sum, blocks.1", "blocks.1")
    assert reduction.feature == gathering.feature == "fsdp"
    assert reduction.bytes_in == num_ranks() * reduction.bytes_out == num_ranks() * 4 * spread.shard_numel
    assert (gathering.bytes_in, gathering.bytes_out) == (4 * spread.shard_numel, 4 * spread.whole_numel)


def test_rows_are_told(bounds: None) -> None:
    rows = [[rank, 10 * rank, -1] for rank in range(num_ranks())]
    with weft.record() as events:
        assert comm.exchange_rows(rows[me()], feature="fsdp", name="used") == rows
        assert comm.exchange_rows([]) == [[]] * num_ranks()
    assert [(event.op, event.feature, event.detail) for event in events] == [
        ("exchange_rows", "fsdp", "used"),
        ("exchange_rows", "user", ""),
    ]


def test_rows_keep_their_turn(bounds: None) -> None:
    """Collectives that are under way go first, and those that follow come after."""
    spread = spread_of("medium", num_ranks())
    out = torch.zeros(spread.shard_numel)
    first = comm.reduce_scatter_spread(out, tensors_of(me(), spread), spread)
    total = torch.full((3,), float(me()))
    second = comm.all_reduce(total)
    assert comm.exchange_rows([me()]) == [[rank] for rank in range(num_ranks())]
    third = comm.all_reduce(out)
    for handle in (third, second, first):
        handle.wait()
    assert total.tolist() == [sum(range(num_ranks()))] * 3


def test_what_cannot_be_is_refused(bounds: None) -> None:
    spread = spread_of("even", num_ranks())
    shard, whole = torch.zeros(spread.shard_numel), torch.zeros(spread.whole_numel)
    tensors = tensors_of(me(), spread)
    with pytest.raises(weft.ConfigError, match=rf"whole must be flat.*{spread.whole_numel} elements"):
        comm.all_gather_spread(whole[1:], shard, spread)
    with pytest.raises(weft.ConfigError, match=r"whole must be .*bfloat16.*float32"):
        comm.all_gather_spread(whole, shard.bfloat16(), spread)
    with pytest.raises(weft.ConfigError, match="out must be flat"):
        comm.reduce_scatter_spread(shard.view(1, -1), tensors, spread)
    with pytest.raises(weft.ConfigError, match="3 tensors, 2 are given"):
        comm.reduce_scatter_spread(shard, tensors[1:], spread)
    with pytest.raises(weft.ConfigError, match="tensor 1 must be contiguous"):
        comm.reduce_scatter_spread(shard, [tensors[0], tensors[0], None], spread)
    with pytest.raises(weft.ConfigError, match="SUM or AVG, got max"):
        comm.reduce_scatter_spread(shard, tensors, spread, dist.ReduceOp.MAX)
    larger = spread_of("even", num_ranks() + 1)
    with pytest.raises(weft.ConfigError, match=f"{num_ranks() + 1} ranks, the group has {num_ranks()}"):
        comm.all_gather_spread(torch.zeros(larger.whole_numel), shard, larger)


# The functions so far, which run on any group.
EVERYWHERE = [value for name, value in list(globals().items()) if name.startswith("test_")]


@run_on()
@pytest.mark.threads
@pytest.mark.parametrize("body", EVERYWHERE)
def test_on_the_threads_of_torch(body: Callable[[None], None]) -> None:
    """torch's own thread-ranks, a group that is written in Python."""

    @spawn_threads_and_init_comms(world_size=2)
    def run(_: object) -> None:
        body(None)

    with low_bounds():
        run(None)


@run_on(gpu=2, gpu_gloo=2, way=["low"], timeout=60, collective_timeout=60)
@run_on(nccl=1, way=["usual"], timeout=60, collective_timeout=60)
@pytest.mark.filterwarnings("error")  # there, too
def test_on_a_gpu(bounds: None) -> None:
    for case in CASES:
        spread = spread_of(case, num_ranks())
        gather(spread, torch.bfloat16, "cuda")
        for missing in (False, True):
            reduce(spread, torch.float32, dist.ReduceOp.SUM, missing, "cuda")
            reduce(spread, torch.float32, dist.ReduceOp.AVG, missing, "cuda")


@run_on()
@pytest.mark.gpu
@pytest.mark.processes
@on_ranks(2, kind="process", backend="nccl")
def test_rows_beside_nccl() -> None:
    """Ranks that have nccl and nothing else, which would refuse two ranks on one GPU: it isn't asked."""
    for _ in range(2):
        assert comm.exchange_rows([dist.get_rank(), 5]) == [[0, 5], [1, 5]]


class _Calls(TorchDispatchMode):
    """The collectives that pass torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@run_on(gloo=2, timeout=60)
def test_how_many_collectives_gloo_sees() -> None:
    def calls(numels: list[int]) -> tuple[list[str], list[str]]:
        spread = plan_spread(numels, [numel // 2 for numel in numels], 2)
        whole, shard = torch.zeros(spread.whole_numel), torch.zeros(spread.shard_numel)
        with _Calls() as gathering:
            comm.all_gather_spread(whole, shard, spread).wait()
        with _Calls() as reducing:
            comm.reduce_scatter_spread(shard, [torch.zeros(numel) for numel in numels], spread).wait()
        return gathering.names, reducing.names

    with _Calls() as plain:
        comm.all_gather_into_tensor(torch.zeros(4), torch.zeros(2)).wait()
        comm.reduce_scatter_tensor(torch.zeros(2), torch.zeros(4)).wait()
    gather, reduce = plain.names
    for numels in ([256, 16] * 50, [2], [90000, 80, 3000]):
        assert calls(numels) == ([gather], [reduce]), numels
    large = 2**19
    assert calls([256, large, 16]) == ([gather, gather], ["alltoall_base_", reduce])
    assert calls([large]) == ([gather], ["alltoall_base_"])
    with _Calls() as control:
        comm.exchange_rows([1, 2])
    assert control.names == []


@run_on()
@pytest.mark.processes
@pytest.mark.parametrize(
    ("backend", "op"),
    [("gloo", "exchange_rows"), ("weft", "all_gather_spread"), ("weft", "reduce_scatter_spread")],
)
def test_a_killed_rank_is_named(backend: str, op: str) -> None:
    with pytest.raises(weft.LaunchError) as caught:
        shared_pool(2).run(
            go_on, args=(Fault(rank=1, action="kill", op=op, call=2),), backend=backend, timeout=60
        )
    survivor = caught.value.failures[0]
    assert "PeerError" in survivor
    assert "rank 1" in survivor or "ranks [1]" in survivor


def go_on(fault: Fault) -> None:
    spread = spread_of("medium", 2)
    whole, shard = torch.zeros(spread.whole_numel), torch.zeros(spread.shard_numel)
    with inject(fault):
        for _ in range(4):
            comm.all_gather_spread(whole, shard, spread).wait()
            comm.reduce_scatter_spread(shard, tensors_of(dist.get_rank(), spread), spread).wait()
            comm.exchange_rows([dist.get_rank()])


@run_on(weft=2, timeout=60, full=True)
def test_ranks_that_disagree_are_told() -> None:
    spread = spread_of("medium" if dist.get_rank() else "tiny", 2)
    with pytest.raises(weft.DesyncError, match="all_gather_spread"):
        comm.all_gather_spread(
            torch.zeros(spread.whole_numel), torch.zeros(spread.shard_numel), spread
        ).wait()
    assert comm.exchange_rows([7]) == [[7], [7]]

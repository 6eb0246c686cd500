"""The spread collectives, ranks as processes: the local group, and gloo with its packing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from tests.local_bodies import spreads
from weft import comm
from weft.errors import LaunchError
from weft.tensors.spread import plan_spread
from weft.testing import Fault, inject, on_ranks
from weft.testing.pool import shared_pool


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("backend", ["gloo", "weft"])
def test_every_body(backend: str, ranks: int) -> None:
    shared_pool(ranks).run(run_all, args=(spreads.BODIES,), backend=backend, timeout=60)


def run_all(bodies: list[Callable[[], None]]) -> None:
    torch.set_num_threads(1)
    with spreads.low_bounds():
        for body in bodies:
            try:
                body()
            except Exception as error:
                error.add_note(f"in {body.__name__}")
                raise


class _Calls(TorchDispatchMode):
    """The collectives that pass torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@on_ranks(2, kind="process", backend="gloo")
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


@pytest.mark.parametrize(
    ("backend", "op"),
    [("gloo", "exchange_rows"), ("weft", "all_gather_spread"), ("weft", "reduce_scatter_spread")],
)
def test_a_killed_rank_is_named(backend: str, op: str) -> None:
    with pytest.raises(LaunchError) as caught:
        shared_pool(2).run(
            go_on, args=(Fault(rank=1, action="kill", op=op, call=2),), backend=backend, timeout=60
        )
    survivor = caught.value.failures[0]
    assert "PeerError" in survivor
    assert "rank 1" in survivor or "ranks [1]" in survivor


def go_on(fault: Fault) -> None:
    spread = spreads.spread_of("medium", 2)
    whole, shard = torch.zeros(spread.whole_numel), torch.zeros(spread.shard_numel)
    with inject(fault):
        for _ in range(4):
            comm.all_gather_spread(whole, shard, spread).wait()
            comm.reduce_scatter_spread(shard, spreads.tensors_of(dist.get_rank(), spread), spread).wait()
            comm.exchange_rows([dist.get_rank()])


@pytest.mark.full
@on_ranks(2, kind="process", backend="weft")
def test_ranks_that_disagree_are_told() -> None:
    spread = spreads.spread_of("medium" if dist.get_rank() else "tiny", 2)
    with pytest.raises(weft.DesyncError, match="all_gather_spread"):
        comm.all_gather_spread(
            torch.zeros(spread.whole_numel), torch.zeros(spread.shard_numel), spread
        ).wait()
    assert comm.exchange_rows([7]) == [[7], [7]]

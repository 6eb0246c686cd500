"""Two and four ranks of nccl, which share one GPU: every strategy, hook and stream on the engine of clusters.

nccl takes each rank for a host of its own and talks over sockets. Slow, but communicators, streams and the
order of collectives are real.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.compiler import test_on_gpu as compiled
from tests.data_parallel import test_on_gpu as data_parallel
from tests.data_parallel import test_streams as data_parallel_streams
from tests.data_parallel.twins import filled, make_rows, rows_of
from tests.dist_autograd import test_on_gpu as dist_autograd
from tests.fully_shard import test_streams as sharded_streams
from tests.join import test_join as joins
from tests.rpc.workers import joined
from tests.tensor_parallel import test_streams as split_streams
from tests.train_bodies.runs import SMALL, alone, run_each, same_as
from weft.comm.handle import Handle
from weft.join import Join
from weft.launcher.backends import GPU_EACH
from weft.testing.pool import shared_pool

pytestmark = pytest.mark.nccl

Case = tuple[Callable[..., None], tuple[Any, ...]]

RANKS = pytest.mark.parametrize("ranks", [2, 4])
NO_MEMORY = "test_memory"  # of torch's DDP on gloo: not about nccl


def run(ranks: int, body: Callable[..., Any], *args: Any, secs: float = 120) -> Any:
    return shared_pool(ranks).run(body, args=args, backend=GPU_EACH, timeout=secs, collective_timeout=40)


def each(cases: list[Case]) -> Any:
    names = [f"{body.__module__.split('.')[-1]}.{body.__name__}{list(args) or ''}" for body, args in cases]
    return pytest.mark.parametrize(("body", "args"), cases, ids=names)


def bodies_in(module: ModuleType) -> list[Callable[[], None]]:
    return [value for name, value in vars(module).items() if name.startswith("test_")]


# -- data parallel ------------------------------------------------------------------------


def zero() -> None:
    """Each rank steps a part of the parameters; with uneven inputs, and what a single Adam makes of it."""
    model, single = (filled(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))).cuda() for _ in "ab")
    parallel = weft.DistributedDataParallel(model)
    optimizer = weft.ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.Adam, lr=0.01)
    other = torch.optim.Adam(single.parameters(), lr=0.01)
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [make_rows(step).cuda() for step in range(1 + size)]
    with Join([parallel, optimizer]):
        for step in range(2 + rank):
            optimizer.zero_grad()
            parallel(rows_of(rows[step], rank)).square().mean().backward()
            optimizer.step()
    for step in range(1 + size):
        other.zero_grad()
        active = [other_rank for other_rank in range(size) if step < 2 + other_rank]
        losses = [single(rows_of(rows[step], one)).square().mean() for one in active]
        (torch.stack(losses).sum() / size).backward()
        other.step()
    for mine, right in zip(parallel.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-9)


DATA_PARALLEL = [
    check
    for check in (*bodies_in(data_parallel), *bodies_in(data_parallel_streams), zero)
    if check.__name__ != NO_MEMORY
]


@RANKS
@pytest.mark.parametrize("check", DATA_PARALLEL, ids=lambda check: check.__name__)
def test_data_parallel(check: Callable[[], None], ranks: int) -> None:
    run(ranks, check)


# -- what orders the streams --------------------------------------------------------------


@contextmanager
def without_waits() -> Generator[None]:
    """Handles don't order the stream behind their collective."""

    def wait_for_nothing(handle: Any, timeout: float | None) -> None:
        handle._is_waited = True

    with mock.patch.object(Handle, "_wait_for_works", wait_for_nothing):
        yield


@contextmanager
def without(cls: type, method: str, module: str) -> Generator[None]:
    """Calls of the method from this module of weft do nothing."""
    original = getattr(cls, method)

    def call(self: Any, *args: Any) -> Any:
        return None if sys._getframe(1).f_globals["__name__"] == module else original(self, *args)

    with mock.patch.object(cls, method, call):
        yield


def left_out(event: Callable[..., Any], names: tuple[Any, ...], body: Callable[[], None]) -> None:
    with event(*names):
        body()


FORKED = (torch.cuda.Stream, "wait_stream", "weft.data_parallel.streams")
HOOKS = (torch.cuda.Stream, "wait_event", "weft.comm_hooks.in_order")
NOTICE = (torch.cuda.Stream, "wait_event", "weft.join.notice")
EVENTS: dict[str, tuple[Any, ...]] = {
    "data parallel waits": (without_waits, (), data_parallel_streams.test_overlap),
    "fully_shard waits": (without_waits, (), sharded_streams.test_overlap),
    "tensor parallel waits": (without_waits, (), split_streams.test_overlap),
    "streams of a bucket": (without, FORKED, data_parallel_streams.test_two_streams_in_a_bucket),
    "hooks in order": (without, HOOKS, data_parallel.test_hooks),
    "join": (without, NOTICE, joins.test_handles_count_the_active_ranks_for_every_stream),
}


@pytest.mark.parametrize("name", list(EVENTS))
def test_an_event_that_is_left_out_is_seen(name: str) -> None:
    """The tests above would fail: what they prove is not luck."""
    with pytest.raises(weft.LaunchError, match="AssertionError"):
        run(2, left_out, *EVENTS[name])


# -- compiled -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", [None, "concat", "coalesced"])
def test_compiled_replicate(form: str | None) -> None:
    shared_pool(2).run(
        compiled.test_replicated, args=(form,), kwargs={"is_narrow": False}, backend=GPU_EACH, timeout=200
    )


@RANKS
def test_compiled_fully_shard(ranks: int) -> None:
    run(ranks, compiled.test_sharded, secs=200)


# -- the main job, checkpoints and RPC ------------------------------------------------------


@RANKS
def test_every_strategy_and_hook_has_the_losses_of_one_process(ranks: int) -> None:
    names = ["ddp", "replicate", "fsdp", "hsdp", "tp"] + ["ddp+tp", "fsdp+tp"] * (ranks == 4)
    cases = [replace(SMALL, ranks=ranks, strategy=name) for name in names]
    for options, outcomes in zip(cases, _outcomes(ranks, cases), strict=True):
        assert [list(losses) for losses in outcomes] == [same_as(alone())] * ranks, options.strategy
    pairs = [("ddp", name) for name in ("fp16", "bf16", "int8", "powersgd")] + [("fsdp", "int8")]
    cases = [replace(SMALL, ranks=ranks, strategy=name, hook=hook) for name, hook in pairs]
    for options, outcomes in zip(cases, _outcomes(ranks, cases), strict=True):
        assert len(set(outcomes)) == 1, "all ranks print the same mean"
        assert list(outcomes[0]) == pytest.approx(list(alone()), rel=0, abs=0.1), options.hook
        assert outcomes[0] != pytest.approx(list(alone()), rel=0, abs=1e-9), "the hook did not run"


@RANKS
def test_uneven_inputs_of_every_strategy(ranks: int) -> None:
    names = ["ddp", "replicate", "fsdp", "hsdp"] + ["ddp+tp", "fsdp+tp"] * (ranks == 4)
    cases = [replace(SMALL, ranks=ranks, strategy=name, uneven=True) for name in names]
    for options, outcomes in zip(cases, _outcomes(ranks, cases), strict=True):
        num_even = min(map(len, outcomes))
        assert num_even < len(outcomes[0]) == SMALL.steps, options.strategy
        for losses in outcomes:
            assert list(losses[:num_even]) == same_as(alone()[:num_even]), options.strategy
            assert losses == outcomes[0][: len(losses)], options.strategy


@RANKS
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_a_checkpoint_goes_on(strategy: str, ranks: int, tmp_path: Path) -> None:
    whole = replace(SMALL, ranks=ranks, strategy=strategy, checkpoint=tmp_path / "saved", every=3)
    _outcomes(ranks, [replace(whole, steps=3)])
    other = "fsdp" if strategy == "ddp" else "ddp"
    (outcomes,) = _outcomes(ranks, [replace(whole, strategy=other, resume=True)])
    assert list(outcomes[0]) == same_as(alone()[3:])


def _outcomes(ranks: int, cases: list[Any]) -> list[list[tuple[float, ...]]]:
    """Of each case, each rank's losses."""
    of_ranks = run(ranks, run_each, cases, secs=300)
    return [[outcomes[case].losses for outcomes in of_ranks] for case in range(len(cases))]


def rpc_beside_nccl() -> None:
    """Tensors of a GPU through RPC and distributed autograd, with data parallel on nccl under it."""
    size = dist.get_world_size()
    with joined("weft.rpc", device_maps={f"worker{rank}": {0: 0} for rank in range(size)}) as worker:
        dist_autograd.test_data_parallel_under_it(worker)
        dist.barrier()


@RANKS
def test_rpc_with_device_maps(ranks: int) -> None:
    run(ranks, rpc_beside_nccl)

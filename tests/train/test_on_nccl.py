"""The main job on two and four ranks of nccl, which share one GPU: strategies, hooks, checkpoints.

nccl takes each rank for a host of its own and talks over sockets. Slow, but communicators, streams and the
order of collectives are real.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import SMALL, alone, run_each, same_as
from weft.launcher.backends import GPU_EACH
from weft.testing import shared_pool

pytestmark = [pytest.mark.processes, pytest.mark.gpu, pytest.mark.nccl]

RANKS = pytest.mark.parametrize("ranks", [2, 4])


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
    of_ranks = shared_pool(ranks).run(
        run_each, args=(cases,), backend=GPU_EACH, timeout=300, collective_timeout=40
    )
    return [[outcomes[case].losses for outcomes in of_ranks] for case in range(len(cases))]

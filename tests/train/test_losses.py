"""`weft train`: whatever the strategy and the number of ranks, the losses are one rank's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.train.runs import SMALL, alone, alone_but_last, gradient_bytes, run_each, same_as
from weft.testing.pool import shared_pool
from weft.training.data import Share
from weft.training.options import TrainOptions

pytestmark = pytest.mark.processes

STRATEGIES = ["ddp", "replicate", "fsdp", "hsdp", "tp", "ddp+tp", "fsdp+tp", "rpc"]


def run(
    ranks: int, *runs: TrainOptions, backend: str = "weft", timeout: float = 120
) -> list[list[tuple[float, ...]]]:
    """The losses of each of these runs, as every rank saw them."""
    given = tuple(replace(options, ranks=ranks, backend=backend) for options in runs)
    outcomes = shared_pool(ranks).run(run_each, args=(given,), backend=backend, timeout=timeout)
    return [[rank[i].losses for rank in outcomes] for i in range(len(given))]


@pytest.mark.parametrize(("ranks", "backend"), [(1, "weft"), (2, "weft"), (2, "gloo"), (4, "weft")])
def test_every_strategy_has_the_losses_of_one_process(ranks: int, backend: str) -> None:
    runs = [replace(SMALL, strategy=name) for name in STRATEGIES]
    if ranks == 4:
        runs += [
            replace(SMALL, strategy="hsdp", shard=1),
            replace(SMALL, strategy="hsdp", shard=4),
            replace(SMALL, strategy="ddp+tp", tp=4),
            replace(SMALL, strategy="fsdp+tp", tp=1),
        ]
    for options, ranks_losses in zip(runs, run(ranks, *runs, backend=backend), strict=True):
        name = f"{options.strategy}, tp {options.tp}, shard {options.shard}"
        assert all(losses == ranks_losses[0] for losses in ranks_losses), (
            f"{name}: ranks tell different losses"
        )
        assert list(ranks_losses[0]) == same_as(alone()), name


HOOKED = [
    ("ddp", "fp16"),
    ("ddp", "bf16"),
    ("ddp", "int8"),
    ("ddp", "powersgd"),
    ("replicate", "int8"),
    ("fsdp", "bf16"),
    ("fsdp", "int8"),
    ("hsdp", "bf16"),
    ("rpc", "powersgd"),
]


@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, HOOKED), (4, [("ddp+tp", "powersgd"), ("fsdp+tp", "bf16"), ("hsdp", "int8")])]
)
def test_a_hook_changes_the_losses_a_little(ranks: int, cases: list[tuple[str, str]]) -> None:
    runs = [replace(SMALL, strategy=strategy, hook=hook) for strategy, hook in cases]
    for options, ranks_losses in zip(runs, run(ranks, *runs), strict=True):
        name = f"{options.strategy} with {options.hook}"
        losses = list(ranks_losses[0])
        assert all(other == ranks_losses[0] for other in ranks_losses), f"{name}: ranks tell different losses"
        assert losses[0] == pytest.approx(alone()[0], abs=1e-5), f"{name}: no gradient has travelled yet"
        # PowerSGD begins with gradients of rank 1, which is far from what they are; the others only round.
        assert losses == pytest.approx(list(alone()), abs=0.5 if options.hook == "powersgd" else 0.02), name
        # Had the hook not run, these would be equal to the last 1e-5.
        assert losses[1:] != same_as(alone()[1:]), f"{name}: the hook did not run"


def test_16_bit_hooks_halve_the_bytes() -> None:
    runs = tuple(replace(SMALL, ranks=2, steps=2, hook=hook) for hook in ("none", "fp16", "bf16"))
    for none, fp16, bf16 in shared_pool(2).run(gradient_bytes, args=(runs,), timeout=60):
        # But for the bytes that fill a bucket up to where the next parameter may begin.
        assert [none, 2 * fp16, 2 * bf16] == pytest.approx([381_600 * 4 * 2] * 3, rel=1e-3)


def test_uneven_ranks_have_the_losses_of_one_process_up_to_the_end() -> None:
    cases = [replace(SMALL, strategy=name, uneven=True) for name in ("ddp", "replicate", "fsdp")]
    for options, (first, second) in zip(cases, run(2, *cases), strict=True):
        assert len(first) == SMALL.steps, options.strategy
        assert len(second) == SMALL.steps - 1, "the second rank has one batch less"
        assert list(second) == same_as(alone()[:-1]), options.strategy
        assert list(first[:-1]) == same_as(alone()[:-1]), options.strategy
        # In the last step only rank 0 has a batch, its half of the global one.
        assert [first[-1]] == same_as([alone_but_last(share=Share(0, 2))]), options.strategy


def test_uneven_ranks_of_a_hybrid_mesh() -> None:
    (ranks_losses,) = run(4, replace(SMALL, strategy="hsdp", shard=2, uneven=True))
    assert [len(losses) for losses in ranks_losses] == [SMALL.steps - rank for rank in range(4)]
    for losses in ranks_losses:
        even = min(len(losses), SMALL.steps - 3)
        assert list(losses[:even]) == same_as(alone()[:even])
        assert losses == ranks_losses[0][: len(losses)], (
            "the loss is the mean over the ranks that have batches"
        )


@pytest.mark.full
def test_uneven_ranks_of_two_axes() -> None:
    cases = [replace(SMALL, strategy=name, uneven=True) for name in ("ddp+tp", "fsdp+tp")]
    for options, ranks_losses in zip(cases, run(4, *cases), strict=True):
        lengths = [len(losses) for losses in ranks_losses]
        assert lengths == [SMALL.steps, SMALL.steps, SMALL.steps - 1, SMALL.steps - 1], options.strategy
        for losses in ranks_losses:
            assert list(losses[: SMALL.steps - 1]) == same_as(alone()[:-1]), options.strategy
        assert [ranks_losses[1][-1]] == same_as([alone_but_last(share=Share(0, 2))]), options.strategy


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_compiled_it_has_the_same_losses(strategy: str) -> None:
    (ranks_losses,) = run(2, replace(SMALL, strategy=strategy, compile=True, steps=3), timeout=400)
    assert list(ranks_losses[0]) == same_as(alone()[:3])
    assert ranks_losses[0] == ranks_losses[1]

"""Layouts and options of the main job, drawn at random. Pure: no rank is started."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weft.errors import ConfigError
from weft.training.data import Text
from weft.training.layout import KINDS, Layout, plan_layout
from weft.training.model import SIZES
from weft.training.options import TrainOptions, check_options

names = st.sampled_from(["ddp", "replicate", "fsdp", "hsdp", "tp", "ddp+tp", "fsdp+tp", "rpc"])
axis_sizes = st.none() | st.integers(-1, 9)


def plan_or_refuse(strategy: str, ranks: int, tp: int | None, shard: int | None) -> Layout | None:
    try:
        return plan_layout(strategy, ranks, tp=tp, shard=shard)
    except ConfigError as error:
        expect_reason(error)
        return None


def expect_reason(error: ConfigError) -> None:
    assert str(error).startswith("train: ")
    assert "\n" not in str(error)


def test_the_documented_strategies_are_there() -> None:
    assert list(KINDS) == ["ddp", "replicate", "fsdp", "hsdp", "tp", "ddp+tp", "fsdp+tp", "rpc"]


@settings(deadline=None)
@given(strategy=names, ranks=st.integers(1, 64), tp=axis_sizes, shard=axis_sizes)
def test_an_accepted_layout_covers_all_ranks(
    strategy: str, ranks: int, tp: int | None, shard: int | None
) -> None:
    layout = plan_or_refuse(strategy, ranks, tp, shard)
    assume(layout is not None)
    assert layout is not None
    assert math.prod(layout.shape) == ranks
    assert all(size >= 1 for size in layout.shape)
    assert len(set(layout.names)) == len(layout.names) == len(layout.shape)
    assert layout.num_shares * layout.tp_size == ranks
    if tp is not None:
        assert layout.tp_size == tp
    if shard is not None:
        assert dict(layout.axes)["shard"] == shard
    if "tp" not in strategy:
        assert layout.tp_size == 1
    if strategy == "tp":
        assert layout.tp_size == ranks


@settings(deadline=None)
@given(strategy=names, ranks=st.integers(1, 32), tp=axis_sizes, shard=axis_sizes, parts=st.integers(1, 3))
def test_the_shares_of_the_ranks_are_the_batch(
    strategy: str, ranks: int, tp: int | None, shard: int | None, parts: int
) -> None:
    layout = plan_or_refuse(strategy, ranks, tp, shard)
    assume(layout is not None)
    assert layout is not None
    batch = parts * layout.num_shares
    text = Text(bytes(range(256)), context=4, batch=batch, seed=7)
    (whole, whole_targets) = text.batch(5, plan_layout("ddp", 1).share_of(0))
    # One rank of each tp axis; the others of that axis have the same part.
    firsts = range(0, ranks, layout.tp_size)
    pieces = [text.batch(5, layout.share_of(rank)) for rank in firsts]
    assert all(len(inputs) == parts for inputs, _ in pieces)
    assert torch.equal(torch.cat([inputs for inputs, _ in pieces]), whole)
    assert torch.equal(torch.cat([targets for _, targets in pieces]), whole_targets)
    for rank in range(ranks):
        assert layout.share_of(rank) == layout.share_of(rank - rank % layout.tp_size)


@settings(deadline=None)
@given(
    strategy=names | st.just("magic"),
    ranks=st.integers(-1, 17),
    tp=axis_sizes,
    shard=axis_sizes,
    hook=st.sampled_from(["none", "fp16", "bf16", "int8", "powersgd", "zip"]),
    switches=st.tuples(st.booleans(), st.booleans()),
    batch=st.integers(-1, 64),
)
def test_options_are_accepted_whole_or_refused_with_a_reason(
    strategy: str,
    ranks: int,
    tp: int | None,
    shard: int | None,
    hook: str,
    switches: tuple[bool, bool],
    batch: int,
) -> None:
    compile, uneven = switches
    options = TrainOptions(
        ranks=ranks,
        strategy=strategy,
        tp=tp,
        shard=shard,
        hook=hook,
        compile=compile,
        uneven=uneven,
        batch=batch,
    )
    try:
        layout = check_options(options)
    except ConfigError as error:
        expect_reason(error)
        return
    assert math.prod(layout.shape) == ranks
    assert batch % layout.num_shares == 0
    assert batch >= 1
    assert SIZES[options.model].num_heads % layout.tp_size == 0
    # What the documents say can't be together was not let through.
    assert not (uneven and strategy in ("tp", "rpc"))
    assert not (compile and strategy == "rpc")
    assert not (hook != "none" and strategy == "tp")
    assert hook != "zip"
    assert strategy != "magic"


@pytest.mark.parametrize("strategy", list(KINDS))
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_by_its_name_alone_a_strategy_is_accepted(strategy: str, ranks: int) -> None:
    layout = check_options(TrainOptions(strategy=strategy, ranks=ranks))
    assert math.prod(layout.shape) == ranks


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rate": float("nan")}, "rate"),
        ({"rate": float("inf")}, "rate"),
        ({"rate": 0.0}, "rate"),
        ({"rate": -1.0}, "rate"),
        ({"steps": 0}, "steps"),
        ({"every": 0}, "every"),
        ({"keep": 0}, "keep"),
        ({"context": 0}, "context"),
        ({"ranks": 0}, "ranks"),
        ({"batch": 0}, "batch"),
        ({"batch": 3}, "batch"),
        ({"model": "huge"}, "model"),
        ({"resume": True}, "--checkpoint"),
    ],
    ids=str,
)
def test_a_number_that_cannot_be_is_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_options(replace(TrainOptions(), **given))  # type: ignore[arg-type]

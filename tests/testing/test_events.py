"""assert_calls, bytes_by_op, overlaps, on events made by hand."""

from __future__ import annotations

import pytest
import torch

from weft.comm import Event
from weft.errors import ConfigError
from weft.testing import Expect, Span, assert_calls, bytes_by_op, overlaps, span


def event(op: str, start: float = 0.0, *, feature: str = "user", num_bytes: int = 16, rank: int = 0) -> Event:
    return Event(
        op=op,
        feature=feature,
        rank=rank,
        group="0",
        group_size=2,
        bytes_in=num_bytes,
        bytes_out=num_bytes,
        dtype=torch.float32,
        shapes=((num_bytes // 4,),),
        detail="sum",
        site="train.py:3 in step",
        start_secs=start,
        end_secs=start + 1.0,
    )


def test_calls_are_taken_in_the_order_of_their_start() -> None:
    assert_calls([event("all_reduce", 2.0), event("broadcast", 1.0)], ["broadcast", "all_reduce"])


def test_no_calls_are_no_calls() -> None:
    assert_calls([], [])


@pytest.mark.parametrize(
    "expected",
    [
        Expect("all_reduce", feature="fsdp"),
        Expect("all_reduce", bytes_in=4),
        Expect("all_reduce", bytes_out=4),
        Expect("all_reduce", dtype=torch.float64),
        Expect("all_reduce", group_size=4),
        Expect("all_reduce", detail="avg"),
        Expect("barrier"),
        "barrier",
    ],
)
def test_each_thing_asked_for_must_be_so(expected: str | Expect) -> None:
    calls = [event("all_reduce", feature="ddp")]
    assert_calls(calls, [Expect("all_reduce", "ddp", 16, 16, torch.float32, 2, "sum")])
    with pytest.raises(AssertionError, match="other calls than expected"):
        assert_calls(calls, [expected])


def test_the_message_aligns_what_was_called_with_what_was_expected() -> None:
    calls = [event("broadcast", 0.0), event("all_reduce", 1.0), event("barrier", 2.0)]
    with pytest.raises(AssertionError) as caught:
        assert_calls(calls, ["broadcast", Expect("reduce", bytes_in=8), "barrier"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 0 made other calls than expected (- not called, + called):"
    assert [line[:14].rstrip() for line in lines[1:]] == [
        "    broadcast",
        "  - reduce byt",
        "  + all_reduce",
        "    barrier (s",
    ]
    assert lines[3].endswith(
        "all_reduce (sum) feature=user float32 [4] bytes_in=16 bytes_out=16 group_size=2 "
        "at train.py:3 in step"
    )


@pytest.mark.parametrize("expected", [["a"], ["a", "b", "c", "d"], ["a", "a"]])
def test_too_few_and_too_many_are_found(expected: list[str]) -> None:
    with pytest.raises(AssertionError):
        assert_calls([event("a", 0.0), event("b", 1.0), event("c", 2.0)], expected)


def test_others_may_stand_between_when_not_exact() -> None:
    calls = [event("a", 0.0), event("b", 1.0), event("c", 2.0)]
    assert_calls(calls, ["a", "c"], exact=False)
    assert_calls(calls, [], exact=False)
    with pytest.raises(AssertionError, match=r"- c\n    a "):
        assert_calls(calls, ["c", "a"], exact=False)


def test_events_of_several_ranks_have_no_order() -> None:
    with pytest.raises(ConfigError, match=r"ranks \[0, 1\]"):
        assert_calls([event("a"), event("a", rank=1)], ["a", "a"])


def test_bytes_add_up_by_op() -> None:
    calls = [event("a", num_bytes=8), event("b", num_bytes=4), event("a", num_bytes=16)]
    assert bytes_by_op(calls) == {"a": 24, "b": 4}


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((0.0, 2.0), (1.0, 3.0), True),
        ((0.0, 3.0), (1.0, 2.0), True),
        ((0.0, 1.0), (1.0, 2.0), False),
        ((0.0, 1.0), (2.0, 3.0), False),
    ],
)
def test_overlap_is_time_in_common(a: tuple[float, float], b: tuple[float, float], expected: bool) -> None:
    assert overlaps(Span(*a), Span(*b)) == expected
    assert overlaps(Span(*b), Span(*a)) == expected


def test_a_span_covers_its_block() -> None:
    with span() as outer, span() as inner:
        assert overlaps(outer, inner)
    assert outer.start_secs <= inner.start_secs <= inner.end_secs <= outer.end_secs

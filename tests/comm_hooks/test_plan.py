"""The planners of quantized and low-rank hooks: every number has one place, on every rank the same."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.comm_hooks.low_rank import matrix_shape, plan_low_rank
from weft.comm_hooks.quantize_plan import (
    ALIGNMENT,
    MOST_CPU_ROW_NUMEL,
    MOST_ROW_NUMEL,
    SCALE_BYTES,
    QuantizePlan,
    plan_blocks,
    plan_gradients,
)


def rows_of(plan: QuantizePlan) -> list[tuple[int, int, int, int]]:
    """Chunk, row in the chunk, start in the bucket and length of every row."""
    return [
        (which, run.first_row + row, chunk.start + run.start + row * run.row_numel, run.row_numel)
        for which, chunk in enumerate(plan.chunks)
        for run in chunk.runs
        for row in range(run.num_rows)
    ]


def check(plan: QuantizePlan, numel: int, group_size: int) -> None:
    assert len(plan.chunks) == group_size
    rows = rows_of(plan)
    # Rows follow each other without gaps and cover the bucket.
    assert [start for *_, start, _ in rows] + [numel] == [0, *accumulate(length for *_, length in rows)]
    for which, chunk in enumerate(plan.chunks):
        own = [row for row in rows if row[0] == which]
        assert [row[1] for row in own] == list(range(chunk.num_rows))
        assert sum(row[3] for row in own) == chunk.numel
        assert chunk.numel <= plan.scales_start
        assert plan.scales_start + SCALE_BYTES * chunk.num_rows <= plan.message_bytes
        assert chunk.start % ALIGNMENT == 0 or chunk.numel == 0
    assert plan.scales_start % ALIGNMENT == plan.message_bytes % ALIGNMENT == 0


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 9), st.integers(1, 700))
def test_blocks_cover_the_bucket(numel: int, group_size: int, block_numel: int) -> None:
    plan = plan_blocks(numel, group_size, block_numel)
    check(plan, numel, group_size)
    assert all(length <= block_numel for *_, length in rows_of(plan))


@settings(deadline=None)
@given(st.lists(st.integers(0, 30_000), min_size=1, max_size=6), st.integers(1, 5))
def test_rows_of_gradients_cross_no_border(sizes: list[int], group_size: int) -> None:
    numel = max(1, sum(sizes))
    starts = tuple(sum(sizes[:at]) for at in range(len(sizes)))
    plan = plan_gradients(numel, group_size, starts)
    check(plan, numel, group_size)
    for *_, start, length in rows_of(plan):
        assert length <= MOST_ROW_NUMEL
        assert not any(start < border < start + length for border in starts)


def test_a_message_is_little_more_than_a_byte_a_number() -> None:
    plan = plan_blocks(4_000_000, 2, 512)
    assert plan.message_bytes * 2 / 4_000_000 < 1.01
    assert plan_gradients(4_000_000, 2, (0,)).message_bytes * 2 / 4_000_000 < 1.001


def test_rows_are_longer_on_a_cpu() -> None:
    lengths = {length for *_, length in rows_of(plan_gradients(4_000_000, 2, (0,), is_cpu=True))}
    assert max(lengths) == MOST_CPU_ROW_NUMEL > MOST_ROW_NUMEL


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [((), (1, 1)), ((5,), (5, 1)), ((4, 3), (4, 3)), ((4, 3, 2), (4, 6)), ((0, 3), (0, 0)), ((3, 0), (3, 0))],
)
def test_a_gradient_is_a_matrix_of_its_first_dim(shape: tuple[int, ...], matrix: tuple[int, int]) -> None:
    assert matrix_shape(torch.Size(shape)) == matrix


SHAPES = [torch.Size(shape) for shape in ((40, 30), (7,), (50, 20), (40, 30), (2, 3), (), (0, 4))]


def test_what_gets_smaller_is_factored() -> None:
    plan = plan_low_rank(SHAPES, rank=2, min_rate=2, batches_shapes=False)
    assert [factor.members for factor in plan.factors] == [(0,), (3,), (2,)]
    assert plan.plain == (1, 4, 5, 6)
    assert plan.plain_numel == 7 + 6 + 1
    assert [factor.p_start for factor in plan.factors] == [0, 80, 160]
    assert [factor.q_start for factor in plan.factors] == [0, 60, 120]
    assert (plan.p_numel, plan.q_numel) == (260, 160)
    assert plan.numel_before == 40 * 30 * 2 + 7 + 50 * 20 + 6 + 1
    assert plan.numel_after == 14 + 260 + 160


def test_shapes_may_be_batched_and_the_memory_stays_the_same() -> None:
    apart = plan_low_rank(SHAPES, rank=2, min_rate=2, batches_shapes=False)
    batched = plan_low_rank(SHAPES, rank=2, min_rate=2, batches_shapes=True)
    assert [factor.members for factor in batched.factors] == [(0, 3), (2,)]
    assert (batched.p_numel, batched.q_numel) == (apart.p_numel, apart.q_numel)


def test_the_rank_is_that_of_the_smaller_side_at_most() -> None:
    plan = plan_low_rank([torch.Size((3, 900))], rank=8, min_rate=0.5, batches_shapes=False)
    assert plan.factors[0].rank == 3


def test_a_rate_that_is_not_reached_leaves_all_as_it_is() -> None:
    plan = plan_low_rank(SHAPES, rank=1, min_rate=1000, batches_shapes=False)
    assert plan.factors == ()
    assert plan.numel_after == plan.numel_before

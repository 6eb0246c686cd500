"""Every dense collective, against results computed by hand; gloo, where it can do the same, checks those."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.local.inputs import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    SOME_SIZES,
    UNSIGNED,
    all_gather_single,
    assert_same,
    dtypes,
    finish,
    me,
    num_ranks,
    ops_of,
    reduce_scatter_single,
    reduced,
    sample,
    samples,
    sizes,
)
from tests.ranks import run_on

ON_THREADS = run_on(threads=(2, 3), timeout=60)
ON_PROCESSES = run_on(weft=(2, 4), timeout=60, full=True)
ON_GLOO = run_on(gloo=4, timeout=20, full=True)

pytestmark = [ON_THREADS, ON_PROCESSES, ON_GLOO]

BOTH = (False, True)  # async_op


def test_all_reduce_of_every_size() -> None:
    for numel in sizes():
        want = reduced(samples(numel))
        for is_async in BOTH:
            tensor = sample(me(), numel)
            finish(dist.all_reduce(tensor, async_op=is_async))
            assert_same(tensor, want, f"all_reduce of {numel}, {is_async=}")


def test_all_reduce_of_every_dtype_and_op() -> None:
    for dtype in dtypes():
        for op in ops_of(dtype):
            for numel in (5, 20000):
                tensor = sample(me(), numel, dtype)
                dist.all_reduce(tensor, op)
                assert_same(tensor, reduced(samples(numel, dtype), op), f"all_reduce {op} {numel}")


@ON_THREADS
@ON_PROCESSES
def test_all_reduce_of_wide_unsigned() -> None:
    for dtype in UNSIGNED:
        for op in ops_of(dtype):
            tensor = sample(me(), 7, dtype)
            dist.all_reduce(tensor, op)
            assert_same(tensor, reduced(samples(7, dtype), op), f"all_reduce {op}")


def test_all_reduce_average() -> None:
    for dtype in FLOATS:
        for numel in (1, 5, 20000):
            tensor = sample(me(), numel, dtype)
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            want = (reduced(samples(numel, torch.int64)).double() / num_ranks()).to(dtype)
            eps = torch.finfo(dtype).eps  # one rounding more or less: 1/3 isn't a float
            torch.testing.assert_close(tensor, want, rtol=eps, atol=0)


@ON_THREADS
@ON_PROCESSES
def test_premul_sum_with_a_factor_a_rank() -> None:
    # One factor a rank, all powers of two: exact.
    for numel in (5, 20000):
        tensor = sample(me(), numel)
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(2.0 ** me()))
        want = sum(2.0**rank * sample(rank, numel) for rank in range(num_ranks()))
        assert_same(tensor, want, f"premul_sum of {numel}")
        parts = sample(me(), num_ranks() * numel)
        part = torch.empty(numel)
        reduce_scatter_single(part, parts, dist._make_nccl_premul_sum(0.5))
        want = 0.5 * reduced(samples(num_ranks() * numel)).chunk(num_ranks())[me()]
        assert_same(part, want, f"premul_sum, reduce_scatter_tensor of {numel}")


def test_broadcast_from_every_root() -> None:
    for root in range(num_ranks()):
        for numel in SOME_SIZES:
            for is_async in BOTH:
                tensor = sample(me(), numel, salt=root)
                finish(dist.broadcast(tensor, root, async_op=is_async))
                assert_same(tensor, sample(root, numel, salt=root), f"broadcast of {numel} from {root}")


def test_reduce_to_every_root() -> None:
    for root in range(num_ranks()):
        for numel in SOME_SIZES:
            for is_async in BOTH:
                tensor = sample(me(), numel)
                finish(dist.reduce(tensor, root, async_op=is_async))
                if me() == root:
                    assert_same(tensor, reduced(samples(numel)), f"reduce of {numel} to {root}")


def test_all_gather_into_lists() -> None:
    for numel in sizes():
        for is_async in BOTH:
            outs = [torch.full((numel,), -1.0) for _ in range(num_ranks())]
            finish(dist.all_gather(outs, sample(me(), numel), async_op=is_async))
            for rank, out in enumerate(outs):
                assert_same(out, sample(rank, numel), f"all_gather of {numel}, from {rank}")


def test_all_gather_into_one_tensor() -> None:
    for numel in sizes():
        for is_async in BOTH:
            out = torch.full((num_ranks() * numel,), -1.0)
            finish(all_gather_single(out, sample(me(), numel), async_op=is_async))
            assert_same(out, torch.cat(samples(numel)), f"all_gather_into_tensor of {numel}")
    joined = torch.full((num_ranks() * 3, 5), -1.0)
    all_gather_single(joined, sample(me(), (3, 5)))
    assert_same(joined, torch.cat(samples((3, 5))), "all_gather_into_tensor, joined")
    if dist.get_backend() != "gloo":  # which takes them joined only
        stacked = torch.full((num_ranks(), 3, 5), -1.0)
        all_gather_single(stacked, sample(me(), (3, 5)))
        assert_same(stacked, torch.stack(samples((3, 5))), "all_gather_into_tensor, stacked")


def test_all_gather_in_place() -> None:
    for numel in sizes():
        out = torch.full((num_ranks() * numel,), -1.0)
        part = out[me() * numel : (me() + 1) * numel]
        part.copy_(sample(me(), numel))
        all_gather_single(out, part)
        assert_same(out, torch.cat(samples(numel)), f"all_gather_into_tensor in place, {numel}")
        outs = [torch.full((numel,), -1.0) for _ in range(num_ranks())]
        outs[me()].copy_(sample(me(), numel))
        dist.all_gather(outs, outs[me()])
        assert_same(torch.cat(outs), torch.cat(samples(numel)), f"all_gather in place, {numel}")


def test_reduce_scatter_of_lists_and_tensors() -> None:
    for numel in sizes():
        want = reduced(samples(num_ranks() * numel)).chunk(num_ranks())[me()] if numel else torch.empty(0)
        for is_async in BOTH:
            parts = list(sample(me(), num_ranks() * numel).chunk(num_ranks())) if numel else []
            parts = parts or [torch.empty(0) for _ in range(num_ranks())]
            out = torch.full((numel,), -1.0)
            finish(dist.reduce_scatter(out, parts, async_op=is_async))
            assert_same(out, want, f"reduce_scatter of {numel}")
            out = torch.full((numel,), -1.0)
            whole = sample(me(), num_ranks() * numel)
            finish(reduce_scatter_single(out, whole, async_op=is_async))
            assert_same(out, want, f"reduce_scatter_tensor of {numel}")
            assert_same(whole, sample(me(), num_ranks() * numel), "reduce_scatter_tensor's input")


def test_reduce_scatter_in_place() -> None:
    for numel in (1, 1000, 20000, 300001):
        whole = sample(me(), num_ranks() * numel)
        part = whole[me() * numel : (me() + 1) * numel]
        reduce_scatter_single(part, whole)
        want = reduced(samples(num_ranks() * numel)).chunk(num_ranks())[me()]
        assert_same(part, want, f"reduce_scatter_tensor into a part of its input, {numel}")


def test_gather_to_every_root() -> None:
    for root in range(num_ranks()):
        for numel in SOME_SIZES:
            for is_async in BOTH:
                outs = [torch.full((numel,), -1.0) for _ in range(num_ranks())] if me() == root else None
                finish(dist.gather(sample(me(), numel), outs, root, async_op=is_async))
                for rank, out in enumerate(outs or []):
                    assert_same(out, sample(rank, numel), f"gather of {numel} from {rank} to {root}")


def test_scatter_from_every_root() -> None:
    for root in range(num_ranks()):
        for numel in SOME_SIZES:
            for is_async in BOTH:
                out = torch.full((numel,), -1.0)
                parts = samples(numel, salt=root) if me() == root else None
                finish(dist.scatter(out, parts, root, async_op=is_async))
                assert_same(out, sample(me(), numel, salt=root), f"scatter of {numel} from {root}")


def test_all_to_all_of_even_parts() -> None:
    for numel in SOME_SIZES:
        want = torch.cat([sample(rank, numel, salt=me()) for rank in range(num_ranks())])
        for is_async in BOTH:
            parts = [sample(me(), numel, salt=rank) for rank in range(num_ranks())]
            out = torch.full((num_ranks() * numel,), -1.0)
            finish(dist.all_to_all_single(out, torch.cat(parts), async_op=is_async))
            assert_same(out, want, f"all_to_all_single of {numel}")
            if dist.get_backend() == "gloo":
                continue  # gloo has no list form
            outs = [torch.full((numel,), -1.0) for _ in range(num_ranks())]
            finish(dist.all_to_all(outs, parts, async_op=is_async))
            assert_same(torch.cat(outs), want, f"all_to_all of {numel}")


def test_all_to_all_of_uneven_parts() -> None:
    # Rank s gives rank d s + 2 d rows, less two: nothing in some pairs.
    for columns in (1, 5, 4000):
        rows = [[max(0, s + 2 * d - 2) for d in range(num_ranks())] for s in range(num_ranks())]
        gives, gets = rows[me()], [rows[s][me()] for s in range(num_ranks())]
        whole = sample(me(), (sum(gives), columns))
        sent = [sample(s, (sum(rows[s]), columns)).split(rows[s]) for s in range(num_ranks())]
        want = torch.cat([sent[s][me()] for s in range(num_ranks())])
        out = torch.full((sum(gets), columns), -1.0)
        dist.all_to_all_single(out, whole, gets, gives)
        assert_same(out, want, f"all_to_all_single, uneven, {columns} columns")
        if dist.get_backend() == "gloo":
            continue
        outs = [torch.full((num_rows, columns), -1.0) for num_rows in gets]
        dist.all_to_all(outs, list(whole.split(gives)))
        assert_same(torch.cat(outs), want, f"all_to_all, uneven, {columns} columns")


def test_all_to_all_with_nothing_for_anyone() -> None:
    out = torch.empty(0, 3)
    dist.all_to_all_single(out, torch.empty(0, 3), [0] * num_ranks(), [0] * num_ranks())
    gives = [0] * num_ranks()
    gives[0] = 2 if me() == num_ranks() - 1 else 0  # only the last rank gives, only rank 0 gets
    gets = [0] * num_ranks()
    gets[-1] = 2 if me() == 0 else 0
    out = torch.full((sum(gets), 3), -1.0)
    dist.all_to_all_single(out, sample(me(), (sum(gives), 3)), gets, gives)
    want = sample(num_ranks() - 1, (2, 3)) if me() == 0 else torch.empty(0, 3)
    assert_same(out, want, "all_to_all_single from one rank to one rank")


def test_collectives_that_only_copy_take_every_dtype() -> None:
    more = [] if dist.get_backend() == "gloo" else [*UNSIGNED, torch.float8_e8m0fnu]
    for dtype in [*dtypes(), *more]:
        for numel in (3, 20001):
            given = sample(me(), numel, dtype)
            every = samples(numel, dtype)
            tensor = given.clone()
            dist.broadcast(tensor, 0)
            assert_same(tensor, every[0], "broadcast")
            outs = [torch.zeros_like(given) for _ in every]
            dist.all_gather(outs, given)
            assert_same(torch.cat(outs), torch.cat(every), "all_gather")
            out = torch.zeros(num_ranks() * numel, dtype=dtype)
            all_gather_single(out, given)
            assert_same(out, torch.cat(every), "all_gather_into_tensor")
            dist.all_to_all_single(out, torch.cat([given] * num_ranks()))
            assert_same(out, torch.cat(every), "all_to_all_single")
            part = torch.zeros_like(given)
            dist.scatter(part, every if me() == 0 else None, 0)
            assert_same(part, given, "scatter")
            gathered = [torch.zeros_like(given) for _ in every] if me() == 0 else None
            dist.gather(given, gathered, 0)
            for got, want in zip(gathered or [], every, strict=False):
                assert_same(got, want, "gather")


def test_reductions_take_the_dtypes_of_all_reduce() -> None:
    for dtype in dtypes():
        for op in ops_of(dtype):
            numel = 1003
            want = reduced(samples(num_ranks() * numel, dtype), op)
            tensor = sample(me(), num_ranks() * numel, dtype)
            dist.reduce(tensor, num_ranks() - 1, op)
            if me() == num_ranks() - 1:
                assert_same(tensor, want, f"reduce {op}")
            out = torch.zeros(numel, dtype=dtype)
            reduce_scatter_single(out, sample(me(), num_ranks() * numel, dtype), op)
            assert_same(out, want.chunk(num_ranks())[me()], f"reduce_scatter_tensor {op}")


def test_ops_that_mean_nothing_are_refused() -> None:
    """On every rank, before anything moves; the group goes on."""
    meaningless = [
        *((dtype, dist.ReduceOp.BAND) for dtype in FLOATS),
        *((dtype, op) for dtype in COMPLEX for op in (dist.ReduceOp.MIN, dist.ReduceOp.BXOR)),
    ]
    for dtype, op in meaningless:
        tensor = sample(me(), 7, dtype)
        try:
            dist.all_reduce(tensor, op)
        except (ValueError, RuntimeError):
            pass
        else:
            raise AssertionError(f"all_reduce with {op} of {dtype} went through: {tensor}")
        assert_same(tensor, sample(me(), 7, dtype), "a refused tensor")
    tensor = sample(me(), 7, INTEGERS[0])
    dist.all_reduce(tensor)
    assert_same(tensor, reduced(samples(7, INTEGERS[0])), "all_reduce after refusals")


@run_on(threads=2, timeout=60)
def test_an_average_of_small_integers_does_not_wrap() -> None:
    tensor = torch.tensor([100, -100], dtype=torch.int8)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    assert tensor.tolist() == [100, -100]

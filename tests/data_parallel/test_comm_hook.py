"""register_comm_hook: what is refused, the order of calls, what a hook may return, and what if it raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from tests.data_parallel.hooks import first_value, future_of, mean_hook, names_in, noting_hook
from tests.data_parallel.libraries import ON_TORCH, DistributedDataParallel, GradBucket, weft_only
from tests.data_parallel.twins import (
    WIDTH,
    Twin,
    all_ranks,
    filled,
    make_rows,
    mean_square,
    net,
    rows_of,
)
from tests.ranks import run_on

pytestmark = run_on(threads=2)

VIEW = pytest.mark.parametrize("view", [False, True])


def annotated(**annotations: Any) -> Any:
    """A hook with these annotations, given as objects and not as strings."""

    def hook(state, bucket):
        return future_of(bucket.buffer())

    hook.__annotations__ = annotations
    return hook


def test_a_hook_must_be_callable() -> None:
    model = DistributedDataParallel(net())
    with pytest.raises(TypeError, match=r"Communication hook must be callable\."):
        model.register_comm_hook(state=None, hook=1)


def test_a_bucket_annotated_as_another_thing_is_refused() -> None:
    model = DistributedDataParallel(net())
    with pytest.raises(ValueError, match=r"bucket annotation should be dist\.GradBucket"):
        model.register_comm_hook(None, annotated(bucket=int))


def test_a_result_annotated_as_another_thing_is_refused() -> None:
    model = DistributedDataParallel(net())
    with pytest.raises(
        ValueError, match=r"Communication hook: return annotation should be torch\.futures\.Future"
    ):
        model.register_comm_hook(None, annotated(bucket=GradBucket, **{"return": int}))


FUTURE = Future[torch.Tensor]
RIGHT = [{}, {"bucket": GradBucket}, {"return": FUTURE}, {"bucket": GradBucket, "return": FUTURE}]
STRINGS = [{"bucket": "GradBucket", "return": "Future[torch.Tensor]"}, {"bucket": dist.GradBucket}]


@pytest.mark.parametrize(
    "annotations",
    [*RIGHT, *(pytest.param(a, marks=weft_only("refuses strings")) for a in STRINGS)],
    ids=str,
)
def test_a_hook_annotated_rightly_is_taken(annotations: dict[str, Any]) -> None:
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, annotated(**annotations))
    model(make_rows()).sum().backward()


def test_what_was_refused_leaves_the_model_as_it_was() -> None:
    twin = Twin(net())
    with pytest.raises(TypeError):
        twin.parallel.register_comm_hook(None, 1)
    twin.parallel.register_comm_hook(None, mean_hook)
    for step in range(2):
        twin.step(make_rows(step))


def test_a_hook_is_registered_once() -> None:
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, mean_hook)
    with pytest.raises(
        RuntimeError, match="register_comm_hook or register_builtin_comm_hook can only be called once"
    ):
        model.register_comm_hook(None, mean_hook)


@run_on(gloo_threads=2)
def test_builtin_hooks() -> None:
    for place in range(2):
        twin = Twin(net())
        kind = [dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS][place]
        twin.parallel._register_builtin_comm_hook(kind)
        for step in range(2):
            twin.backward(make_rows(step))
            twin.check([1e-13, 2**-9][place])
            twin.update(lr=0.0)


def test_what_is_no_future_is_named() -> None:
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, lambda state, bucket: 1)
    with pytest.raises(
        RuntimeError, match=r"callback must return a torch\.futures\.Future.* object, but got"
    ):
        model(make_rows()).sum().backward()


@VIEW
def test_a_hook_gets_its_state_and_gives_the_gradients(view: bool) -> None:
    twin = Twin(net(), gradient_as_bucket_view=view, bucket_cap_mb=0.0001)
    calls: list[int] = []

    def hook(state, bucket):
        state.append(bucket.index())
        return mean_hook(None, bucket)

    twin.parallel.register_comm_hook(calls, hook)
    for step in range(3):
        calls.clear()
        twin.step(make_rows(step))
        assert calls == list(range(len(calls)))
        assert step == 0 or len(calls) > 1


@VIEW
def test_what_a_hook_returns_is_what_the_gradients_become(view: bool) -> None:
    model = DistributedDataParallel(net(), gradient_as_bucket_view=view, bucket_cap_mb=0.0001)
    model.register_comm_hook(None, lambda state, bucket: future_of(torch.full_like(bucket.buffer(), 7.0)))
    for _ in range(3):
        model.zero_grad()
        mean_square(model, make_rows(), 0).backward()
        assert all((param.grad == 7).all() for param in model.parameters())


@weft_only("takes a tensor only")
@VIEW
def test_a_hook_may_return_a_list_of_one_tensor(view: bool) -> None:
    model = DistributedDataParallel(net(), gradient_as_bucket_view=view)
    model.register_comm_hook(None, lambda state, bucket: future_of([bucket.buffer().fill_(3.0)]))
    mean_square(model, make_rows(), 0).backward()
    assert all((param.grad == 3).all() for param in model.parameters())


@VIEW
def test_a_hook_may_return_another_dtype(view: bool) -> None:
    twin = Twin(net(), gradient_as_bucket_view=view)

    def hook(state, bucket):
        short = bucket.buffer().float().div_(dist.get_world_size())
        return dist.all_reduce(short, async_op=True).get_future().then(first_value)

    twin.parallel.register_comm_hook(None, hook)
    for step in range(2):
        twin.backward(make_rows(step))
        assert all(param.grad.dtype == torch.float64 for param in twin.parallel.parameters())
        twin.check(1e-6)
        twin.update(lr=0.0)


def test_a_hook_may_set_the_buffer() -> None:
    twin = Twin(net())

    def hook(state, bucket):
        bucket.set_buffer(bucket.buffer() / dist.get_world_size())
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(first_value)

    twin.parallel.register_comm_hook(None, hook)
    for step in range(2):
        twin.step(make_rows(step))


@VIEW
def test_a_future_may_be_done_later(view: bool) -> None:
    """Of all buckets, only when the last one is there."""
    twin = Twin(net(), gradient_as_bucket_view=view, bucket_cap_mb=0.0001)
    waiting: list[tuple[Future, torch.Tensor]] = []

    def hook(state, bucket):
        future: Future = Future()
        waiting.append((future, bucket.buffer()))
        if bucket.is_last():
            for due, flat in waiting:
                flat = flat / dist.get_world_size()
                dist.all_reduce(flat)
                due.set_result(flat)
            waiting.clear()
        return future

    twin.parallel.register_comm_hook(None, hook)
    for step in range(3):
        twin.step(make_rows(step))


class HookError(RuntimeError):
    """What a user's hook raises."""


def test_an_error_in_a_hook_comes_out_of_backward() -> None:
    model = DistributedDataParallel(net())

    def hook(state, bucket):
        raise HookError("no more ink")

    model.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError if ON_TORCH else HookError, match="no more ink"):
        model(make_rows()).sum().backward()


def test_an_error_in_a_hooks_future_comes_out_of_backward() -> None:
    model = DistributedDataParallel(net())

    def hook(state, bucket):
        future: Future = Future()
        future.set_exception(HookError("no more paper"))
        return future

    model.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match="no more paper"):
        model(make_rows()).sum().backward()


class Reversed(nn.Module):
    """Runs its layers in another order than it defines them, and rank by rank in another if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in "abcd"})
        filled(self)

    def forward(self, rows: torch.Tensor, order: str) -> torch.Tensor:
        for name in order:
            rows = torch.tanh(self.layers[name](rows))
        return rows


def orders_of_buckets(order: str) -> list[list[str]]:
    """The parameters' names in the order of the buckets, step by step."""
    model = DistributedDataParallel(Reversed(), bucket_cap_mb=0.0001)
    seen: list = []
    model.register_comm_hook(seen, noting_hook)
    orders = []
    for step in range(3):
        seen.clear()
        model(rows_of(make_rows(step), dist.get_rank()), order).square().mean().backward()
        buckets = names_in(seen, model)
        assert step == 0 or len(buckets) == 4
        orders.append([name.split(".")[1] for names in buckets for name in names])
    return orders


def test_after_the_first_step_buckets_are_in_the_order_of_arrival() -> None:
    orders = orders_of_buckets("dbac")  # backward goes from the end
    assert orders[1] == orders[2] == ["c", "a", "b", "d"]


def test_buckets_are_alike_on_ranks_that_go_another_way() -> None:
    orders = orders_of_buckets("dbac" if dist.get_rank() == 0 else "abcd")
    first, second = all_ranks(orders)
    assert first == second
    assert first[1] == ["c", "a", "b", "d"]  # the first rank's


def test_the_first_order_is_the_reverse_of_the_definition() -> None:
    assert orders_of_buckets("abcd")[0][-1] == "a" or ON_TORCH

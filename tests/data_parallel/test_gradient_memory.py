"""Whose memory a gradient is: the bucket's, autograd's or the user's, who may exchange or keep it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.data_parallel.libraries import DistributedDataParallel
from tests.data_parallel.twins import Twin, assert_same_gradient, gradients_of, make_rows, net
from tests.ranks import run_on

pytestmark = run_on(threads=2)

VIEW = pytest.mark.parametrize("view", [False, True])


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def grads(model: Any) -> list[torch.Tensor]:
    return [param.grad for param in model.parameters()]


def warmed_up_twin(**options: object) -> Twin:
    """After two steps buckets are as they will be; gradients are None."""
    twin = Twin(net(), **options)
    for step in range(2):
        twin.step(make_rows(step))
    return twin


def test_gradients_are_views_of_one_bucket() -> None:
    twin = warmed_up_twin(gradient_as_bucket_view=True)
    twin.backward(make_rows(5))
    twin.check()
    assert len({memory_of(grad) for grad in grads(twin.parallel)}) == 1


def test_each_small_bucket_has_memory_of_its_own() -> None:
    twin = warmed_up_twin(gradient_as_bucket_view=True, bucket_cap_mb=0.0001)
    twin.backward(make_rows(5))
    twin.check()
    assert len({memory_of(grad) for grad in grads(twin.parallel)}) > 1


@VIEW
def test_gradients_do_not_overlap(view: bool) -> None:
    twin = warmed_up_twin(gradient_as_bucket_view=view)
    twin.backward(make_rows(5))
    taken: set[int] = set()
    for grad in grads(twin.parallel):
        first = grad.data_ptr()
        bytes_of_it = set(range(first, first + grad.numel() * grad.element_size()))
        assert not taken & bytes_of_it
        taken |= bytes_of_it


def test_a_view_is_the_hooks_buffer() -> None:
    twin = Twin(net(), gradient_as_bucket_view=True)
    buffers: list[torch.Tensor] = []

    def hook(state, bucket):
        buffers.append(bucket.buffer())
        assert [list(grad.shape) for grad in bucket.gradients()] == [
            list(param.shape) for param in bucket.parameters()
        ]
        flat = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(flat, async_op=True).get_future().then(lambda done: done.value()[0])

    twin.parallel.register_comm_hook(None, hook)
    for step in range(2):
        twin.step(make_rows(step))
    buffers.clear()
    twin.backward(make_rows(5))
    assert {memory_of(buffer) for buffer in buffers} == {memory_of(grad) for grad in grads(twin.parallel)}


def test_a_gradient_that_the_user_keeps_keeps_its_values() -> None:
    twin = warmed_up_twin(gradient_as_bucket_view=False)
    twin.backward(make_rows(5))
    kept = gradients_of(twin.parallel)
    values = {name: grad.clone() for name, grad in kept.items()}
    twin.update()
    for step in range(2):
        twin.step(make_rows(step + 6))
    for name, grad in kept.items():
        assert torch.equal(grad, values[name]), name


def test_a_gradient_that_the_user_keeps_may_be_changed() -> None:
    """It is the user's: what is done to it must not reach the next step."""
    twin = warmed_up_twin(gradient_as_bucket_view=False)
    twin.backward(make_rows(5))
    kept = grads(twin.parallel)
    twin.update()
    twin.backward(make_rows(6))
    for grad in kept:
        grad.fill_(float("nan"))
    twin.check()
    twin.update()
    twin.step(make_rows(7))


@VIEW
def test_zero_grad_to_none(view: bool) -> None:
    twin = warmed_up_twin(gradient_as_bucket_view=view)
    for step in range(3):
        twin.parallel.zero_grad(set_to_none=True)
        assert all(grad is None for grad in grads(twin.parallel))
        twin.single.zero_grad(set_to_none=True)
        twin.backward(make_rows(step))
        twin.check()


@VIEW
def test_zero_grad_in_place_keeps_the_tensors(view: bool) -> None:
    twin = warmed_up_twin(gradient_as_bucket_view=view)
    twin.backward(make_rows(5))
    twin.check()
    before = [grad.data_ptr() for grad in grads(twin.parallel)]
    for step in range(3):
        twin.parallel.zero_grad(set_to_none=False)
        twin.single.zero_grad(set_to_none=False)
        twin.backward(make_rows(step))
        twin.check()
        assert [grad.data_ptr() for grad in grads(twin.parallel)] == before


def test_memory_that_the_user_gives_is_filled_in_place() -> None:
    twin = warmed_up_twin(gradient_as_bucket_view=False)
    own = [torch.zeros_like(param) for param in twin.parallel.parameters()]
    for param, grad in zip(twin.parallel.parameters(), own, strict=True):
        param.grad = grad
    twin.backward(make_rows(5))
    twin.check()
    for param, grad, right in zip(twin.parallel.parameters(), own, twin.single.parameters(), strict=True):
        assert param.grad is grad
        assert_same_gradient(grad, right.grad)


@VIEW
def test_memory_that_the_user_gives_has_a_say(view: bool) -> None:
    """What is in it is accumulated into, the mean of the ranks' own."""
    twin = warmed_up_twin(gradient_as_bucket_view=view)
    for param, right in zip(twin.parallel.parameters(), twin.single.parameters(), strict=True):
        param.grad = torch.full_like(param, float(dist.get_rank()))
        right.grad = torch.full_like(param, 0.5)
    twin.backward(make_rows(5))
    twin.check()


@VIEW
def test_one_gradient_of_the_bucket_may_be_replaced(view: bool) -> None:
    """Clipping by hand puts another tensor in one place."""
    twin = warmed_up_twin(gradient_as_bucket_view=view)
    twin.backward(make_rows(5))
    for model in (twin.parallel, twin.single):
        param = next(model.parameters())
        param.grad = param.grad.clamp(-0.01, 0.01)
    twin.backward(make_rows(6))
    twin.check()
    twin.update()
    twin.step(make_rows(7))


@VIEW
def test_gradients_clipped_in_place(view: bool) -> None:
    twin = warmed_up_twin(gradient_as_bucket_view=view)
    for step in range(3):
        twin.backward(make_rows(step))
        for model in (twin.parallel, twin.single):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        twin.check(1e-12)
        twin.update()


def test_batched_copies_change_nothing() -> None:
    twin = Twin(net(), batched_grad_copy=True, bucket_cap_mb=0.0001)
    for step in range(3):
        twin.step(make_rows(step))


@VIEW
def test_the_model_is_freed(view: bool) -> None:
    """Nothing but cycles keeps a model that nobody holds."""
    parallel: Any = DistributedDataParallel(net(), gradient_as_bucket_view=view)
    for _ in range(2):
        parallel(make_rows()).sum().backward()
    weight = weakref.ref(parallel.module[0].weight)
    wrapper = weakref.ref(parallel)
    del parallel
    dist.barrier()
    if dist.get_rank() == 0:  # two threads that collect at one time take garbage from each other
        gc.collect()
    dist.barrier()
    assert wrapper() is None
    assert weight() is None


# -- memory that the user has exchanged or kept ----------------------------------------------


def mean_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def right_gradients(model: weft.DistributedDataParallel, rows: torch.Tensor) -> list[torch.Tensor]:
    single = copy.deepcopy(model.module)
    single.zero_grad()
    single(rows).sum().backward()
    return [mean_over_ranks(param.grad) for param in single.parameters()]


def assert_right(model: weft.DistributedDataParallel, rows: torch.Tensor) -> None:
    for param, right in zip(model.parameters(), right_gradients(model, rows), strict=True):
        torch.testing.assert_close(param.grad, right, rtol=1e-5, atol=1e-5, check_stride=False)


def warmed_up(module: nn.Module, rows: torch.Tensor, **options: object) -> weft.DistributedDataParallel:
    model = weft.DistributedDataParallel(module, **options)
    for _ in range(2):
        model.zero_grad()
        model(rows).sum().backward()
    return model


def two_layers(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


def my_rows(width: int = 3) -> torch.Tensor:
    return torch.full((2, width), dist.get_rank() + 1.0)


@pytest.mark.parametrize("width", [3, 200])
@pytest.mark.parametrize("view", [False, True])
def test_a_step_after_grad_data_was_assigned_has_the_mean(width: int, view: bool) -> None:
    rows = my_rows(width)
    model = warmed_up(two_layers(width), rows, gradient_as_bucket_view=view)
    for param in model.parameters():
        param.grad.data = param.grad.data * 0.5
    for scale in (3.0, 4.0):
        model.zero_grad()
        model(rows * scale).sum().backward()
        assert_right(model, rows * scale)


def test_gradients_add_up_onto_data_that_was_assigned() -> None:
    rows = my_rows()
    model = warmed_up(two_layers(), rows)
    for param in model.parameters():
        param.grad.data = torch.zeros_like(param)
    model(rows * 3).sum().backward()
    assert_right(model, rows * 3)


def test_a_change_of_memory_format_after_wrapping_leaves_the_mean() -> None:
    rows = torch.full((2, 3, 5, 5), dist.get_rank() + 1.0)
    model: Any = warmed_up(nn.Conv2d(3, 4, 3), rows)
    model.to(memory_format=torch.channels_last)
    model.zero_grad()
    model(rows * 3).sum().backward()
    assert_right(model, rows * 3)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_change_of_dtype_after_wrapping_is_an_error_or_right(set_to_none: bool) -> None:
    rows = my_rows()
    model = warmed_up(two_layers(), rows)
    model.double()
    model.zero_grad(set_to_none=set_to_none)
    try:
        model(rows.double() * 3).sum().backward()
    except RuntimeError as error:
        if "weight" not in str(error) and "bias" not in str(error):
            raise
        return
    assert_right(model, rows.double() * 3)


def test_a_kept_gradient_stays_while_others_add_up() -> None:
    rows = my_rows()
    model: Any = warmed_up(two_layers(), rows)
    weight = model.module[0].weight
    kept = weight.grad
    before = kept.clone()
    weight.grad = None
    model(rows * 3).sum().backward()
    assert torch.equal(kept, before)


def user_made(model: weft.DistributedDataParallel, rows: torch.Tensor) -> None:
    for param in model.parameters():
        param.grad = torch.zeros_like(param)


def accumulated(model: weft.DistributedDataParallel, rows: torch.Tensor) -> None:
    with model.no_sync():
        (model(rows).sum() * 0).backward()


@pytest.mark.filterwarnings("ignore:Using backward")  # of a cycle between parameter and gradient
@pytest.mark.parametrize("prepare", [user_made, accumulated])
def test_create_graph_on_top_of_gradients_gives_the_mean(prepare: Callable[..., None]) -> None:
    rows = my_rows()
    model = warmed_up(two_layers(), rows)
    model.zero_grad()
    prepare(model, rows)
    model(rows).sum().backward(create_graph=True)
    assert_right(model, rows)
    model.zero_grad()

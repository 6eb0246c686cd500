"""Autograd around tensor parallelism: second derivatives, hooks, checkpointing, autocast, copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tests.ranks import run_on
from tests.tensor_parallel.models import (
    MLP,
    Language,
    Stacked,
    gathering_plan,
    language_plan,
    mlp_plan,
    next_token_loss,
    sequence_plan,
)
from tests.tensor_parallel.twins import (
    Twin,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    filled,
    full_of,
    local_input,
    make_mesh,
    numbers,
    part_of,
    tokens,
    whole_of,
)

pytest_plugins = ["tests.tensor_parallel.libraries"]
pytestmark = [
    run_on(threads=2, library=["weft"]),
    run_on(threads=2, library=["torch"], full=True),
    run_on(gloo=2, library=["weft"], full=True),
    run_on(gpu=2, library=["weft"], timeout=90, collective_timeout=20),
]
MORE_ON_GPU = run_on(gpu_threads=(2, 4), library=["weft"], timeout=60, collective_timeout=20, also=True)


def penalty(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """The square of the input's gradient, by which second derivatives come in."""
    (grad,) = torch.autograd.grad(model(rows).square().sum(), rows, create_graph=True)
    return grad.square().sum()


# Not torch's, which loses the graph of an input's gradient.
@run_on(threads=2)
@run_on(gloo=2, full=True)
@run_on(gpu=2, timeout=90, collective_timeout=20)
def test_second_derivatives(tp: Any) -> None:
    """A penalty on the input's gradient, of an MLP on copies: every rank has the whole of it."""
    for bias in (True, False):
        twin = Twin(tp, filled(MLP(bias=bias)), make_mesh(), mlp_plan(tp))
        rows = [numbers(4, 8).requires_grad_() for _ in range(2)]
        seen, right = penalty(twin.parallel, rows[0]), penalty(twin.single, rows[1])
        assert_close(seen.detach(), right.detach(), "penalty")
        seen.backward()
        right.backward()
        assert_close(rows[0].grad, rows[1].grad, "gradient of the input")
        twin.check()


def test_second_derivatives_of_cut_rows(tp: Any) -> None:
    """Rows are cut: a rank's penalty is its rows', and the sum of them is the single process's."""
    mesh = make_mesh()
    twin = Twin(tp, filled(MLP()), mesh, gathering_plan(tp))
    full = numbers(4, 8).requires_grad_()
    mine = local_input(full, Shard(0), mesh)
    seen, right = penalty(twin.parallel, mine), penalty(twin.single, full)
    total = whole_of(seen.reshape(1), Shard(0), mesh).sum()
    assert_close(total, right.detach(), "penalty")
    seen.backward()
    right.backward()
    assert_close(mine.grad, part_of(full.grad, Shard(0), mesh), "gradient of the input")
    twin.check()


def test_second_derivatives_by_parameter(tp: Any) -> None:
    """The gradient of a gradient of a parameter."""
    mesh = make_mesh()
    models = [filled(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))) for _ in range(2)]
    tp.parallelize_module(models[0], mesh, {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()})
    norms = []
    for model in models:
        params = list(model.parameters())
        grads = torch.autograd.grad(model(numbers(3, 8)).square().sum(), params, create_graph=True)
        assert all(isinstance(grad, DTensor) == (model is models[0]) for grad in grads)
        norm = grads[3].square().sum()
        norms.append(norm)
        norm.backward()
    assert_close(full_of(norms[0]), norms[1].detach(), "norm")
    assert_same_gradients(*models)


def test_gradients_asked_for(tp: Any) -> None:
    """torch.autograd.grad gives what backward would put into .grad, which stays None."""
    mesh = make_mesh()
    for plan, given in ((mlp_plan(tp), Replicate()), (gathering_plan(tp), Shard(0))):
        twin = Twin(tp, filled(MLP()), mesh, plan)
        full = numbers(4, 8).requires_grad_()
        mine = local_input(full, given, mesh)
        sources = [mine, *twin.parallel.parameters()]
        grads = torch.autograd.grad(twin.parallel(mine).square().sum(), sources)
        rights = torch.autograd.grad(twin.single(full).square().sum(), [full, *twin.single.parameters()])
        assert all(source.grad is None for source in sources)
        assert_close(grads[0], part_of(rights[0], given, mesh), "gradient of the input")
        for grad, right in zip(grads[1:], rights[1:], strict=True):
            assert_close(full_of(grad), right, "gradient")


def test_one_gradient_of_many(tp: Any) -> None:
    """Only some of the inputs of the graph are asked for."""
    twin = Twin(tp, filled(MLP()), make_mesh(), mlp_plan(tp))
    for name in ("net1.weight", "net1.bias", "net2.weight", "net2.bias"):
        seen, right = (
            torch.autograd.grad(each(numbers(4, 8)).square().sum(), each.get_parameter(name))[0]
            for each in (twin.parallel, twin.single)
        )
        assert_close(full_of(seen), right, name)


def test_hooks_of_tensors(tp: Any) -> None:
    """Hooks of parameters and of activations see gradients and may change them, once each."""
    twin = Twin(tp, filled(MLP()), make_mesh(), mlp_plan(tp))
    calls: list[str] = []
    for name, param in twin.parallel.named_parameters():
        param.register_hook(lambda grad, name=name: (calls.append(name), grad * 2)[1])
        param.register_post_accumulate_grad_hook(lambda param, name=name: calls.append(f"{name} is there"))
    for param in twin.single.parameters():
        param.register_hook(lambda grad: grad * 2)
    twin.run(numbers(4, 8), Replicate(), Replicate())
    names = [name for name, _ in twin.parallel.named_parameters()]
    assert sorted(calls) == sorted([*names, *(f"{name} is there" for name in names)])


def test_optimizer_in_backward(tp: Any) -> None:
    """A step for each parameter as soon as its gradient is there."""
    models = [filled(Stacked()), filled(Stacked())]
    tp.parallelize_module(models[0], make_mesh(), mlp_plan(tp, "layers.*."))

    def descend(param: torch.Tensor) -> None:
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.1)
        param.grad = None

    for model in models:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(descend)
        for step in range(3):
            model(numbers(4, 8, seed=step)).square().sum().backward()
    assert_same_parameters(*models)


@MORE_ON_GPU
def test_checkpointed(tp: Any) -> None:
    """Both kinds of activation checkpointing, blocks of a language model, cut sequences and copies."""
    for is_reentrant in (True, False):
        for plan in (language_plan(tp), sequence_plan(tp)):
            model = Language(blocks=2, is_checkpointed=is_reentrant)
            twin = Twin(tp, model, make_mesh(), plan)
            for step in range(2):
                twin.zero()
                words = tokens(2, 8, vocabulary=12, seed=step)
                twin.run(words, Replicate(), Replicate())


def test_checkpointed_layers(tp: Any) -> None:
    """A single parallel layer in a checkpoint, whose input needs a gradient or not."""
    for is_reentrant in (True, False):
        for needs_grad in (True, False):
            if is_reentrant and not needs_grad:
                continue  # gives no gradients at all, in a single process too
            twin = Twin(tp, filled(MLP()), make_mesh(), mlp_plan(tp))
            for each in (twin.parallel, twin.single):
                rows = numbers(4, 8).requires_grad_(needs_grad)
                checkpoint(each.net1, rows, use_reentrant=is_reentrant)
                hidden = checkpoint(each.net1, rows, use_reentrant=is_reentrant)
                each.net2(torch.tanh(hidden)).square().sum().backward()
            twin.check()


def test_without_grad(tp: Any) -> None:
    """no_grad and inference_mode: the same output, and no graph."""
    mesh = make_mesh()
    for plan, given in ((mlp_plan(tp), Replicate()), (gathering_plan(tp), Shard(0))):
        twin = Twin(tp, filled(MLP()), mesh, plan)
        right = part_of(twin.single(numbers(4, 8)).detach(), given, mesh)
        mine = part_of(numbers(4, 8), given, mesh)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                seen = twin.parallel(mine)
            assert not seen.requires_grad
            assert_close(seen, right, mode.__name__)
        twin.run(numbers(4, 8), given, given)  # and trains again


def test_without_grad_whole_models(tp: Any) -> None:
    for plan in (language_plan(tp), sequence_plan(tp)):
        twin = Twin(tp, Language(), make_mesh(), plan)
        words = tokens(2, 8, vocabulary=12)
        right = twin.single(words).detach()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert_close(twin.parallel.eval()(words), right, mode.__name__)


@run_on(threads=2, library=["weft"])
@run_on(threads=2, library=["torch"], full=True)
@run_on(gloo=2, library=["weft"], full=True)
def test_autocast(tp: Any) -> None:
    """Half precision inside, float32 parameters and gradients outside."""
    for plan, given in ((mlp_plan(tp), Replicate()), (gathering_plan(tp), Shard(0))):
        mesh = make_mesh()
        models = [filled(MLP(), dtype=torch.float32) for _ in range(2)]
        tp.parallelize_module(models[0], mesh, plan)
        full = numbers(4, 8, dtype=torch.float32)
        inputs = [local_input(full, given, mesh), full.clone().requires_grad_()]
        with torch.autocast("cpu", torch.bfloat16):
            seen, right = models[0](inputs[0]), models[1](inputs[1])
            assert seen.dtype == right.dtype == torch.bfloat16
        assert_close(seen.detach(), part_of(right.detach(), given, mesh), "output")
        seen.float().square().sum().backward()
        right.float().square().sum().backward()
        assert_close(inputs[0].grad, part_of(inputs[1].grad, given, mesh), "input", tolerance=5e-2)
        assert_same_gradients(*models, tolerance=5e-2)
        assert all(param.grad.dtype == torch.float32 for param in models[0].parameters())


@run_on(threads=2, library=["weft"])
@run_on(threads=2, library=["torch"], full=True)
@run_on(gloo=2, library=["weft"], full=True)
def test_autocast_norms(tp: Any) -> None:
    """A norm computes in float32 under autocast, on cut sequences too."""
    mesh = make_mesh()
    models = [filled(nn.LayerNorm(8), dtype=torch.float32) for _ in range(2)]
    tp.parallelize_module(models[0], mesh, tp.SequenceParallel(use_local_output=True))
    full = numbers(2, 4, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        seen, right = models[0](part_of(full, Shard(1), mesh)), models[1](full)
    assert seen.dtype == right.dtype
    assert_close(seen.detach(), part_of(right.detach(), Shard(1), mesh), "output")


def test_other_dtypes(tp: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        twin = Twin(tp, filled(MLP(), dtype=dtype), make_mesh(), mlp_plan(tp))
        for each in (twin.parallel, twin.single):
            each(numbers(4, 8, dtype=dtype)).sum().backward()
        twin.check(tolerance=None if dtype == torch.float32 else 6e-2)


@MORE_ON_GPU
def test_copies(tp: Any) -> None:
    """A deep copy, before the first forward and after a backward, is a model of its own."""
    twin = Twin(tp, filled(MLP()), make_mesh(), mlp_plan(tp))
    for _ in range(2):
        other, single = copy.deepcopy(twin.parallel), copy.deepcopy(twin.single)
        assert all(a is not b for a, b in zip(other.parameters(), twin.parallel.parameters(), strict=True))
        copied = Twin.__new__(Twin)
        copied.mesh, copied.parallel, copied.single = twin.mesh, other, single
        copied.zero()
        for step in range(2):
            copied.zero()
            copied.run(numbers(4, 8, seed=step), Replicate(), Replicate())
            for each in (other, single):
                torch.optim.SGD(each.parameters(), lr=0.1).step()
        assert_same_parameters(other, single)
        assert all(
            not torch.equal(full_of(a), full_of(b))
            for a, b in zip(other.parameters(), twin.parallel.parameters(), strict=True)
        )
        twin.zero()
        twin.run(numbers(4, 8), Replicate(), Replicate())


def test_copies_of_whole_models(tp: Any) -> None:
    model = Language()
    twin = Twin(tp, model, make_mesh(), sequence_plan(tp))
    next_token_loss(model, tokens(2, 9, vocabulary=12)).backward()
    other = copy.deepcopy(model)
    seen = other(tokens(2, 8, vocabulary=12, seed=3))
    assert_close(seen.detach(), twin.single(tokens(2, 8, vocabulary=12, seed=3)).detach(), "output")


def test_backward_twice(tp: Any) -> None:
    """Through one graph that is kept, and not through one that is gone."""
    twin = Twin(tp, filled(MLP()), make_mesh(), mlp_plan(tp))
    for each in (twin.parallel, twin.single):
        loss = each(numbers(4, 8).requires_grad_()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    twin.check()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    loss = twin.parallel(numbers(4, 8).requires_grad_()).square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_other_parameters_for_a_call(tp: Any) -> None:
    """torch.func.functional_call, as meta-learning does it."""
    twin = Twin(tp, filled(MLP()), make_mesh(), mlp_plan(tp))
    outputs = []
    for each in (twin.parallel, twin.single):
        params = {name: param * 2 for name, param in each.named_parameters()}
        output = functional_call(each, params, (numbers(4, 8),))
        output.square().sum().backward()
        outputs.append(output.detach())
    assert_close(outputs[0], outputs[1], "output")
    twin.check()


def test_changed_in_place(tp: Any) -> None:
    """A parameter that was changed after forward is an error in backward, as in a single process."""
    twin = Twin(tp, filled(MLP()), make_mesh(), mlp_plan(tp))
    for each in (twin.single, twin.parallel):
        loss = each(numbers(4, 8).requires_grad_()).square().sum()
        with torch.no_grad():
            each.net2.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_inputs_are_left_alone(tp: Any) -> None:
    """Neither the input nor the gradient that comes back is written to."""
    mesh = make_mesh()
    for plan, given in ((mlp_plan(tp), Replicate()), (gathering_plan(tp), Shard(0))):
        model = tp.parallelize_module(filled(MLP()), mesh, plan)
        mine = local_input(numbers(4, 8), given, mesh)
        before = mine.detach().clone()
        seen = model(mine)
        cotangent = numbers(*seen.shape, seed=3)
        kept, output = cotangent.clone(), seen.detach().clone()
        seen.backward(cotangent)
        assert torch.equal(mine.detach(), before)
        assert torch.equal(cotangent, kept)
        assert torch.equal(seen.detach(), output)


# Not torch's, whose outputs are views.
@run_on(threads=2)
@run_on(gloo=2, full=True)
@run_on(gpu=2, timeout=90, collective_timeout=20)
def test_outputs_may_be_written_to(tp: Any) -> None:
    """In place, as `x += residual` does; an output is nobody else's memory."""
    mesh = make_mesh()
    plans: list[tuple[Any, Any]] = [(mlp_plan(tp), Replicate()), (gathering_plan(tp), Shard(0))]
    for plan, given in plans:
        twin = Twin(tp, filled(MLP()), mesh, plan)
        full = numbers(4, 8)
        right = twin.single(full)
        right += 1
        seen = twin.parallel(part_of(full, given, mesh))
        seen += 1
        assert_close(seen.detach(), part_of(right.detach(), given, mesh), "output")
        for each in (seen, right):
            each.square().sum().backward()
        twin.check()

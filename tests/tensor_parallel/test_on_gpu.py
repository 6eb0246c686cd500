"""Tensor parallelism on a GPU: half precision, losses, norms, copies.

What is made for them lies on the device of their place: they would run on a CPU, too.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import weft
from tests.local.deaths import run_to_the_end
from tests.ranks import run_on
from tests.tensor_parallel.models import MLP, Language, gathering_plan, mlp_plan, sequence_plan
from tests.tensor_parallel.twins import (
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    device,
    filled,
    full_of,
    local_input,
    local_of,
    make_mesh,
    numbers,
    part_of,
    tokens,
)
from weft.tensor_parallel.loss import loss_parallel

pytest_plugins = ["tests.tensor_parallel.libraries"]
pytestmark = [
    run_on(gpu=(2, 4), nccl=1, timeout=90, collective_timeout=20),
    run_on(gpu_threads=2, timeout=60, collective_timeout=20),
    run_on(nccl=(2, 4)),
]

HALVES = {torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the largest gradient


# -- half precision ----------------------------------------------------------------------


def test_autocast(tp: Any) -> None:
    """Half precision inside, float32 parameters and gradients outside; norms compute in float32."""
    mesh = make_mesh()
    for dtype, tolerance in HALVES.items():
        for plan, given in ((mlp_plan(tp), Replicate()), (gathering_plan(tp), Shard(0))):
            models = [filled(MLP(), dtype=torch.float32) for _ in range(2)]
            tp.parallelize_module(models[0], mesh, plan)
            full = numbers(4, 8, dtype=torch.float32)
            inputs = [local_input(full, given, mesh), full.clone().requires_grad_()]
            with torch.autocast(device(), dtype):
                seen, right = models[0](inputs[0]), models[1](inputs[1])
            assert seen.dtype == right.dtype == dtype
            assert_close(seen.detach(), part_of(right.detach(), given, mesh), "output", tolerance)
            seen.float().square().sum().backward()
            right.float().square().sum().backward()
            assert_close(inputs[0].grad, part_of(inputs[1].grad, given, mesh), "input", tolerance)
            assert_same_gradients(*models, tolerance=tolerance)
        norms = [filled(nn.LayerNorm(8), dtype=torch.float32) for _ in range(2)]
        tp.parallelize_module(norms[0], mesh, tp.SequenceParallel(use_local_output=True))
        full = numbers(2, 4, 8, dtype=torch.float32)
        with torch.autocast(device(), dtype):
            seen, right = norms[0](part_of(full, Shard(1), mesh)), norms[1](full)
        assert seen.dtype == right.dtype
        assert_close(seen.detach(), part_of(right.detach(), Shard(1), mesh), "norm", 1e-5)


def test_autocast_of_float64(tp: Any) -> None:
    """Left as it is, as a single process leaves it."""
    model, single = filled(MLP()), filled(MLP())
    tp.parallelize_module(model, make_mesh(), mlp_plan(tp))
    rows = numbers(4, 8)
    with torch.autocast(device(), torch.bfloat16):
        seen, right = model(rows), single(rows)
    assert_close(seen.detach(), right.detach(), "output")


def test_scaled_losses(tp: Any) -> None:
    """An overflow on one rank is seen by all of them: no rank updates, and all scale less."""
    mesh = make_mesh()
    model = filled(MLP(), dtype=torch.float32)
    tp.parallelize_module(model, mesh, mlp_plan(tp))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device(), init_scale=4.0)
    rows = numbers(4, 8, dtype=torch.float32)
    for overflows in (False, True, False):
        before = [local_of(param).clone() for param in model.parameters()]
        with torch.autocast(device(), torch.float16):
            loss = model(rows).float().square().mean()
        scaler.scale(loss).backward()
        if overflows and dist.get_rank() == dist.get_world_size() - 1:
            local_of(model.net1.weight.grad).fill_(float("inf"))
        scaler.unscale_(optimizer)
        weft.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        pairs = zip(before, model.parameters(), strict=True)
        assert all(torch.equal(was, local_of(param)) for was, param in pairs) == overflows
    assert scaler.get_scale() == 2.0


# -- losses, norms, copies ---------------------------------------------------------------


def test_losses_by_class(tp: Any) -> None:
    """Cross-entropy of logits of which no rank has all classes, behind a head that makes them."""
    mesh = make_mesh()
    for num_classes in (16, 11, 3):
        for options in ({}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 1}):
            heads = [filled(nn.Linear(8, num_classes, bias=False)) for _ in range(2)]
            tp.parallelize_module(heads[0], mesh, tp.ColwiseParallel(use_local_output=False))
            hidden = [numbers(6, 8).requires_grad_() for _ in range(2)]
            target = tokens(6, vocabulary=num_classes)
            with loss_parallel():
                seen = F.cross_entropy(heads[0](hidden[0]), target, **options)
            right = F.cross_entropy(heads[1](hidden[1]), target, **options)
            assert_close(full_of(seen), right.detach(), "loss")
            seen.backward()
            right.backward()
            assert_close(hidden[0].grad, hidden[1].grad, "gradient of the hidden rows")
            assert_same_gradients(*heads)


def test_clipped(tp: Any) -> None:
    """Shards, copies, sums and plain gradients together: the norm and what is left are a single process's."""
    mesh = make_mesh()
    for norm_type in (2.0, 1.0, float("inf")):
        for foreach in (None, False):
            models = [Language(11) for _ in range(2)]
            plan = sequence_plan(tp)
            del plan["head"]
            plan["norm"] = tp.PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
            )
            tp.parallelize_module(models[0], mesh, plan)
            words = tokens(2, 8, vocabulary=11)
            for model in models:
                model(words).square().mean().backward()
            assert any(type(param) is not DTensor for param in models[0].parameters())
            norms = [
                clip(model.parameters(), 0.01, norm_type, foreach=foreach)
                for clip, model in zip(
                    (weft.clip_grad_norm_, torch.nn.utils.clip_grad_norm_), models, strict=True
                )
            ]
            assert norms[0].device.type == device()
            assert_close(norms[0], norms[1], "norm")
            assert_same_gradients(*models)


def test_copies(tp: Any) -> None:
    """A deep copy trains by itself, on the device."""
    models = [filled(MLP()) for _ in range(2)]
    tp.parallelize_module(models[0], make_mesh(), mlp_plan(tp))
    others = copy.deepcopy(models)
    for step in range(3):
        for other in others:
            other(numbers(4, 8, seed=step)).square().mean().backward()
            torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert_same_parameters(*others)
    assert_same_parameters(*models, tolerance=0.0)
    assert all(param.device.type == device() and param.grad is None for param in models[0].parameters())


def test_moved_afterwards(tp: Any) -> None:
    """Parallelized in the CPU's memory, on the device's mesh: values come to the device with the plan."""
    model, single = filled(MLP()).cpu(), filled(MLP())
    tp.parallelize_module(model, make_mesh(), mlp_plan(tp))
    rows = numbers(4, 8)
    assert_close(model(rows).detach(), single(rows).detach(), "output")


def test_moved_about(tp: Any) -> None:
    """Out of the device's memory and back: what was computed with before isn't computed with again."""
    model, single = filled(MLP()).cpu(), filled(MLP())
    tp.parallelize_module(model, make_mesh(), mlp_plan(tp))
    rows = numbers(4, 8)
    for each in (model, single):
        each(rows).square().sum().backward()
        each.cpu()
        assert all(local_of(param).is_cpu and local_of(param.grad).is_cpu for param in each.parameters())
        with torch.no_grad():
            for param in each.parameters():
                param.mul_(2.0)
        each.to(device())
        each(rows).square().sum().backward()
    assert_same_parameters(model, single, tolerance=0.0)
    assert_same_gradients(model, single)


def look_up_a_word_outside(tp: Any, style: str) -> None:
    """On a GPU the error comes late and ends the process's use of it: only for ranks that may die."""
    plans = {"row": tp.RowwiseParallel(input_layouts=Replicate()), "column": tp.ColwiseParallel()}
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = tp.parallelize_module(filled(nn.Embedding(16, 8)).cuda(), mesh, plans[style])
    model(torch.tensor([[0, 15]], device="cuda"))
    torch.cuda.synchronize()
    model(torch.tensor([[0, 16]], device="cuda"))
    torch.cuda.synchronize()


@run_on()
@pytest.mark.processes
@pytest.mark.gpu
@pytest.mark.parametrize("style", ["row", "column"])
def test_a_word_outside_of_the_vocabulary(tp: Any, style: str) -> None:
    """The device asserts; the ranks can't use the GPU any more, and are nobody else's."""
    error = run_to_the_end(
        look_up_a_word_outside, (tp, style), ranks=2, backend="weft", collective_timeout=20
    )
    assert "device-side assert" in str(error)

"""Tensor parallelism on a GPU: the bodies of the CPU's tests moved there, and what only a GPU has.

Bodies take the kind of device, so that all but those of streams run on a CPU too.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import weft
import weft.tensor_parallel as tp
from tests.tp_bodies import twins
from tests.tp_bodies.models import MLP, Language, gathering_plan, mlp_plan, sequence_plan
from tests.tp_bodies.twins import (
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    filled,
    full_of,
    local_input,
    local_of,
    numbers,
    part_of,
    tokens,
)
from weft.tensor_parallel.loss import loss_parallel

HALVES = {torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the largest gradient


# -- the bodies of the CPU's tests -------------------------------------------------------


@contextmanager
def moved(device: str) -> Generator[None]:
    """Let meshes, models and numbers of the bodies be a device's. For all of the process."""
    makers = {name: getattr(twins, name) for name in ("filled", "numbers", "tokens")}

    def on_device(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: make(*args, **kwargs).to(device)

    bodies = [module for name, module in sys.modules.items() if name.startswith("tests.tp_bodies.")]
    with ExitStack() as patches:
        for module in bodies:
            for name, make in makers.items():
                if getattr(module, name, None) is make and module.__name__ != __name__:
                    patches.enter_context(mock.patch.object(module, name, on_device(make)))
        mesh_of = twins.init_device_mesh
        there = mock.patch.object(
            twins, "init_device_mesh", lambda _, *args, **kw: mesh_of(device, *args, **kw)
        )
        patches.enter_context(there)
        yield


def run_there(device: str, body: Callable[..., None], args: tuple[Any, ...] = ()) -> None:
    """A body of the CPU's tests, on a rank that is a process."""
    with moved(device):
        body(tp, *args)


def mesh_on(device: str) -> DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size(),))


def parts_of_all(mine: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's, in the CPU's memory."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine.detach().cpu())
    return everyones


# -- half precision ----------------------------------------------------------------------


def autocast(device: str) -> None:
    """Half precision inside, float32 parameters and gradients outside; norms compute in float32."""
    mesh = mesh_on(device)
    for dtype, tolerance in HALVES.items():
        for plan, given in ((mlp_plan(tp), Replicate()), (gathering_plan(tp), Shard(0))):
            models = [filled(MLP(), dtype=torch.float32).to(device) for _ in range(2)]
            tp.parallelize_module(models[0], mesh, plan)
            full = numbers(4, 8, dtype=torch.float32).to(device)
            inputs = [local_input(full, given, mesh), full.clone().requires_grad_()]
            with torch.autocast(device, dtype):
                seen, right = models[0](inputs[0]), models[1](inputs[1])
            assert seen.dtype == right.dtype == dtype
            assert_close(seen.detach(), part_of(right.detach(), given, mesh), "output", tolerance)
            seen.float().square().sum().backward()
            right.float().square().sum().backward()
            assert_close(inputs[0].grad, part_of(inputs[1].grad, given, mesh), "input", tolerance)
            assert_same_gradients(*models, tolerance=tolerance)
        norms = [filled(nn.LayerNorm(8), dtype=torch.float32).to(device) for _ in range(2)]
        tp.parallelize_module(norms[0], mesh, tp.SequenceParallel(use_local_output=True))
        full = numbers(2, 4, 8, dtype=torch.float32).to(device)
        with torch.autocast(device, dtype):
            seen, right = norms[0](part_of(full, Shard(1), mesh)), norms[1](full)
        assert seen.dtype == right.dtype
        assert_close(seen.detach(), part_of(right.detach(), Shard(1), mesh), "norm", 1e-5)


def autocast_of_float64(device: str) -> None:
    """Left as it is, as a single process leaves it."""
    model, single = filled(MLP()).to(device), filled(MLP()).to(device)
    tp.parallelize_module(model, mesh_on(device), mlp_plan(tp))
    rows = numbers(4, 8).to(device)
    with torch.autocast(device, torch.bfloat16):
        seen, right = model(rows), single(rows)
    assert_close(seen.detach(), right.detach(), "output")


def scaled_losses(device: str) -> None:
    """An overflow on one rank is seen by all of them: no rank updates, and all scale less."""
    mesh = mesh_on(device)
    model = filled(MLP(), dtype=torch.float32).to(device)
    tp.parallelize_module(model, mesh, mlp_plan(tp))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    rows = numbers(4, 8, dtype=torch.float32).to(device)
    for overflows in (False, True, False):
        before = [local_of(param).clone() for param in model.parameters()]
        with torch.autocast(device, torch.float16):
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


def losses_by_class(device: str) -> None:
    """Cross-entropy of logits of which no rank has all classes, behind a head that makes them."""
    mesh = mesh_on(device)
    for num_classes in (16, 11, 3):
        for options in ({}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 1}):
            heads = [filled(nn.Linear(8, num_classes, bias=False)).to(device) for _ in range(2)]
            tp.parallelize_module(heads[0], mesh, tp.ColwiseParallel(use_local_output=False))
            hidden = [numbers(6, 8).to(device).requires_grad_() for _ in range(2)]
            target = tokens(6, vocabulary=num_classes).to(device)
            with loss_parallel():
                seen = F.cross_entropy(heads[0](hidden[0]), target, **options)
            right = F.cross_entropy(heads[1](hidden[1]), target, **options)
            assert_close(full_of(seen), right.detach(), "loss")
            seen.backward()
            right.backward()
            assert_close(hidden[0].grad, hidden[1].grad, "gradient of the hidden rows")
            assert_same_gradients(*heads)


def clipped(device: str) -> None:
    """Shards, copies, sums and plain gradients together: the norm and what is left are a single process's."""
    mesh = mesh_on(device)
    for norm_type in (2.0, 1.0, float("inf")):
        for foreach in (None, False):
            models = [Language(11).to(device) for _ in range(2)]
            plan = sequence_plan(tp)
            del plan["head"]
            plan["norm"] = tp.PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
            )
            tp.parallelize_module(models[0], mesh, plan)
            words = tokens(2, 8, vocabulary=11).to(device)
            for model in models:
                model(words).square().mean().backward()
            assert any(type(param) is not DTensor for param in models[0].parameters())
            norms = [
                clip(model.parameters(), 0.01, norm_type, foreach=foreach)
                for clip, model in zip(
                    (weft.clip_grad_norm_, torch.nn.utils.clip_grad_norm_), models, strict=True
                )
            ]
            assert norms[0].device.type == device
            assert_close(norms[0], norms[1], "norm")
            assert_same_gradients(*models)


def copies(device: str) -> None:
    """A deep copy trains by itself, on the device."""
    models = [filled(MLP()).to(device) for _ in range(2)]
    tp.parallelize_module(models[0], mesh_on(device), mlp_plan(tp))
    others = copy.deepcopy(models)
    for step in range(3):
        for other in others:
            other(numbers(4, 8, seed=step).to(device)).square().mean().backward()
            torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert_same_parameters(*others)
    assert_same_parameters(*models, tolerance=0.0)
    assert all(param.device.type == device and param.grad is None for param in models[0].parameters())


def moved_afterwards(device: str) -> None:
    """Parallelized in the CPU's memory, on the device's mesh: values come to the device with the plan."""
    model, single = filled(MLP()), filled(MLP()).to(device)
    tp.parallelize_module(model, mesh_on(device), mlp_plan(tp))
    rows = numbers(4, 8).to(device)
    assert_close(model(rows).detach(), single(rows).detach(), "output")


def moved_about(device: str) -> None:
    """Out of the device's memory and back: what was computed with before isn't computed with again."""
    model, single = filled(MLP()), filled(MLP()).to(device)
    tp.parallelize_module(model, mesh_on(device), mlp_plan(tp))
    rows = numbers(4, 8).to(device)
    for each in (model, single):
        each(rows).square().sum().backward()
        each.cpu()
        assert all(local_of(param).is_cpu and local_of(param.grad).is_cpu for param in each.parameters())
        with torch.no_grad():
            for param in each.parameters():
                param.mul_(2.0)
        each.to(device)
        each(rows).square().sum().backward()
    assert_same_parameters(model, single, tolerance=0.0)
    assert_same_gradients(model, single)


def a_word_outside(style: str) -> None:
    """On a GPU the error comes late and ends the process's use of it: only for ranks that may die."""
    device = "cuda"
    plans = {"row": tp.RowwiseParallel(input_layouts=Replicate()), "column": tp.ColwiseParallel()}
    model = tp.parallelize_module(filled(nn.Embedding(16, 8)).to(device), mesh_on(device), plans[style])
    model(torch.tensor([[0, 15]], device=device))
    torch.cuda.synchronize()
    model(torch.tensor([[0, 16]], device=device))
    torch.cuda.synchronize()


BODIES: list[Callable[[str], None]] = [
    autocast,
    autocast_of_float64,
    scaled_losses,
    losses_by_class,
    clipped,
    copies,
    moved_afterwards,
    moved_about,
]

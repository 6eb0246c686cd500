"""Scenarios of DistributedDataParallel's options: buckets, unused parameters, sparse tables, comm hooks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.data_parallel.models import Branches, Embedded, tokens_of
from tests.data_parallel.twins import WIDTH, filled, net
from tests.ddp_rpc_bodies.libraries import PowerSGDState, fp16_compress_hook, on_this_library, powerSGD_hook
from tests.ddp_rpc_bodies.modes import Mode, compare, rows_of
from tests.ddp_rpc_bodies.running import Body, Trainer
from tests.ddp_rpc_bodies.same_steps import loss_of
from tests.ddp_rpc_bodies.wraps import ddp, without_sync

SMALL_MB = 0.0001  # a bucket for each parameter


def make_steps(model: Any, t: Trainer, mode: Mode, num_steps: int = 3) -> list[Any]:
    seen: list[Any] = []
    for i in range(num_steps):
        with mode(model) as step:
            step.backward(loss_of(model, t, i))
            seen.append(step.gradients(model))
    return seen


def buckets(t: Trainer, mode: Mode) -> list[Any]:
    return [make_steps(ddp(t, net(), bucket_cap_mb=cap), t, mode) for cap in (SMALL_MB, 25)]


def views(t: Trainer, mode: Mode) -> list[Any]:
    return [
        make_steps(ddp(t, net(), bucket_cap_mb=cap, gradient_as_bucket_view=True), t, mode)
        for cap in (SMALL_MB, 25)
    ]


def accumulated_in_views(t: Trainer, mode: Mode) -> list[Any]:
    model = ddp(t, net(), gradient_as_bucket_view=True)
    seen: list[Any] = []
    for i in range(2):
        with mode(model) as step:
            with without_sync(model):
                step.backward(loss_of(model, t, 10 * i))
            seen.append(step.gradients(model))
            for j in (1, 2):
                step.backward(loss_of(model, t, 10 * i + j))
                seen.append(step.gradients(model))
    return seen


def static_graph(t: Trainer, mode: Mode) -> list[Any]:
    return make_steps(ddp(t, net(), static_graph=True, bucket_cap_mb=SMALL_MB), t, mode)


def large_buckets(t: Trainer, mode: Mode) -> list[Any]:
    """Past what backends treat as small."""
    model = nn.Sequential(nn.Linear(WIDTH, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 2))
    return make_steps(ddp(t, filled(model), bucket_cap_mb=0.3), t, mode, num_steps=2)


def buffers(t: Trainer, mode: Mode) -> list[Any]:
    """The first trainer's statistics are everybody's in the next forward."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)]
    model = ddp(t, filled(nn.Sequential(*layers)))
    seen = make_steps(model, t, mode)
    return [*seen, {name: buffer.clone() for name, buffer in model.module.named_buffers()}]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
        self.params = nn.ParameterList(nn.Parameter(torch.ones(5, dtype=dtype)) for dtype in dtypes)

    def forward(self, rows: Tensor) -> Tensor:
        return sum(param.real.double().sum() for param in self.params) * rows.round()


def mixed_dtypes(t: Trainer, mode: Mode) -> list[Any]:
    return make_steps(ddp(t, Mixed()), t, mode, num_steps=2)


def unused_by_rank_and_step(t: Trainer, mode: Mode) -> list[Any]:
    """Branches that a trainer leaves out, that another leaves out, that all do."""
    seen: list[Any] = []
    for view in (False, True):
        options: dict[str, Any] = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
        model = ddp(t, Branches("abc"), bucket_cap_mb=SMALL_MB, **options)
        for i, names in enumerate([("ab", "c"), ("a", "a"), ("c", "b"), ("abc", "abc")]):
            with mode(model) as step:
                step.backward(model(rows_of(t.rank, i), names[t.rank % 2]).square().mean())
                seen.append(step.gradients(model))
    return seen


def unused_in_one_of_two_backwards(t: Trainer, mode: Mode) -> list[Any]:
    """What a branch got in the first backward stays when the second doesn't reach it."""
    model = ddp(t, Branches("ab"), find_unused_parameters=True)
    seen: list[Any] = []
    with mode(model) as step:
        for i, names in enumerate(["a", "b"]):
            step.backward(model(rows_of(t.rank, i), names).square().mean())
            seen.append(step.gradients(model))
    return seen


def sparse_and_dense(t: Trainer, mode: Mode, **options: Any) -> list[Any]:
    seen: list[Any] = []
    model = ddp(t, Embedded(), bucket_cap_mb=SMALL_MB, **options)
    for i in range(2):
        with mode(model) as step:
            step.backward(model(tokens_of(t.rank, i), "ab").square().mean())
            gradients = step.gradients(model)
            layouts = {name: str(grad.layout) for name, grad in gradients.items()}
            seen += [gradients, layouts]
    assert set(seen[-1].values()) == {"torch.sparse_coo", "torch.strided"}
    return seen


def sparse_beside_views(t: Trainer, mode: Mode) -> list[Any]:
    return sparse_and_dense(t, mode, gradient_as_bucket_view=True)


def sparse_accumulated(t: Trainer, mode: Mode) -> list[Any]:
    model = ddp(t, Embedded())
    with mode(model) as step:
        with without_sync(model):
            step.backward(model(tokens_of(t.rank, 0), "ab").square().mean())
        for i in (1, 2):
            step.backward(model(tokens_of(t.rank, i), "ab").square().mean())
        return [step.gradients(model)]


def fp16_hook(t: Trainer, mode: Mode) -> list[Any]:
    model = ddp(t, net(), bucket_cap_mb=SMALL_MB)
    model.register_comm_hook(t.group, fp16_compress_hook)
    return make_steps(model, t, mode)


def power_sgd_hook(t: Trainer, mode: Mode) -> list[Any]:
    """It remembers from step to step what it left out."""
    model = ddp(
        t, filled(nn.Sequential(nn.Linear(WIDTH, 20), nn.Tanh(), nn.Linear(20, 20)), dtype=torch.float32)
    )
    state = PowerSGDState(t.group, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook)
    seen: list[Any] = []
    for i in range(5):
        with mode(model) as step:
            step.backward(model(rows_of(t.rank, i).float()).square().mean())
            # In float32, and through a projection: the rest is compared below.
            seen.append({name: grad.double() for name, grad in step.gradients(model).items()})
    return seen


def noting_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations
    """Twice the mean, and a note of what the bucket said of itself."""
    notes, group = state
    notes.append((bucket.index(), bucket.is_last(), len(bucket.parameters()), bucket.buffer().clone()))
    flat = bucket.buffer().mul_(2).div_(dist.get_world_size(group))
    work: Any = dist.all_reduce(flat, group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def users_hook(t: Trainer, mode: Mode) -> list[Any]:
    model = ddp(t, net(), bucket_cap_mb=SMALL_MB)
    notes: list[Any] = []
    model.register_comm_hook((notes, t.group), noting_hook)
    seen = make_steps(model, t, mode)
    return [*seen, notes]


def users_hook_after_no_sync(t: Trainer, mode: Mode) -> list[Any]:
    """The bucket holds what the step has added up."""
    model = ddp(t, net())
    notes: list[Any] = []
    model.register_comm_hook((notes, t.group), noting_hook)
    with mode(model) as step:
        with without_sync(model):
            step.backward(loss_of(model, t, 0))
        step.backward(loss_of(model, t, 1))
        return [step.gradients(model), notes]


class Outputs(nn.Module):
    """Gives a structure, of which a loss may use a part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (filled(nn.Linear(WIDTH, WIDTH), seed) for seed in range(2))

    def forward(self, rows: Tensor) -> dict[str, Any]:
        return {"a": self.a(rows), "rest": (self.b(rows), None)}


def a_part_of_the_output(t: Trainer, mode: Mode) -> list[Any]:
    model = ddp(t, Outputs(), find_unused_parameters=True)
    with mode(model) as step:
        output = model(rows_of(t.rank))
        step.backward((output["a"] * output["rest"][0]).mean())
        return [step.gradients(model)]


SCENARIOS = [
    buckets,
    static_graph,
    large_buckets,
    buffers,
    mixed_dtypes,
    sparse_and_dense,
    sparse_accumulated,
    fp16_hook,
    power_sgd_hook,
    users_hook,
    users_hook_after_no_sync,
    a_part_of_the_output,
]
# torch's DDP turns `.grad` into views here too, and raises where a parameter has no gradient.
WEFT_SCENARIOS = [
    views,
    accumulated_in_views,
    sparse_beside_views,
    unused_by_rank_and_step,
    unused_in_one_of_two_backwards,
]


def in_both_modes(scenario: Any) -> Body:
    body = partial(compare, scenario)
    body.__name__ = scenario.__name__  # type: ignore[attr-defined]
    return body


BODIES = [in_both_modes(scenario) for scenario in on_this_library(SCENARIOS, WEFT_SCENARIOS)]

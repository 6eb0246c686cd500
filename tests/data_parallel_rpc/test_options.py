"""DistributedDataParallel's options: buckets, unused parameters, sparse tables, comm hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.data_parallel.models import Branches, Embedded, tokens_of
from tests.data_parallel.twins import WIDTH, filled, net
from tests.data_parallel_rpc.libraries import PowerSGDState, fp16_compress_hook, powerSGD_hook, weft_only
from tests.data_parallel_rpc.modes import (
    SMALL_MB,
    Mode,
    in_both_modes,
    loss_of,
    make_steps,
    noting_hook,
    rows_of,
)
from tests.data_parallel_rpc.trainers import LIMITS, Trainer, ddp, without_sync
from tests.ranks import run_on

pytestmark = [
    run_on(threads=3, gloo_threads=3, **LIMITS),
    run_on(weft=3, gloo=3, full=True, **LIMITS),
]


@in_both_modes
def test_buckets(trainer: Trainer, mode: Mode) -> list[Any]:
    return [make_steps(ddp(trainer, net(), bucket_cap_mb=cap), trainer, mode) for cap in (SMALL_MB, 25)]


@weft_only("turns `.grad` into views here too")
@in_both_modes
def test_views_of_buckets(trainer: Trainer, mode: Mode) -> list[Any]:
    return [
        make_steps(ddp(trainer, net(), bucket_cap_mb=cap, gradient_as_bucket_view=True), trainer, mode)
        for cap in (SMALL_MB, 25)
    ]


@weft_only("turns `.grad` into views here too")
@in_both_modes
def test_accumulation_in_views(trainer: Trainer, mode: Mode) -> list[Any]:
    model = ddp(trainer, net(), gradient_as_bucket_view=True)
    seen: list[Any] = []
    for i in range(2):
        with mode(model) as step:
            with without_sync(model):
                step.backward(loss_of(model, trainer, 10 * i))
            seen.append(step.gradients(model))
            for j in (1, 2):
                step.backward(loss_of(model, trainer, 10 * i + j))
                seen.append(step.gradients(model))
    return seen


@in_both_modes
def test_static_graph(trainer: Trainer, mode: Mode) -> list[Any]:
    return make_steps(ddp(trainer, net(), static_graph=True, bucket_cap_mb=SMALL_MB), trainer, mode)


@in_both_modes
def test_large_buckets(trainer: Trainer, mode: Mode) -> list[Any]:
    """Past what backends treat as small."""
    model = nn.Sequential(nn.Linear(WIDTH, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 2))
    return make_steps(ddp(trainer, filled(model), bucket_cap_mb=0.3), trainer, mode, num_steps=2)


@in_both_modes
def test_buffers(trainer: Trainer, mode: Mode) -> list[Any]:
    """The first trainer's statistics are everybody's in the next forward."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2)]
    model = ddp(trainer, filled(nn.Sequential(*layers)))
    seen = make_steps(model, trainer, mode)
    return [*seen, {name: buffer.clone() for name, buffer in model.module.named_buffers()}]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
        self.params = nn.ParameterList(nn.Parameter(torch.ones(5, dtype=dtype)) for dtype in dtypes)

    def forward(self, rows: Tensor) -> Tensor:
        return sum(param.real.double().sum() for param in self.params) * rows.round()


@in_both_modes
def test_mixed_dtypes(trainer: Trainer, mode: Mode) -> list[Any]:
    return make_steps(ddp(trainer, Mixed()), trainer, mode, num_steps=2)


@weft_only("raises where a parameter has no gradient")
@in_both_modes
def test_unused_by_rank_and_step(trainer: Trainer, mode: Mode) -> list[Any]:
    """Branches that a trainer leaves out, that another leaves out, that all do."""
    seen: list[Any] = []
    for view in (False, True):
        options: dict[str, Any] = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
        model = ddp(trainer, Branches("abc"), bucket_cap_mb=SMALL_MB, **options)
        for i, names in enumerate([("ab", "c"), ("a", "a"), ("c", "b"), ("abc", "abc")]):
            with mode(model) as step:
                step.backward(model(rows_of(trainer.rank, i), names[trainer.rank % 2]).square().mean())
                seen.append(step.gradients(model))
    return seen


@weft_only("raises where a parameter has no gradient")
@in_both_modes
def test_unused_in_one_of_two_backwards(trainer: Trainer, mode: Mode) -> list[Any]:
    """What a branch got in the first backward stays when the second doesn't reach it."""
    model = ddp(trainer, Branches("ab"), find_unused_parameters=True)
    seen: list[Any] = []
    with mode(model) as step:
        for i, names in enumerate(["a", "b"]):
            step.backward(model(rows_of(trainer.rank, i), names).square().mean())
            seen.append(step.gradients(model))
    return seen


def sparse_and_dense(trainer: Trainer, mode: Mode, **options: Any) -> list[Any]:
    seen: list[Any] = []
    model = ddp(trainer, Embedded(), bucket_cap_mb=SMALL_MB, **options)
    for i in range(2):
        with mode(model) as step:
            step.backward(model(tokens_of(trainer.rank, i), "ab").square().mean())
            gradients = step.gradients(model)
            layouts = {name: str(grad.layout) for name, grad in gradients.items()}
            seen += [gradients, layouts]
    assert set(seen[-1].values()) == {"torch.sparse_coo", "torch.strided"}
    return seen


@in_both_modes
def test_sparse_and_dense(trainer: Trainer, mode: Mode) -> list[Any]:
    return sparse_and_dense(trainer, mode)


@weft_only("turns `.grad` into views here too")
@in_both_modes
def test_sparse_beside_views(trainer: Trainer, mode: Mode) -> list[Any]:
    return sparse_and_dense(trainer, mode, gradient_as_bucket_view=True)


@in_both_modes
def test_sparse_accumulation(trainer: Trainer, mode: Mode) -> list[Any]:
    model = ddp(trainer, Embedded())
    with mode(model) as step:
        with without_sync(model):
            step.backward(model(tokens_of(trainer.rank, 0), "ab").square().mean())
        for i in (1, 2):
            step.backward(model(tokens_of(trainer.rank, i), "ab").square().mean())
        return [step.gradients(model)]


@in_both_modes
def test_fp16_hook(trainer: Trainer, mode: Mode) -> list[Any]:
    model = ddp(trainer, net(), bucket_cap_mb=SMALL_MB)
    model.register_comm_hook(trainer.group, fp16_compress_hook)
    return make_steps(model, trainer, mode)


@in_both_modes
def test_power_sgd_hook(trainer: Trainer, mode: Mode) -> list[Any]:
    """It remembers from step to step what it left out."""
    model = ddp(
        trainer,
        filled(nn.Sequential(nn.Linear(WIDTH, 20), nn.Tanh(), nn.Linear(20, 20)), dtype=torch.float32),
    )
    state = PowerSGDState(trainer.group, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook)
    seen: list[Any] = []
    for i in range(5):
        with mode(model) as step:
            step.backward(model(rows_of(trainer.rank, i).float()).square().mean())
            # In float32, and through a projection: the rest is compared below.
            seen.append({name: grad.double() for name, grad in step.gradients(model).items()})
    return seen


@in_both_modes
def test_a_users_hook(trainer: Trainer, mode: Mode) -> list[Any]:
    model = ddp(trainer, net(), bucket_cap_mb=SMALL_MB)
    notes: list[Any] = []
    model.register_comm_hook((notes, trainer.group), noting_hook)
    seen = make_steps(model, trainer, mode)
    return [*seen, notes]


@in_both_modes
def test_a_users_hook_after_no_sync(trainer: Trainer, mode: Mode) -> list[Any]:
    """The bucket holds what the step has added up."""
    model = ddp(trainer, net())
    notes: list[Any] = []
    model.register_comm_hook((notes, trainer.group), noting_hook)
    with mode(model) as step:
        with without_sync(model):
            step.backward(loss_of(model, trainer, 0))
        step.backward(loss_of(model, trainer, 1))
        return [step.gradients(model), notes]


class Outputs(nn.Module):
    """Gives a structure, of which a loss may use a part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (filled(nn.Linear(WIDTH, WIDTH), seed) for seed in range(2))

    def forward(self, rows: Tensor) -> dict[str, Any]:
        return {"a": self.a(rows), "rest": (self.b(rows), None)}


@in_both_modes
def test_a_part_of_the_output(trainer: Trainer, mode: Mode) -> list[Any]:
    model = ddp(trainer, Outputs(), find_unused_parameters=True)
    with mode(model) as step:
        output = model(rows_of(trainer.rank))
        step.backward((output["a"] * output["rest"][0]).mean())
        return [step.gradients(model)]

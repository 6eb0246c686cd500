"""What torch does not have, or not under distributed autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import weft
from tests.data_parallel.models import Branches
from tests.data_parallel.twins import WIDTH, filled, net
from tests.data_parallel_rpc.libraries import weft_only
from tests.data_parallel_rpc.modes import (
    SMALL_MB,
    Mode,
    copied,
    in_both_modes,
    loss_of,
    make_steps,
    named_parameters,
    rows_of,
)
from tests.data_parallel_rpc.trainers import (
    LIMITS,
    Trainer,
    Wrap,
    ddp,
    each_wrap,
    replicated,
    sharded,
    without_server,
)
from tests.ranks import run_on
from weft.comm_hooks.debugging_hooks import noop_hook
from weft.comm_hooks.default_hooks import bf16_compress_hook
from weft.comm_hooks.quantization_hooks import quantization_pertensor_hook
from weft.data_parallel import MixedPrecision
from weft.optimizers import apply_optimizer_in_backward

pytestmark = [
    weft_only("has none of it, or not under distributed autograd"),
    run_on(threads=3, gloo_threads=3, **LIMITS),
    run_on(weft=3, gloo=3, full=True, **LIMITS),
]


@each_wrap
@in_both_modes
def test_traffic(trainer: Trainer, mode: Mode, wrap: Wrap) -> list[Any]:
    """What is sent, and in which order it ended, is the same."""
    options: dict[str, Any] = {} if wrap is sharded else {"bucket_cap_mb": SMALL_MB}
    model = wrap(trainer, net(), **options)
    with weft.record() as events:
        for i in range(2):
            with mode(model) as step:
                step.backward(loss_of(model, trainer, i))
    assert len(events) > 2
    return [(event.op, event.feature, event.bytes_in) for event in events]


@each_wrap
@in_both_modes
def test_an_optimizer_in_backward(trainer: Trainer, mode: Mode, wrap: Wrap) -> list[Any]:
    """It steps when a parameter has its gradient, and leaves none behind."""
    seen: list[Any] = []
    model = wrap(trainer, net())
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1, "momentum": 0.5})
    for i in range(3):
        with mode(model) as step:
            step.backward(loss_of(model, trainer, i))
            left = step.gradients(model)
            assert set(left.values()) == {None}
        seen.append({name: copied(param) for name, param in named_parameters(model)})
    return seen


@pytest.mark.parametrize("wrap", [ddp, replicated])
@in_both_modes
def test_unused_without_being_told(trainer: Trainer, mode: Mode, wrap: Wrap) -> list[Any]:
    seen: list[Any] = []
    model = wrap(trainer, Branches("abc"), bucket_cap_mb=SMALL_MB)
    for i, names in enumerate([("ab", "c"), ("a", "a"), ("", "b")]):
        with mode(model) as step:
            step.backward(model(rows_of(trainer.rank, i), names[trainer.rank % 2]).square().mean())
            seen.append(step.gradients(model))
    return seen


@pytest.mark.parametrize("wrap", [ddp, replicated])
@pytest.mark.parametrize("view", [False, True])
@in_both_modes
def test_nothing_used_here(trainer: Trainer, mode: Mode, wrap: Wrap, view: bool) -> list[Any]:
    """A trainer whose backward comes to no parameter has the others' gradients all the same."""
    seen: list[Any] = []
    model = wrap(trainer, Experts(), gradient_as_bucket_view=view)
    for i, names in enumerate([("", "ab"), ("a", ""), ("", "")]):
        with mode(model) as step:
            rows = rows_of(trainer.rank, i).requires_grad_()
            step.backward(model(rows, names[trainer.rank % 2]).square().mean())
            seen.append(step.gradients(model))
    return seen


@in_both_modes
def test_low_precision(trainer: Trainer, mode: Mode) -> list[Any]:
    """Forward, backward and reductions in 16 bits; the gradients are in 32."""
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = ddp(trainer, net().float(), mixed_precision=low)
    seen: list[Any] = []
    for i in range(3):
        with mode(model) as step:
            step.backward(model(rows_of(trainer.rank, i).float()).float().square().mean())
            seen.append(step.gradients(model))
    return seen


@in_both_modes
def test_comm_hooks(trainer: Trainer, mode: Mode) -> list[Any]:
    seen: list[Any] = []
    for hook in (bf16_compress_hook, quantization_pertensor_hook, noop_hook):
        model = ddp(trainer, net().float(), bucket_cap_mb=SMALL_MB)
        model.register_comm_hook(trainer.group, hook)
        for i in range(2):
            with mode(model) as step:
                step.backward(model(rows_of(trainer.rank, i).float()).square().mean())
                seen.append(step.gradients(model))
    return seen


@in_both_modes
def test_sharded_each_way(trainer: Trainer, mode: Mode) -> list[Any]:
    bf16 = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    makes: list[Callable[[], Any]] = [
        lambda: sharded(trainer, net(), reshard_after_forward=False),
        lambda: sharded(trainer, net(), by_child=False),
        lambda: weft.fully_shard(net(), mesh=trainer.mesh, shard_placement_fn=last_dim),
        lambda: sharded(trainer, net().float(), mp_policy=bf16),
        lambda: sharded(trainer, net(), offload_policy=weft.CPUOffloadPolicy(pin_memory=False)),
        lambda: weft.replicate_with_fsdp(net(), mesh=trainer.mesh),
    ]
    seen: list[Any] = []
    for make in makes:
        model = make()
        dtype = next(model.parameters()).dtype
        for i in range(2):
            with mode(model) as step:
                step.backward(model(rows_of(trainer.rank, i).to(dtype)).square().mean())
                seen.append(step.gradients(model))
    return seen


def last_dim(param: Tensor) -> Any:
    return Shard(param.dim() - 1)


@run_on(threads=4, gloo_threads=4, **LIMITS)
@without_server
@in_both_modes
def test_sharded_and_copied(trainer: Trainer, mode: Mode) -> list[Any]:
    """A mesh of two axes, over four trainers."""
    mesh = DeviceMesh("cpu", torch.arange(trainer.size).view(2, -1), mesh_dim_names=("copies", "shards"))
    model: Any = weft.fully_shard(net(), mesh=mesh)
    seen: list[Any] = []
    for i in range(2):
        with mode(model) as step:
            for j, is_synced in enumerate((False, True)):
                model.set_requires_all_reduce(is_synced)
                step.backward(loss_of(model, trainer, 10 * i + j))
            seen.append(step.gradients(model))
    return seen


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (filled(nn.Linear(WIDTH, WIDTH), seed) for seed in range(2))

    def forward(self, rows: Tensor, names: str) -> Tensor:
        for name in names:
            rows = torch.tanh(self.get_submodule(name)(rows))
        return rows


@in_both_modes
def test_sharded_experts(trainer: Trainer, mode: Mode) -> list[Any]:
    """Ranks that use different groups of parameters, or nobody one."""
    model = sharded(trainer, Experts())
    seen: list[Any] = []
    for i, names in enumerate([("ab", "b"), ("a", "a"), ("b", "ab")]):
        with mode(model) as step:
            step.backward(model(rows_of(trainer.rank, i), names[trainer.rank % 2]).square().mean())
            seen.append(step.gradients(model))
    return seen


@in_both_modes
def test_ignored_parameters(trainer: Trainer, mode: Mode) -> list[Any]:
    """Those stay this trainer's own."""
    bare = net()
    weft.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(bare, ["0.weight"])
    return make_steps(ddp(trainer, bare), trainer, mode)

"""Scenarios of what torch does not have, or not under distributed autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import weft
from tests.data_parallel.models import Branches
from tests.data_parallel.twins import WIDTH, filled, net
from tests.ddp_rpc_bodies.modes import Mode, copied, named_parameters, rows_of
from tests.ddp_rpc_bodies.running import Trainer
from tests.ddp_rpc_bodies.same_options import SMALL_MB, in_both_modes, make_steps
from tests.ddp_rpc_bodies.same_steps import loss_of
from tests.ddp_rpc_bodies.wraps import WRAPS, ddp, replicated, sharded
from weft.comm_hooks.debugging_hooks import noop_hook
from weft.comm_hooks.default_hooks import bf16_compress_hook
from weft.comm_hooks.quantization_hooks import quantization_pertensor_hook
from weft.data_parallel import MixedPrecision
from weft.optimizers import apply_optimizer_in_backward


def traffic(t: Trainer, mode: Mode) -> list[Any]:
    """What is sent, and in which order it ended, is the same."""
    seen: list[Any] = []
    for wrap in WRAPS:
        options: dict[str, Any] = {} if wrap is sharded else {"bucket_cap_mb": SMALL_MB}
        model = wrap(t, net(), **options)
        with weft.record() as events:
            for i in range(2):
                with mode(model) as step:
                    step.backward(loss_of(model, t, i))
        seen.append([(event.op, event.feature, event.bytes_in) for event in events])
    assert all(len(calls) > 2 for calls in seen)
    return seen


def an_optimizer_in_backward(t: Trainer, mode: Mode) -> list[Any]:
    """It steps when a parameter has its gradient, and leaves none behind."""
    seen: list[Any] = []
    for wrap in WRAPS:
        model = wrap(t, net())
        apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1, "momentum": 0.5})
        for i in range(3):
            with mode(model) as step:
                step.backward(loss_of(model, t, i))
                left = step.gradients(model)
                assert set(left.values()) == {None}
            seen.append({name: copied(param) for name, param in named_parameters(model)})
    return seen


def unused_without_being_told(t: Trainer, mode: Mode) -> list[Any]:
    seen: list[Any] = []
    for wrap in (ddp, replicated):
        model = wrap(t, Branches("abc"), bucket_cap_mb=SMALL_MB)
        for i, names in enumerate([("ab", "c"), ("a", "a"), ("", "b")]):
            with mode(model) as step:
                step.backward(model(rows_of(t.rank, i), names[t.rank % 2]).square().mean())
                seen.append(step.gradients(model))
    return seen


def nothing_used_here(t: Trainer, mode: Mode) -> list[Any]:
    """A trainer whose backward comes to no parameter has the others' gradients all the same."""
    seen: list[Any] = []
    for wrap in (ddp, replicated):
        for view in (False, True):
            model = wrap(t, Experts(), gradient_as_bucket_view=view)
            for i, names in enumerate([("", "ab"), ("a", ""), ("", "")]):
                with mode(model) as step:
                    rows = rows_of(t.rank, i).requires_grad_()
                    step.backward(model(rows, names[t.rank % 2]).square().mean())
                    seen.append(step.gradients(model))
    return seen


def low_precision(t: Trainer, mode: Mode) -> list[Any]:
    """Forward, backward and reductions in 16 bits; the gradients are in 32."""
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = ddp(t, net().float(), mixed_precision=low)
    seen: list[Any] = []
    for i in range(3):
        with mode(model) as step:
            step.backward(model(rows_of(t.rank, i).float()).float().square().mean())
            seen.append(step.gradients(model))
    return seen


def hooks(t: Trainer, mode: Mode) -> list[Any]:
    seen: list[Any] = []
    for hook in (bf16_compress_hook, quantization_pertensor_hook, noop_hook):
        model = ddp(t, net().float(), bucket_cap_mb=SMALL_MB)
        model.register_comm_hook(t.group, hook)
        for i in range(2):
            with mode(model) as step:
                step.backward(model(rows_of(t.rank, i).float()).square().mean())
                seen.append(step.gradients(model))
    return seen


def sharded_each_way(t: Trainer, mode: Mode) -> list[Any]:
    bf16 = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    makes: list[Callable[[], Any]] = [
        lambda: sharded(t, net(), reshard_after_forward=False),
        lambda: sharded(t, net(), by_child=False),
        lambda: weft.fully_shard(net(), mesh=t.mesh, shard_placement_fn=last_dim),
        lambda: sharded(t, net().float(), mp_policy=bf16),
        lambda: sharded(t, net(), offload_policy=weft.CPUOffloadPolicy(pin_memory=False)),
        lambda: weft.replicate_with_fsdp(net(), mesh=t.mesh),
    ]
    seen: list[Any] = []
    for make in makes:
        model = make()
        dtype = next(model.parameters()).dtype
        for i in range(2):
            with mode(model) as step:
                step.backward(model(rows_of(t.rank, i).to(dtype)).square().mean())
                seen.append(step.gradients(model))
    return seen


def last_dim(param: Tensor) -> Any:
    return Shard(param.dim() - 1)


def sharded_and_copied(t: Trainer, mode: Mode) -> list[Any]:
    """A mesh of two axes, over four trainers."""
    mesh = DeviceMesh("cpu", torch.arange(t.size).view(2, -1), mesh_dim_names=("copies", "shards"))
    model: Any = weft.fully_shard(net(), mesh=mesh)
    seen: list[Any] = []
    for i in range(2):
        with mode(model) as step:
            for j, is_synced in enumerate((False, True)):
                model.set_requires_all_reduce(is_synced)
                step.backward(loss_of(model, t, 10 * i + j))
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


def sharded_experts(t: Trainer, mode: Mode) -> list[Any]:
    """Ranks that use different groups of parameters, or nobody one."""
    model = sharded(t, Experts())
    seen: list[Any] = []
    for i, names in enumerate([("ab", "b"), ("a", "a"), ("b", "ab")]):
        with mode(model) as step:
            step.backward(model(rows_of(t.rank, i), names[t.rank % 2]).square().mean())
            seen.append(step.gradients(model))
    return seen


def ignored_parameters(t: Trainer, mode: Mode) -> list[Any]:
    """Those stay this trainer's own."""
    bare = net()
    weft.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(bare, ["0.weight"])
    return make_steps(ddp(t, bare), t, mode)


BODIES = [
    in_both_modes(scenario)
    for scenario in [
        traffic,
        an_optimizer_in_backward,
        unused_without_being_told,
        nothing_used_here,
        low_precision,
        hooks,
        sharded_each_way,
        sharded_experts,
        ignored_parameters,
    ]
]
BODIES_OF_FOUR = [in_both_modes(sharded_and_copied)]

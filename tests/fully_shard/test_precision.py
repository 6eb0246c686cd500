"""Mixed precision, parameters of several dtypes in one group, frozen parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.fully_shard.models import WIDTH, as_whole, by_layer, filled, net
from tests.fully_shard.twins import Twin, assert_is_shard, make_rows, mean_square, rows_of
from tests.ranks import run_on
from weft import MixedPrecisionPolicy, fully_shard

pytestmark = run_on(threads=(2, 4))

BF16 = torch.bfloat16


def mean_of_ranks(model: nn.Module, dtype: torch.dtype, seeds: Sequence[int]) -> list[torch.Tensor]:
    """Each gradient as `dtype` computes it on each rank, summed over seeds and averaged in float32."""
    totals = [torch.zeros_like(param) for param in model.parameters()]
    for seed in seeds:
        for rank in range(dist.get_world_size()):
            narrow = copy.deepcopy(model).to(dtype)
            rows = rows_of(make_rows(seed), rank).to(dtype)
            mean_square(narrow, rows, rank).backward()
            for total, param in zip(totals, narrow.parameters(), strict=True):
                total += param.grad.to(total.dtype)
    return [total / dist.get_world_size() for total in totals]


def backward(model: nn.Module, seed: int) -> torch.Tensor:
    rank = dist.get_rank()
    loss = mean_square(model, rows_of(make_rows(seed), rank).float(), rank)
    loss.backward()
    return loss


def assert_gradients(model: nn.Module, right: list[torch.Tensor], tolerance: float) -> None:
    for (name, param), wanted in zip(model.named_parameters(), right, strict=True):
        assert param.grad is not None, name
        assert_is_shard(param.grad, wanted, name, tolerance)


def rounding() -> float:
    """Two terms have one order only, and dividing by two or four is exact; four terms may be rounded."""
    return 0.0 if dist.get_world_size() <= 2 else 1e-6


def test_compute_narrow_reduce_wide() -> None:
    model = net().float()
    right = mean_of_ranks(model, BF16, [1])
    by_layer(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    loss = backward(model, 1)
    assert loss.dtype == BF16
    assert all(param.dtype == torch.float32 for param in model.parameters())
    assert_gradients(model, right, rounding())


def test_compute_and_reduce_narrow() -> None:
    """Without a reduce_dtype gradients travel as they were computed: each sum is rounded to bfloat16."""
    model = net().float()
    right = mean_of_ranks(model, BF16, [1])
    by_layer(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    backward(model, 1)
    assert_gradients(model, right, 2.0**-7)
    for param in model.parameters():
        local = param.grad.to_local()
        assert torch.equal(local, local.to(BF16).float())


def test_reduce_narrow() -> None:
    """Only the reduction: gradients are computed in float32 and travel in bfloat16."""
    model = net().float()
    right = mean_of_ranks(model, torch.float32, [1])
    by_layer(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16))
    loss = backward(model, 1)
    assert loss.dtype == torch.float32
    assert_gradients(model, right, 2.0**-7)
    assert any(
        (p.grad.to_local() != p.grad.to_local().to(BF16).float()).sum() == 0 for p in model.parameters()
    )


def test_accumulate_wide() -> None:
    """Gradients that wait for a sync are added up in reduce_dtype."""
    model = net().float()
    right = mean_of_ranks(model, BF16, [1, 2, 3])
    by_layer(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32))
    model.set_requires_gradient_sync(False)
    backward(model, 1)
    backward(model, 2)
    model.set_requires_gradient_sync(True)
    backward(model, 3)
    assert_gradients(model, right, 1e-6)


class Noting(nn.Module):
    """Notes the dtypes that come in, and gives back what went in times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, rows: torch.Tensor, *, more: dict[str, Any]) -> dict[str, torch.Tensor]:
        self.seen = {"rows": rows.dtype, "float": more["float"][0].dtype, "int": more["int"].dtype}
        self.seen["weight"] = self.weight.dtype
        return {"out": rows * self.weight, "int": more["int"]}


def note(policy: MixedPrecisionPolicy) -> tuple[dict[str, torch.dtype], dict[str, torch.Tensor]]:
    module = Noting()
    fully_shard(module, mp_policy=policy)
    more = {"float": [torch.ones(2, dtype=torch.float64)], "int": torch.ones(2, dtype=torch.int64)}
    out = module(torch.ones(2, WIDTH), more=more)
    return module.seen, out


def test_inputs_and_outputs_are_cast() -> None:
    f32, f64, i64 = torch.float32, torch.float64, torch.int64
    seen, out = note(MixedPrecisionPolicy(param_dtype=BF16))
    assert seen == {"rows": BF16, "float": BF16, "int": i64, "weight": BF16}
    assert out["out"].dtype == BF16
    seen, out = note(MixedPrecisionPolicy(param_dtype=BF16, output_dtype=f64))
    assert (out["out"].dtype, out["int"].dtype) == (f64, i64)
    seen, out = note(MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False))
    assert seen == {"rows": f32, "float": f64, "int": i64, "weight": BF16}
    assert out["out"].dtype == f32
    seen, out = note(MixedPrecisionPolicy(output_dtype=BF16))
    assert seen == {"rows": f32, "float": f64, "int": i64, "weight": f32}
    assert out["out"].dtype == BF16
    seen, out = note(MixedPrecisionPolicy())
    assert seen["rows"] == out["out"].dtype == f32


def test_policies_by_module() -> None:
    """A norm in float32 between layers in bfloat16."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    model = filled(model, dtype=torch.float32)
    narrow = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    wide = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=BF16)
    dtypes: list[torch.dtype] = []
    model[1].register_forward_pre_hook(lambda module, args: dtypes.append(module.weight.dtype))
    for module, policy in ((model[0], narrow), (model[1], wide), (model[2], narrow)):
        fully_shard(module, mp_policy=policy)
    fully_shard(model, mp_policy=narrow)
    for step in range(2):
        assert backward(model, step).dtype == BF16
    assert dtypes[-1] == torch.float32
    assert all(param.grad.dtype == torch.float32 for param in model.parameters())


class Adapted(nn.Module):
    """A frozen layer in bfloat16 with trainable factors in float32 beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH + 1)
        self.down = nn.Parameter(torch.empty(2, WIDTH))
        self.up = nn.Parameter(torch.empty(WIDTH + 1, 2))
        self.scale = nn.Parameter(torch.empty(1))
        filled(self, dtype=torch.float64)
        self.layer.to(BF16).requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows.to(BF16)).to(rows.dtype) + rows @ self.down.t() @ self.up.t() * self.scale


def test_adapters() -> None:
    """Mixed dtypes in one group, the frozen ones without gradients."""
    for wrap in (as_whole, by_layer):
        twin = Twin(nn.Sequential(Adapted(), nn.Tanh(), filled(nn.Linear(WIDTH + 1, 2))), wrap)
        twin.train()
        assert twin.sharded[0].layer.weight.grad is None
        assert twin.sharded[0].layer.weight.dtype == BF16


class Dtypes(nn.Module):
    """Trainable parameters of four dtypes; sums of whole numbers, so that nothing is rounded."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float32, BF16, torch.float64, torch.float16, torch.float32]
        self.params = nn.ParameterList(nn.Parameter(torch.ones(5, 2, dtype=dtype)) for dtype in dtypes)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return sum(param.double().sum() for param in self.params) * rows.round()


def test_several_trainable_dtypes() -> None:
    twin = Twin(Dtypes(), as_whole)
    for step in range(3):
        twin.backward(make_rows(step), lambda model, rows, rank: model(rows).sum())
        twin.check(0.0)
        twin.update(lr=0.0)


def test_frozen_parts() -> None:
    """In a trainable group, and a group that is frozen as a whole."""
    for wrap in (as_whole, by_layer):
        for reshard in (True, False):
            model = net(4)
            model[0].requires_grad_(False)
            model[2].bias.requires_grad_(False)
            model[4].weight.requires_grad_(False)
            Twin(model, wrap, reshard_after_forward=reshard).train()


def test_frozen_and_thawed() -> None:
    """Between steps; what is frozen keeps its gradient."""
    twin = Twin(net())
    for step, is_trained in enumerate([True, False, True, False]):
        for model in (twin.sharded, twin.single):
            model[2].requires_grad_(is_trained)
        twin.step(make_rows(step))
        assert all(param.requires_grad == is_trained for param in twin.sharded[2].parameters())


def test_all_frozen() -> None:
    """The input still gets its gradient."""
    twin = Twin(net().requires_grad_(False))
    for step in range(2):
        rows = rows_of(make_rows(step), dist.get_rank())
        ours, single = (rows.clone().requires_grad_() for _ in range(2))
        twin.sharded(ours).sum().backward()
        twin.single(single).sum().backward()
        assert torch.allclose(ours.grad, single.grad, rtol=1e-12, atol=0)
        assert not twin.sharded(rows).requires_grad

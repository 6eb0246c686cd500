"""Compiled models under fully_shard, each with an eager twin whose gradients they must have."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardDim

import weft
import weft.compiler
import weft.tensor_parallel as tp
from tests.compiler.pairs import LONG, MAY_WARN, WIDTH, filled, fresh
from tests.compiler.sharded_twins import (
    Shard,
    Twins,
    assert_in_graph,
    blocks,
    custom,
    per_block,
    whole,
)
from tests.ranks import run_on
from weft.compiler.graphs import calls
from weft.compiler.passes.find_shards import GATHER, SCATTER

VERY_LONG: dict[str, Any] = {"timeout": 240, "collective_timeout": 100}

pytestmark = [run_on(gloo=2, full=True, **LONG), MAY_WARN]


# Everyday training


@run_on(weft=2, backend=["aot_eager"], **LONG)
@run_on(weft=2, backend=["eager"], full=True, **LONG)
@run_on(gloo=2, backend=["eager", "aot_eager"], full=True, **LONG)
def test_steps(backend: str) -> None:
    for make in (blocks, custom):
        for shard in (per_block, whole):
            twins = Twins(make, shard, backend=backend, is_exact=backend != "inductor")
            twins.train()
            assert_in_graph()
            saved = twins.under.state_dict()
            for name, right in twins.plain.state_dict().items():
                assert saved[name].placements == right.placements


@run_on(gloo=2, cap_mb=[None], full=True, **VERY_LONG)
@run_on(weft=2, cap_mb=[0.0], full=True, **VERY_LONG)
def test_with_inductor(cap_mb: float | None) -> None:
    """Collectives of the graph are joined up to the cap, and those of the backward are there again."""
    weft.compiler.settings.bucket_cap_mb = cap_mb
    try:
        Twins(blocks, per_block, backend="inductor", is_exact=False).train()
    finally:
        weft.compiler.settings.bucket_cap_mb = None
    assert_in_graph()
    # The first block's weight is not needed in backward: its input has no gradient.
    num_gathers, num_scatters = (2, 1) if cap_mb is None else (4 + 3, 4)
    assert counters["inductor"]["fsdp_gathers"] == num_gathers, counters["inductor"]
    assert counters["inductor"]["fsdp_scatters"] == num_scatters, counters["inductor"]


@run_on(gloo=2, full=True, **VERY_LONG)
def test_custom_with_inductor() -> None:
    policy = weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    shard = functools.partial(per_block, mp_policy=policy)
    twins = Twins(custom, shard, backend="inductor", is_exact=False)
    twins.tolerance = {"rtol": 0.1, "atol": 0.02}  # bfloat16, which Inductor rounds less often
    twins.train()


def test_block_by_block() -> None:
    """Each block compiled by itself; more of them than Dynamo compiles one function for."""
    fresh()

    def make() -> nn.Module:
        made = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(10)]
        return filled(nn.Sequential(*made), dtype=torch.float32)

    twins = Twins(make, per_block)
    for block in twins.under:
        block.compile(backend="aot_eager", fullgraph=True)
    twins.compiled = twins.under
    for salt in range(3):
        twins.step(salt)


def test_reshard_or_not() -> None:
    for reshards in (True, False, 2):
        for make in (blocks, custom):
            Twins(make, lambda module: per_block(module, reshard_after_forward=reshards)).train()  # noqa: B023
            assert_in_graph()


@run_on(gloo=2, **LONG)
def test_what_is_kept() -> None:
    """Backward gathers again what forward has freed, and what it has kept is not gathered again."""
    for reshards in (True, False):
        graphs: list[torch.fx.Graph] = []

        def keep(module: torch.fx.GraphModule, _: Any) -> Any:
            graphs.append(module.graph)  # noqa: B023
            return make_boxed_func(module.forward)

        backend = aot_autograd(
            fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
        )
        shard = functools.partial(per_block, reshard_after_forward=reshards)
        Twins(blocks, shard, backend=backend).step(0)
        forward, backward = graphs
        assert len(calls(forward, GATHER)) == 4
        assert len(calls(forward, SCATTER)) == 0
        assert len(calls(backward, GATHER)) == (3 if reshards else 0)
        assert len(calls(backward, SCATTER)) == 4
        kept = [node for node in backward.nodes if node.op == "placeholder"]
        num_weights = sum(tuple(node.meta["val"].shape) == (WIDTH, WIDTH) for node in kept)
        assert num_weights == (0 if reshards else 2), kept


def test_mixed_precision() -> None:
    for policy in (
        weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        weft.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32),
        weft.MixedPrecisionPolicy(torch.float16, torch.float16),
        weft.MixedPrecisionPolicy(None, torch.float64),
    ):
        Twins(blocks, lambda module: per_block(module, mp_policy=policy)).train()  # noqa: B023
        assert_in_graph()


def test_other_dims() -> None:
    """Sharded along the last dim, uneven; and a conv, in the middle one."""

    def make() -> nn.Module:
        shape = (nn.Unflatten(1, (3, 3)), nn.Conv1d(3, 5, 2), nn.Flatten(), nn.Linear(10, 7), nn.Linear(7, 2))
        return filled(nn.Sequential(nn.Linear(WIDTH, 9), *shape), dtype=torch.float32)

    def by_dim(param: nn.Parameter) -> Any:
        return ShardDim(param.ndim - 1 if param.ndim < 3 else 1)

    Twins(make, lambda module: whole(module, shard_placement_fn=by_dim)).train()
    assert_in_graph()


def test_large() -> None:
    """A weight that travels by itself beside a bias that doesn't; another one that two ranks don't divide."""

    def make() -> nn.Module:
        made = nn.Sequential(nn.Linear(WIDTH, 1024), nn.Linear(1024, 641), nn.Linear(641, 2))
        return filled(made, dtype=torch.float32)

    for shard in (per_block, whole):
        Twins(make, shard).train()
        assert_in_graph()


class Tied(nn.Module):
    """One weight for two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def test_tied() -> None:
    def make() -> nn.Module:
        return filled(nn.Sequential(Tied(), nn.Linear(WIDTH, 2)), dtype=torch.float32)

    for shard in (per_block, whole):
        twins = Twins(make, shard)
        twins.train()
        assert twins.under[0].second.weight is twins.under[0].first.weight
        assert_in_graph()


class Partly(nn.Module):
    """Uses some of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).tanh()


def test_frozen_and_unused() -> None:
    def make() -> nn.Module:
        model = filled(nn.Sequential(Partly(), nn.Linear(WIDTH, WIDTH), Partly()), dtype=torch.float32)
        model[1].bias.requires_grad_(False)
        for param in model[2].parameters():
            param.requires_grad_(False)
        return model

    for shard in (per_block, whole):
        twins = Twins(make, shard)
        twins.train()
        assert twins.under[0].unused.weight.grad is None
        for model in twins.models():  # others from now on
            model[1].bias.requires_grad_(True)
            model[1].weight.requires_grad_(False)
        for salt in range(3, 6):
            twins.step(salt)
        assert_in_graph()


def test_several_modules() -> None:
    """One group for several modules, of which a forward may run some."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.left, self.right = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.runs_both = True

        def forward(self, x: Tensor) -> Tensor:
            x = self.left(self.body(x))
            return self.right(x) if self.runs_both else x

    def shard(model: Any) -> Any:
        weft.fully_shard([model.left, model.right])
        return weft.fully_shard(model)

    def make() -> nn.Module:
        return filled(Heads(), dtype=torch.float32)

    for is_inside in (False, True):
        twins = Twins(lambda: nn.Sequential(make()) if is_inside else make(), lambda m: whole_of(m, shard))  # noqa: B023
        twins.train()
        for model in twins.models():
            heads = model[0] if is_inside else model
            heads.runs_both = False
        twins.step(4)
        twins.step(5)
        assert_in_graph()


def whole_of(model: Any, shard: Shard) -> Any:
    """The model, or the one inside of a Sequential, sharded."""
    if isinstance(model, nn.Sequential):
        shard(model[0])
        return weft.fully_shard(model)
    return shard(model)


# Over tensor parallel


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@run_on(gloo=4, full=True, **LONG)
def test_over_tensor_parallel(backend: str) -> None:
    """Graphs break at sharded modules, and gradients are right.

    Three steps of a model that is split and sharded, against the same one without a compiler.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    # Two layers in a group: the second one's piece of the group's memory doesn't begin where that begins.
    bare = nn.Sequential(*(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in range(2)))
    plain, compiled = (spread(copy.deepcopy(bare), mesh) for _ in range(2))
    run = torch.compile(compiled, backend=backend)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, compiled)]
    for step in range(3):
        rows = torch.randn(
            4, 8, generator=torch.Generator().manual_seed(step * 2 + mesh.get_local_rank("dp"))
        )
        losses = [model(rows).square().mean() for model in (plain, run)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0])
        for (name, one), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
            assert isinstance(one.grad, DTensor), name
            assert isinstance(other.grad, DTensor), name
            torch.testing.assert_close(other.grad.to_local(), one.grad.to_local(), msg=name)
        for optimizer in optimizers:
            optimizer.step()


def spread(model: nn.Sequential, mesh: torch.distributed.DeviceMesh) -> nn.Module:
    plan: dict[str, tp.ParallelStyle] = {}
    for at in range(len(model)):
        plan |= {f"{at}.0": tp.ColwiseParallel(), f"{at}.2": tp.RowwiseParallel()}
    tp.parallelize_module(model, mesh["tp"], plan)
    for block in (*model, model):
        weft.fully_shard(block, mesh=mesh["dp"])
    return model

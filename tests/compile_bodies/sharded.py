"""Compiled models under fully_shard, each with an eager twin whose gradients they must have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import weft
from tests.compile_bodies.pairs import WIDTH, filled, fresh, make_rows
from weft.compiler.graphs import calls
from weft.compiler.passes.find_shards import GATHER, SCATTER

LEARNING_RATE = 0.05

Shard = Callable[[nn.Module], Any]


def blocks() -> nn.Module:
    """Three blocks and a head, none of them as wide as two ranks divide."""
    made = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return filled(nn.Sequential(*made, nn.Linear(WIDTH, 3)), dtype=torch.float32)


class Custom(nn.Module):
    """A user's class."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh() * self.scale
        return x


def custom() -> nn.Module:
    return filled(Custom(), dtype=torch.float32)


def per_block(module: nn.Module, **options: Any) -> Any:
    for child in module.blocks if isinstance(module, Custom) else module.children():
        weft.fully_shard(child, **options)
    return weft.fully_shard(module, **options)


def whole(module: nn.Module, **options: Any) -> Any:
    return weft.fully_shard(module, **options)


def rows(salt: int) -> Tensor:
    return make_rows(dist.get_rank(), salt).float()


class Twins:
    """A compiled model and an eager one, sharded alike."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = blocks,
        shard: Shard = per_block,
        *,
        backend: Any = "aot_eager",
        fullgraph: bool = True,
        is_exact: bool = True,
    ) -> None:
        fresh()
        self.plain, self.under = shard(make()), shard(make())
        self.compiled: Any = torch.compile(self.under, backend=backend, fullgraph=fullgraph)
        self.optimizers = [torch.optim.Adam(model.parameters(), lr=LEARNING_RATE) for model in self.models()]
        self.tolerance = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 1e-4, "atol": 1e-5}
        self.num_steps = 0

    def models(self) -> list[Any]:
        return [self.plain, self.under]

    def loss(self, model: Any, salt: int) -> Tensor:
        return model(rows(salt)).float().square().mean()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def backward(self, salt: int) -> None:
        for model in (self.plain, self.compiled):
            self.loss(model, salt).backward()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.num_steps += 1

    def check(self) -> None:
        """Gradients and parameters are the twin's: values, dtypes, placements, and None for None."""
        found = dict(self.under.named_parameters(remove_duplicate=False))
        wanted = dict(self.plain.named_parameters(remove_duplicate=False))
        assert list(found) == list(wanted)
        for name, right in wanted.items():
            param: Any = found[name]
            what = f"rank {dist.get_rank()}, step {self.num_steps}, {name}"
            assert isinstance(param, nn.Parameter), f"{what} is a {type(param)}"
            self._compare(param, right, what)
            assert (param.grad is None) == (right.grad is None), f"{what}: {param.grad}, not {right.grad}"
            if right.grad is not None:
                self._compare(param.grad, right.grad, f"{what}, gradient")

    def _compare(self, found: Any, right: Any, what: str) -> None:
        assert (found.placements, found.shape) == (right.placements, right.shape), what
        torch.testing.assert_close(
            found.to_local(), right.to_local(), **self.tolerance, msg=lambda text: f"{what}: {text}"
        )

    def step(self, salt: int) -> None:
        self.zero_grad()
        self.backward(salt)
        self.check()
        self.update()

    def train(self, num_steps: int = 3) -> None:
        """Steps, of which those after the second must not compile anything."""
        for salt in range(num_steps):
            if salt < 2:
                self.step(salt)
            else:
                with torch.compiler.set_stance("fail_on_recompile"):
                    self.step(salt)


def assert_in_graph(num_breaks: int = 0) -> None:
    found = sum(counters["graph_break"].values())
    assert (found > 0) == (num_breaks > 0), counters["graph_break"]


# Everyday training


def steps(backend: str) -> None:
    for make in (blocks, custom):
        for shard in (per_block, whole):
            twins = Twins(make, shard, backend=backend, is_exact=backend != "inductor")
            twins.train()
            assert_in_graph()
            saved = twins.under.state_dict()
            for name, right in twins.plain.state_dict().items():
                assert saved[name].placements == right.placements


def with_inductor(cap_mb: float | None) -> None:
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


def custom_with_inductor() -> None:
    policy = weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    shard = functools.partial(per_block, mp_policy=policy)
    twins = Twins(custom, shard, backend="inductor", is_exact=False)
    twins.tolerance = {"rtol": 0.1, "atol": 0.02}  # bfloat16, which Inductor rounds less often
    twins.train()


def block_by_block() -> None:
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


def reshard_or_not() -> None:
    for reshards in (True, False, 2):
        for make in (blocks, custom):
            Twins(make, lambda module: per_block(module, reshard_after_forward=reshards)).train()  # noqa: B023
            assert_in_graph()


def what_is_kept() -> None:
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


def mixed_precision() -> None:
    for policy in (
        weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        weft.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32),
        weft.MixedPrecisionPolicy(torch.float16, torch.float16),
        weft.MixedPrecisionPolicy(None, torch.float64),
    ):
        Twins(blocks, lambda module: per_block(module, mp_policy=policy)).train()  # noqa: B023
        assert_in_graph()


def other_dims() -> None:
    """Sharded along the last dim, uneven; and a conv, in the middle one."""

    def make() -> nn.Module:
        shape = (nn.Unflatten(1, (3, 3)), nn.Conv1d(3, 5, 2), nn.Flatten(), nn.Linear(10, 7), nn.Linear(7, 2))
        return filled(nn.Sequential(nn.Linear(WIDTH, 9), *shape), dtype=torch.float32)

    def by_dim(param: nn.Parameter) -> Any:
        return torch.distributed.tensor.Shard(param.ndim - 1 if param.ndim < 3 else 1)

    Twins(make, lambda module: whole(module, shard_placement_fn=by_dim)).train()
    assert_in_graph()


def large() -> None:
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


def tied() -> None:
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


def frozen_and_unused() -> None:
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


def several_modules() -> None:
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


BODIES = [
    block_by_block,
    reshard_or_not,
    what_is_kept,
    mixed_precision,
    other_dims,
    large,
    tied,
    frozen_and_unused,
    several_modules,
]

"""Compiled models under fully_shard: what breaks the graph, what changes between steps, what fails."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import weft
from tests.compiler.pairs import LONG, MAY_WARN, WIDTH, backward_context, filled, fresh
from tests.compiler.sharded_twins import Twins, assert_in_graph, blocks, custom, per_block, rows, whole
from tests.ranks import run_on
from weft.comm_hooks.default_hooks import allreduce_hook

pytestmark = [run_on(gloo=2, full=True, **LONG), MAY_WARN]


def test_accumulation() -> None:
    """Local gradients are kept outside of graphs and reduced with the next synced step."""
    for make in (blocks, custom):
        twins = Twins(make, per_block, fullgraph=False, is_exact=False)  # sums have another order
        for salt in range(0, 12, 3):
            twins.zero_grad()
            for model in twins.models():
                model.set_requires_gradient_sync(False)
            for more in range(salt // 3 % 3):
                twins.backward(salt + more)
            for model in twins.models():
                model.set_requires_gradient_sync(True)
            twins.backward(salt + 2)
            twins.check()
            twins.update()


def test_accumulation_in_turns() -> None:
    """Local gradients of the module itself, then a synced step of the compiled one, which has run before."""
    for make in (blocks, custom):
        twins = Twins(make, per_block, fullgraph=False, is_exact=False)
        twins.step(0)
        compiled = twins.compiled
        twins.zero_grad()
        for is_synced in (False, True):
            for model in twins.models():
                model.set_requires_gradient_sync(is_synced)
            twins.compiled = compiled if is_synced else twins.under
            twins.backward(1 + is_synced)
        twins.check()


def test_gradients_kept() -> None:
    """Without zero_grad what was reduced adds up."""
    twins = Twins()
    for salt in range(3):
        twins.backward(salt)
        twins.check()
    assert_in_graph()


def test_several_forwards() -> None:
    twins = Twins(is_exact=False)  # means of sums, and sums of means
    first = twins.loss
    twins.loss = lambda model, salt: first(model, salt) + first(model, salt + 50)  # type: ignore[method-assign]
    twins.train()
    assert_in_graph()


def test_in_turns() -> None:
    """Steps of the compiled module, of the module itself, and evaluations."""
    for make in (blocks, custom):
        twins = Twins(make)
        compiled = twins.compiled
        for salt in range(6):
            twins.compiled = compiled if salt % 3 else twins.under
            twins.step(salt)
            for context in (torch.no_grad(), torch.inference_mode()):
                with context:
                    assert torch.equal(compiled(rows(salt + 70)), twins.plain(rows(salt + 70)))
        assert_in_graph()


class Broken(nn.Module):
    """Its forward is no single graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_broken_graph() -> None:
    def make() -> nn.Module:
        return filled(nn.Sequential(nn.Linear(WIDTH, WIDTH), Broken(), nn.Tanh()), dtype=torch.float32)

    def shard(model: Any) -> Any:
        weft.fully_shard(model[0])
        weft.fully_shard(model[1])
        return weft.fully_shard(model)

    for way in (shard, whole):
        Twins(make, way, fullgraph=False).train()


class Failing(nn.Module):
    """Raises when it is told to: within the graph's forward, or while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.fails:
            torch._dynamo.graph_break()
            raise ValueError("told to")
        return x


def test_failing_forward() -> None:
    def make() -> nn.Module:
        return filled(nn.Sequential(nn.Linear(WIDTH, WIDTH), Failing()), dtype=torch.float32)

    twins = Twins(make, fullgraph=False)
    twins.step(0)
    for model in twins.models():
        model[1].fails = True
    for model in (twins.plain, twins.compiled):
        with pytest.raises(ValueError, match="told to"):
            twins.loss(model, 1)
    for model in twins.models():
        model[1].fails = False
    twins.check()
    for salt in range(2, 5):
        twins.step(salt)


@run_on(gloo=2, **LONG)
def test_own_ways() -> None:
    """Settings that graphs don't do: the graph is broken, the numbers are right."""

    def with_hook(model: Any) -> None:
        model.register_comm_hook(None, allreduce_hook)

    def with_factor(model: Any) -> None:
        for part in (*model.children(), model):
            part.set_gradient_divide_factor(4.0)

    def with_zeros(model: Any) -> None:
        for part in (*model.children(), model):
            part.set_reduce_scatter_unused_params(True)

    for change in (with_hook, with_factor, with_zeros):
        twins = Twins(fullgraph=False)
        twins.step(0)
        assert_in_graph()
        for model in twins.models():
            change(model)
        for salt in range(1, 4):
            twins.step(salt)
        assert_in_graph(1)
        assert any("fully_shard" in reason for reason in counters["graph_break"]), counters["graph_break"]


def test_replicas() -> None:
    """A mesh of two axes, and one rank for each shard: outside of graphs."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("rep", "shard"))
    Twins(blocks, lambda module: per_block(module, mesh=mesh), fullgraph=False).train()


def test_other_values() -> None:
    """Parameters that were loaded, replaced, given other memory or another dtype between steps."""
    twins = Twins()
    twins.step(0)
    states = [model.state_dict() for model in twins.models()]
    for state in states:
        for name in state:
            state[name] = state[name] * 0.5
    for model, state in zip(twins.models(), states, strict=True):
        model.load_state_dict(state)
    twins.step(1)
    for model, state in zip(twins.models(), states, strict=True):
        model.load_state_dict(state, assign=True)
    twins.optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in twins.models()]
    twins.step(2)
    for model in twins.models():
        for param in model.parameters():
            param.data = param.data * 0.25
    twins.step(3)
    twins.step(4)
    for model in twins.models():
        model.double()
    twins.optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in twins.models()]
    twins.loss = lambda model, salt: model(rows(salt).double()).square().mean()  # type: ignore[method-assign]
    for salt in range(5, 8):
        twins.step(salt)
    assert_in_graph()


class Checkpointed(nn.Module):
    """Its middle runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.second(self.first(x).tanh()), x, use_reentrant=False)  # type: ignore[return-value]


def test_checkpointed() -> None:
    def make() -> nn.Module:
        return filled(nn.Sequential(Checkpointed(), Checkpointed(), nn.Linear(WIDTH, 2)), dtype=torch.float32)

    Twins(make, lambda module: per_block(module, reshard_after_forward=True)).train()
    assert_in_graph()


def test_users_hooks() -> None:
    """Hooks of the user's on a parameter see its shard's gradient, once a backward."""
    twins = Twins()
    seen: dict[str, list[Tensor]] = {"plain": [], "under": []}
    for name, model in zip(seen, twins.models(), strict=True):
        weight = model[0][0].weight
        weight.register_hook(lambda grad: grad * 2)
        weight.register_post_accumulate_grad_hook(
            lambda param, name=name: seen[name].append(param.grad.to_local().clone())
        )
    twins.train()
    assert len(seen["under"]) == len(seen["plain"]) == 3
    for found, right in zip(seen["under"], seen["plain"], strict=True):
        assert torch.equal(found, right)


def test_copies() -> None:
    twins = Twins()
    twins.train()
    twins.plain, twins.under = copy.deepcopy(twins.plain), copy.deepcopy(twins.under)
    twins.compiled = torch.compile(twins.under, backend="aot_eager", fullgraph=True)
    twins.optimizers = [torch.optim.Adam(model.parameters(), lr=0.05) for model in twins.models()]
    twins.train()
    assert_in_graph()


def test_uneven_inputs() -> None:
    """Under Join hooks run outside of graphs."""
    fresh()
    results: list[Tensor] = []
    for is_compiled in (False, True):
        model = per_block(blocks())
        run: Any = torch.compile(model, backend="aot_eager") if is_compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run(rows(9)).sum().backward()
        optimizer.zero_grad()
        with weft.join.Join([model], optimizer=optimizer):
            for salt in range(1 + dist.get_rank()):
                optimizer.zero_grad()
                run(rows(salt)).square().mean().backward()
                optimizer.step()
        results.append(torch.cat([param.full_tensor().flatten() for param in model.parameters()]))
    assert torch.equal(*results)


def test_traced_backward() -> None:
    """torch's compiled autograd traces the backward as well."""
    twins = Twins()
    for salt in range(3):
        twins.zero_grad()
        twins.loss(twins.plain, salt).backward()
        value = twins.loss(twins.compiled, salt)
        with backward_context("torch"):
            value.backward()
        if torch.__version__ < "2.13":  # its copies of gradients whose pieces differ in size are whole ones
            for param in twins.under.parameters():
                param.grad = param.grad.redistribute(placements=param.placements)
        twins.check()
        twins.update()


def test_compiled_optimizer() -> None:
    """A compiled optimizer step, over shards of different sizes and none: what the eager one does."""
    fresh()
    ours = filled(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH + 1), nn.Tanh(), nn.Linear(2 * WIDTH + 1, 1)))
    models = [ours, copy.deepcopy(ours)]
    steps: list[Any] = []
    for model in models:
        per_block(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        steps.append(optimizer.step if steps else torch.compile(optimizer.step, backend="aot_eager"))
    kept: list[tuple[Any, Tensor]] = []
    for salt in range(4):
        if salt == 2:
            torch.compiler.reset()  # which forgets what is to be called before a trace
        for model, step in zip(models, steps, strict=True):
            model.zero_grad(set_to_none=salt % 2 == 0)
            model(rows(salt).double()).square().mean().backward()
            step()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.allclose(one.grad.to_local(), other.grad.to_local(), rtol=0, atol=1e-12)
            assert torch.allclose(one.to_local(), other.to_local(), rtol=0, atol=1e-12)
        if salt == 1:  # gradients that users keep are theirs
            kept = [(param.grad, param.grad.to_local().clone()) for param in ours.parameters()]
    assert all(torch.equal(grad.to_local(), values) for grad, values in kept)


def test_dropped() -> None:
    """Nothing of a compiled model stays when its last user lets go."""
    fresh()
    model = per_block(blocks())
    torch.compile(model, backend="aot_eager", fullgraph=True)(rows(0)).sum().backward()
    left = [weakref.ref(thing) for thing in (model, weft.fully_shard.state(model), model[0][0].weight)]
    del model
    gc.collect()
    assert [ref() for ref in left] == [None] * 3

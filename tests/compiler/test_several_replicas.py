"""Several compiled replicas in one process: each has its own reducer, whatever a compiler's caches hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import weft
from tests.compiler.pairs import LONG, MAY_WARN, Pair, fresh, mlp, square_loss
from tests.ranks import run_on

pytestmark = [run_on(gloo=2, backend=["aot_eager", "inductor"], full=True, **LONG), MAY_WARN]

SEVEN = 7.0


def seven_hook(state: list[int], bucket: weft.GradBucket) -> torch.futures.Future[Tensor]:
    """Nothing that a mean could be."""
    state.append(bucket.index())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(torch.full_like(bucket.buffer(), SEVEN))
    return done


def test_one_with_a_hook(backend: str) -> None:
    """The hook of the first is not called for the second, which has the same graph."""
    fresh()
    calls: list[int] = []
    first: Any = weft.replicate(mlp())
    first.register_comm_hook(calls, seven_hook)
    compiled = torch.compile(first, backend=backend)
    square_loss(compiled, 0).backward()
    assert calls == [0]
    assert first[0].weight.grad.eq(SEVEN).all()
    calls.clear()
    Pair(backend=backend, is_exact=backend != "inductor").train()
    assert calls == []
    square_loss(compiled, 0).backward()
    assert calls == [0]


def test_on_other_groups(backend: str) -> None:
    """The second is reduced over its own group: here each rank alone, and then all."""
    fresh()
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    groups: Any = (alone, dist.group.WORLD, alone)
    for group in groups:
        replica: Any = weft.replicate(mlp(), process_group=group)
        compiled = torch.compile(replica, backend=backend)
        square_loss(compiled, 0).backward()
        size = dist.get_world_size(group)
        ranks = range(size) if size > 1 else [dist.get_rank()]
        bare: Any = mlp()
        for rank in ranks:
            (square_loss(bare, 0, rank) / size).backward()
        torch.testing.assert_close(replica[0].weight.grad, bare[0].weight.grad)


def test_one_without_sync(backend: str) -> None:
    """set_requires_gradient_sync(False) of one is no matter of the other."""
    fresh()
    first: Any = weft.replicate(mlp())
    compiled = torch.compile(first, backend=backend)
    square_loss(compiled, 0).backward()
    first.set_requires_gradient_sync(False)
    first.zero_grad()
    square_loss(compiled, 1).backward()
    local = first[0].weight.grad.clone()
    Pair(backend=backend, is_exact=backend != "inductor").train()
    assert torch.equal(first[0].weight.grad, local), "a neighbour's step has changed a gradient"


@run_on(gloo=2, backend=["aot_eager"], **LONG)
@run_on(gloo=2, backend=["inductor"], full=True, **LONG)
def test_both_in_one_graph(backend: str) -> None:
    """Two replicas in one compiled function, one of them with a hook."""
    fresh()
    calls: list[int] = []
    first: Any = weft.replicate(mlp())
    second: Any = weft.replicate(mlp())
    second.register_comm_hook(calls, seven_hook)

    def loss(model: tuple[Any, Any]) -> Any:
        return lambda rows: model[0](rows) + model[1](rows)

    for salt in range(3):
        first.zero_grad()
        second.zero_grad()
        compiled = torch.compile(loss((first, second)), backend=backend, fullgraph=True)
        square_loss(compiled, salt).backward()
        bare: Any = (mlp(), mlp())
        for rank in range(dist.get_world_size()):
            (square_loss(loss(bare), salt, rank) / dist.get_world_size()).backward()
        torch.testing.assert_close(first[0].weight.grad, bare[0][0].weight.grad)
        assert second[0].weight.grad.eq(SEVEN).all()
    assert calls == [0] * 3


def test_a_replica_inside_a_replica(backend: str) -> None:
    """A child replicated on its own before its parent."""
    fresh()

    def nested(is_replicated: bool) -> Any:
        inside: Any = mlp()
        outside: Any = mlp()
        if is_replicated:
            inside = weft.replicate(inside)
        model: Any = torch.nn.Sequential(outside[0], torch.nn.Tanh(), inside)
        return weft.replicate(model) if is_replicated else model

    replica, bare = nested(True), nested(False)
    compiled = torch.compile(replica, backend=backend)
    for salt in range(3):
        replica.zero_grad()
        bare.zero_grad()
        square_loss(compiled, salt).backward()
        for rank in range(dist.get_world_size()):
            (square_loss(bare, salt, rank) / dist.get_world_size()).backward()
        for (name, param), right in zip(replica.named_parameters(), bare.parameters(), strict=True):
            torch.testing.assert_close(param.grad, right.grad, msg=name)

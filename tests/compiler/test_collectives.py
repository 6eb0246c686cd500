"""The door and functional collectives under torch.compile, on the local group and on gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from tests.compiler.pairs import MAY_WARN
from tests.local.inputs import (
    assert_same,
    functional_all_gather,
    me,
    num_ranks,
    reduced,
    sample,
    samples,
)
from tests.ranks import run_on
from weft import comm

pytestmark = [
    run_on(weft=2, timeout=60, collective_timeout=60),
    run_on(gloo=2, timeout=60, collective_timeout=60, full=True),
    MAY_WARN,
]

SIZE = 24


def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    return comm.all_reduce(tensor * 2).wait() + 1


def all_reduce_max(tensor: torch.Tensor) -> torch.Tensor:
    return comm.all_reduce(tensor * 2, dist.ReduceOp.MAX).wait() + 1


def all_reduce_in_place(tensor: torch.Tensor) -> torch.Tensor:
    doubled = tensor * 2
    comm.all_reduce(doubled).wait()
    return doubled + 1


def all_gather(tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.new_empty(2 * tensor.numel())
    return comm.all_gather_into_tensor(out, tensor * 2).wait() + 1


def reduce_scatter(tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.new_empty(tensor.numel() // 2)
    return comm.reduce_scatter_tensor(out, tensor * 2).wait() + 1


def broadcast(tensor: torch.Tensor) -> torch.Tensor:
    return comm.broadcast(tensor * 2, 1).wait() + 1


def all_to_all(tensor: torch.Tensor) -> torch.Tensor:
    return comm.all_to_all_single(torch.empty_like(tensor), tensor * 2).wait() + 1


def all_reduce_coalesced(tensor: torch.Tensor) -> torch.Tensor:
    first, second = comm.all_reduce_coalesced([tensor * 2, tensor[:8] * 3]).wait()
    return torch.cat([first, second]) + 1


def then(tensor: torch.Tensor) -> torch.Tensor:
    return comm.all_reduce(tensor * 2).then(lambda reduced: reduced + 1).wait()


# Each with what it must give, by hand.
TRACED: dict[Callable[[torch.Tensor], torch.Tensor], Callable[[list[torch.Tensor]], torch.Tensor]] = {
    all_reduce: lambda every: 2 * reduced(every) + 1,
    all_reduce_max: lambda every: 2 * reduced(every, dist.ReduceOp.MAX) + 1,
    all_reduce_in_place: lambda every: 2 * reduced(every) + 1,
    all_gather: lambda every: 2 * torch.cat(every) + 1,
    reduce_scatter: lambda every: 2 * reduced(every).chunk(num_ranks())[me()] + 1,
    broadcast: lambda every: 2 * every[1] + 1,
    all_to_all: lambda every: 2 * torch.cat([part.chunk(num_ranks())[me()] for part in every]) + 1,
    all_reduce_coalesced: lambda every: torch.cat([2 * reduced(every), 3 * reduced(every)[:8]]) + 1,
    then: lambda every: 2 * reduced(every) + 1,
}


class Capture:
    """A compiler that keeps the graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward

    def targets(self) -> str:
        return " ".join(str(node.target) for graph in self.graphs for node in graph.graph.nodes)


@pytest.mark.parametrize("function", list(TRACED))
def test_the_door_is_traced(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Every function is one graph, holds a functional collective and gives what it gives in eager."""
    torch._dynamo.reset()
    capture = Capture()
    compiled = torch.compile(function, backend=capture, fullgraph=True)
    for salt in range(2):
        tensor = sample(me(), SIZE, salt=salt)
        expected = TRACED[function](samples(SIZE, salt=salt))
        assert_same(compiled(tensor), expected, "compiled")
        assert_same(tensor, sample(me(), SIZE, salt=salt), "the input")
        assert_same(function(tensor), expected, "eager")
    assert len(capture.graphs) == 1
    assert "_c10d_functional" in capture.targets()


def test_the_door_through_aot() -> None:
    for function, want in TRACED.items():
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        assert_same(compiled(sample(me(), SIZE)), want(samples(SIZE)), f"{function.__name__}, aot_eager")


def functional(tensor: torch.Tensor) -> list[torch.Tensor]:
    group = dist.group.WORLD
    whole = functional_all_gather(tensor, 0, group)
    return [
        funcol.all_reduce(tensor, "sum", group) + 0,
        whole + 0,
        funcol.reduce_scatter_tensor(whole, "sum", 0, group) + 0,
        funcol.broadcast(tensor, 1, group) + 0,
        funcol.all_to_all_single(tensor, None, None, group) + 0,
        *(part + 0 for part in funcol.all_reduce_coalesced([tensor, tensor[:3]], "max", group)),
    ]


def test_functional_collectives() -> None:
    """torch's own functional collectives, eager and compiled."""
    every = samples(SIZE)
    largest = reduced(every, dist.ReduceOp.MAX)
    wants = [
        reduced(every),
        torch.cat(every),
        num_ranks() * every[me()],
        every[1],
        torch.cat([part.chunk(num_ranks())[me()] for part in every]),
        largest,
        largest[:3],
    ]
    torch._dynamo.reset()
    compiled = torch.compile(functional, backend="aot_eager", fullgraph=True)
    for run in (functional, compiled):
        for got, want in zip(run(every[me()]), wants, strict=True):
            assert_same(got + 0, want, f"{run}")


def test_functional_backward() -> None:
    """Gradients flow through functional collectives, eager and compiled."""

    def loss(tensor: torch.Tensor) -> torch.Tensor:
        gathered = funcol.all_gather_tensor_autograd(tensor, 0, dist.group.WORLD)
        return (gathered * torch.arange(gathered.numel())).sum()

    torch._dynamo.reset()
    for run in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        tensor = sample(me(), 4).requires_grad_()
        run(tensor).backward()
        want = num_ranks() * torch.arange(4.0 * num_ranks())[4 * me() : 4 * me() + 4]
        assert_same(tensor.grad, want, "a gradient through all_gather")

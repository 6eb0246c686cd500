"""Modules whose class is the user's own, compiled: hooks around their forward are in the graph with it.

Their weights are large enough that gradients are made in their buckets, not copied there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import weft
from tests.compile_bodies.pairs import Pair, filled, fresh, make_rows, square_loss
from weft import compiler
from weft.comm_hooks.default_hooks import bf16_compress_hook

WIDE = 136  # squared it is a large gradient
NUM_WORDS = 150
as_graphs = functools.partial(compiler.backend, options={"engine": "aot_eager"})


class Wide(nn.Module):
    """Layers with a large weight each, one of them used transposed, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, WIDE)
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(3))
        self.turned = nn.Parameter(torch.empty(WIDE, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        for layer in self.layers:
            x = torch.tanh(layer(x) / 8)
        return x @ self.turned


class Words(nn.Module):
    """An embedding whose weight is the last layer's too, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.apart = nn.Embedding(NUM_WORDS, WIDE), nn.Embedding(NUM_WORDS, WIDE)
        self.head = nn.Linear(WIDE, NUM_WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        words = (x * 40).long() % NUM_WORDS  # some of them several times
        return self.head(torch.tanh(self.embed(words) + self.apart(words)))


def wide() -> nn.Module:
    return filled(Wide())


def words() -> nn.Module:
    return filled(Words())


def buckets_made() -> int:
    return counters["inductor"]["ddp_buckets"]


def trained(wrap: str) -> None:
    """The gradients are the eager ones, to the bit where the arithmetic is; and they are made in place."""
    for make in (wide, words):
        fresh()
        counters["inductor"]["ddp_buckets"] = 0
        Pair(make, wrap, backend=as_graphs).train()
        assert buckets_made() > 0, f"{make.__name__} is not reduced in the graph"
        fresh()
        counters["inductor"]["ddp_buckets"] = 0
        Pair(make, wrap, backend="inductor", is_exact=False).train()
        assert buckets_made() > 0, f"{make.__name__} is not reduced in Inductor's graph"


def explained(wrap: str) -> None:
    fresh()
    model = weft.replicate(wide()) if wrap == "replicate" else weft.DistributedDataParallel(wide())
    found = compiler.explain(model, make_rows(0, 0))
    assert found.is_in_graph
    assert sum(len(launch.names) for launch in found.launches) == len(list(model.parameters()))


def added_up(wrap: str) -> None:
    """Gradients that are there already are added to; those that the user holds keep their values."""
    fresh()
    pair = Pair(wide, wrap, backend=as_graphs, is_exact=False)  # eager ones are summed in another order
    pair.zero_grad()
    for salt in range(3):
        pair.backward(salt)
        pair.check()
    held = [param.grad for param in pair.under.parameters()]
    values = [grad.clone() for grad in held if grad is not None]
    pair.zero_grad()
    pair.backward(7)
    pair.check()
    assert all(torch.equal(grad, value) for grad, value in zip(held, values, strict=True))


def with_a_hook(wrap: str) -> None:
    fresh()
    pair = Pair(wide, wrap, backend=as_graphs)
    for model in (pair.plain, pair.under):
        model.register_comm_hook(None, bf16_compress_hook)
    for salt in range(3):
        pair.zero_grad()
        pair.backward(salt)
        pair.check(with_bare=False)
    assert buckets_made() > 0


BODIES: list[Callable[[str], None]] = [trained, explained, added_up, with_a_hook]


def by_its_own_method() -> None:
    """`module.compile()` compiles in place."""
    fresh()
    counters["inductor"]["ddp_buckets"] = 0
    pair = Pair(wide, "replicate")
    pair.under.compile(backend=as_graphs, fullgraph=True)
    pair.compiled = pair.under
    pair.train()
    assert buckets_made() > 0


def many_of_one_class() -> None:
    """More modules than Dynamo compiles one function for."""
    fresh()
    plain, under = (nn.Sequential(*(filled(Wide(), seed) for seed in range(10))) for _ in range(2))
    for model in (plain, under):
        for block in model:
            block.turned.data.mul_(0.1)
            weft.replicate(block)
    for block in under:
        block.compile(backend="aot_eager", fullgraph=True)
    for salt in range(3):
        for model in (plain, under):
            model.zero_grad()
            x: Any = make_rows(torch.distributed.get_rank(), salt)
            sum(block(x).square().mean() for block in model).backward()
        for one, other in zip(plain.parameters(), under.parameters(), strict=True):
            assert one.grad is not None
            assert torch.equal(one.grad, other.grad)


def sharded() -> None:
    """fully_shard of a root with parameters of its own: they are gathered in the graph."""
    for reshards in (True, False):
        fresh()
        counters["inductor"]["fsdp_gathers"] = counters["inductor"]["fsdp_scatters"] = 0
        plain, under = (weft.fully_shard(wide(), reshard_after_forward=reshards) for _ in range(2))
        compiled = torch.compile(under, backend=as_graphs, fullgraph=True)
        for salt in range(3):
            for model, called in ((plain, plain), (under, compiled)):
                model.zero_grad()
                square_loss(called, salt).backward()
            for one, other in zip(plain.parameters(), under.parameters(), strict=True):
                assert torch.equal(one.grad.to_local(), other.grad.to_local())  # type: ignore[union-attr]
        assert counters["inductor"]["fsdp_gathers"] > 0
        assert counters["inductor"]["fsdp_scatters"] > 0


ALONE: list[Callable[[], None]] = [by_its_own_method, many_of_one_class, sharded]

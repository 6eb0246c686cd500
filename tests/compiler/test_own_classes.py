"""Modules whose class is the user's own, compiled: hooks around their forward are in the graph with it.

Their weights are large enough that gradients are made in their buckets, not copied there."""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

import weft
from tests.compiler.pairs import MAY_WARN, WRAPS, Pair, filled, fresh, make_rows, square_loss
from tests.ranks import run_on
from weft import compiler
from weft.comm_hooks.default_hooks import bf16_compress_hook
from weft.data_parallel.buckets import DenseBucket
from weft.tensor_parallel import ColwiseParallel, parallelize_module

VERY_LONG: dict[str, Any] = {"timeout": 300, "collective_timeout": 100}

pytestmark = [run_on(gloo=2, weft=2, wrap=WRAPS, full=True, **VERY_LONG), MAY_WARN]

# The mean is of a number of ranks that is no power of two.
ON_THREE = run_on(weft=3, wrap=["replicate"], full=True, **VERY_LONG)

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
        return self.head(torch.tanh(self.embed(words) + self.apart((words + 3) % NUM_WORDS)))


def wide() -> nn.Module:
    return filled(Wide())


def words() -> nn.Module:
    return filled(Words())


def buckets_made() -> int:
    return counters["inductor"]["ddp_buckets"]


@contextmanager
def places() -> Generator[set[tuple[int, int]]]:
    """Which gradients are made in their buckets meanwhile: a bucket's id, and the place in it."""
    seen: set[tuple[int, int]] = set()
    place = DenseBucket.destination

    def note(bucket: DenseBucket, reduction: Any, at: int) -> Any:
        seen.add((id(bucket), at))
        return place(bucket, reduction, at)

    DenseBucket.destination = note  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        DenseBucket.destination = place


@run_on(weft=2, wrap=["ddp"], **VERY_LONG)
@run_on(weft=2, wrap=["replicate"], full=True, **VERY_LONG)
@run_on(gloo=2, wrap=WRAPS, full=True, **VERY_LONG)
@ON_THREE
def test_trained(wrap: str) -> None:
    """The gradients are the eager ones, to the bit where the arithmetic is; and they are made in place."""
    for make, num_large in ((wide, 4), (words, 2)):
        for backend in (as_graphs, "inductor"):
            fresh()
            pair = Pair(make, wrap, backend=backend, is_exact=backend is as_graphs)
            with places() as seen:
                pair.train(steps=2)  # buckets are planned anew after the first
                seen.clear()
                pair.step(5)
            # Without Inductor nothing says what the gradients of embeddings are made of.
            assert len(seen) == (0 if make is words and backend is as_graphs else num_large), (make, seen)


def test_small_first(wrap: str) -> None:
    """A bucket without large gradients goes before those that have them."""
    fresh()
    with places() as seen:
        Pair(wide, wrap, backend=as_graphs, bucket_cap_mb=0.001).train()
    assert len(seen) >= 4


@run_on(weft=2, wrap=["ddp"], **VERY_LONG)
@run_on(weft=2, wrap=["replicate"], full=True, **VERY_LONG)
@run_on(gloo=2, wrap=WRAPS, full=True, **VERY_LONG)
def test_explained(wrap: str) -> None:
    fresh()
    model = weft.replicate(wide()) if wrap == "replicate" else weft.DistributedDataParallel(wide())
    found = compiler.explain(model, make_rows(0, 0))
    assert found.is_in_graph
    assert sum(len(launch.names) for launch in found.launches) == len(list(model.parameters()))


@run_on(gloo=2, weft=2, wrap=WRAPS, full=True, **VERY_LONG)
@ON_THREE
def test_added_up(wrap: str) -> None:
    """Gradients that are there already are added to; those that the user holds keep their values."""
    for keeps_buffers in (False, True):
        fresh()
        pair = Pair(
            wide, wrap, backend=as_graphs, is_exact=False, gradient_as_bucket_view=keeps_buffers
        )  # eager ones are summed in another order
        pair.train(steps=2)
        pair.zero_grad()
        for salt in range(3):
            pair.backward(salt)
            pair.check()
        for _ in range(2):
            pair.zero_grad()
            pair.backward(3, two_batches)
            pair.check()
    pair = Pair(wide, wrap, backend=as_graphs)
    pair.train(steps=2)
    pair.zero_grad()
    pair.backward(6)
    held = [param.grad for param in pair.under.parameters()]
    values = [grad.clone() for grad in held if grad is not None]
    pair.zero_grad()
    pair.backward(7)
    pair.check()
    assert all(torch.equal(grad, value) for grad, value in zip(held, values, strict=True))


def test_with_a_hook(wrap: str) -> None:
    fresh()
    pair = Pair(wide, wrap, backend=as_graphs)
    for model in (pair.plain, pair.under):
        model.register_comm_hook(None, bf16_compress_hook)
    for salt in range(3):
        pair.zero_grad()
        pair.backward(salt)
        pair.check(with_bare=False)
    assert buckets_made() > 0


def two_batches(model: Any, salt: int, rank: int | None = None) -> Tensor:
    """Two forwards, of two graphs, and one backward."""
    rank = dist.get_rank() if rank is None else rank
    sizes = (4, 7)
    return sum(model(make_rows(rank, salt, num_rows)).square().mean() for num_rows in sizes)  # type: ignore[return-value]


@run_on(weft=2, full=True, **VERY_LONG)
def test_by_its_own_method() -> None:
    """`module.compile()` compiles in place."""
    fresh()
    counters["inductor"]["ddp_buckets"] = 0
    pair = Pair(wide, "replicate")
    pair.under.compile(backend=as_graphs, fullgraph=True)
    pair.compiled = pair.under
    pair.train()
    assert buckets_made() > 0


@run_on(weft=2, full=True, **VERY_LONG)
def test_many_of_one_class() -> None:
    """More modules than Dynamo compiles one function for."""
    fresh()
    plain, under = (nn.Sequential(*(filled(Wide(), seed) for seed in range(10))) for _ in range(2))
    for model in (plain, under):
        block: Any
        for block in model:
            block.turned.data.mul_(0.1)
            weft.replicate(block)
    for block in under:
        block.compile(backend="aot_eager", fullgraph=True)
    for salt in range(3):
        for model in (plain, under):
            model.zero_grad()
            x = make_rows(dist.get_rank(), salt)
            loss: Any = sum(block(x).square().mean() for block in model)
            loss.backward()
        for one, other in zip(plain.parameters(), under.parameters(), strict=True):
            assert one.grad is not None
            assert torch.equal(one.grad, other.grad)


@run_on(weft=2, full=True, **VERY_LONG)
def test_sharded() -> None:
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


@run_on(weft=2, full=True, **VERY_LONG)
def test_many_that_are_split() -> None:
    """Tensor parallel leaves the class of modules that are alike the same: they share what is compiled."""
    fresh()
    mesh = init_device_mesh("cpu", (2,))
    blocks = nn.Sequential(*(filled(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), seed) for seed in range(12)))
    for block in blocks:
        parallelize_module(block, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
        block.compile(backend="aot_eager", fullgraph=True)
    for salt in range(2):
        blocks(make_rows(0, salt)).square().mean().backward()
    assert counters["stats"]["unique_graphs"] <= 4

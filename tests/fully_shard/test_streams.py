"""fully_shard on a GPU: the order of streams, and what a step takes of the GPU's memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.fully_shard.late_collectives import late_collectives, poisoned
from tests.fully_shard.models import by_layer, filled
from tests.fully_shard.twins import Twin, rows_of, rows_on_gpu, single_loss, twin_on_gpu
from tests.ranks import run_on
from weft import CPUOffloadPolicy

LIMITS: dict[str, Any] = {"timeout": 60, "collective_timeout": 20}

pytestmark = [run_on(gpu=2, nccl=1, **LIMITS), run_on(nccl=2)]
ONLY_TWO = run_on(gpu=2, **LIMITS)
ON_NCCL = run_on(nccl=2)

BUSY_CYCLES = 10_000_000  # some five milliseconds
WIDTH = 512  # each weight travels by itself; narrower ones are packed


def sizes_of(width: int) -> tuple[int, ...]:
    """Of a layer: weight and bias, whole and of a rank of two; what a flat buffer of both may take."""
    weight, bias = width * width, width
    return weight, weight // 2, weight + bias, weight + bias + 16, (weight + bias) // 2


class Layer(nn.Module):
    """A linear layer. Where `is_spoiling` memory that was given back is spoiled around it, and its own
    parameters are used late, in forward and in backward.
    """

    def __init__(self, width: int, is_busy: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.sizes = sizes_of(width)
        self.cycles = BUSY_CYCLES if is_busy else 0
        self.is_spoiling = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.is_spoiling:
            return torch.tanh(self.linear(rows))
        out = torch.tanh(self.linear(poisoned(rows, (), self.cycles)))
        return poisoned(out, (), self.cycles)


class Chain(nn.Module):
    """Layers in a row."""

    def __init__(self, depth: int = 6, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, number % 3 == 0) for number in range(depth))
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows)
            if layer.is_spoiling:
                rows = poisoned(rows, layer.sizes)
        return rows


def spoiling_twin(model: nn.Module, **options: Any) -> Twin:
    twin = twin_on_gpu(model, **options)
    for layer in twin.sharded.modules():
        if isinstance(layer, Layer):
            layer.is_spoiling = True
    return twin


@run_on(gpu_threads=2, also=True, **LIMITS)
def test_overlap() -> None:
    """Gradients are used at once, in the order of the stream; nobody waits for the GPU."""
    for reshard in (True, False):
        twin = spoiling_twin(Chain(), reshard_after_forward=reshard)
        for step in range(4):
            torch.cuda._sleep(BUSY_CYCLES)
            twin.backward(rows_on_gpu(step, WIDTH))
            twin.check()
            twin.update()


@ONLY_TWO
def test_late() -> None:
    """Collectives read and write their tensors long after the host has gone on."""
    for reshard, width in ((True, 512), (True, 256), (False, 512)):
        twin = spoiling_twin(Chain(width=width), reshard_after_forward=reshard)
        with late_collectives():
            for step in range(4):
                twin.backward(rows_on_gpu(step, width))
                twin.check()
                twin.update()
            for step in range(3):
                twin.sharded.set_requires_gradient_sync(step > 0)
                twin.backward(rows_on_gpu(step, width))
            twin.check()


@ONLY_TWO
@ON_NCCL
def test_on_a_side_stream() -> None:
    """Forward and backward there; forward there and backward here; and again."""
    twin = spoiling_twin(Chain())
    side = torch.cuda.Stream()
    with late_collectives():
        for step, is_backward_there in enumerate([True, False, True, False]):
            rows = rows_on_gpu(step, WIDTH)
            single_loss(twin.single, rows).backward()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = twin.sharded(rows_of(rows, dist.get_rank())).square().mean()
                if is_backward_there:
                    loss.backward()
            torch.cuda.current_stream().wait_stream(side)
            if not is_backward_there:
                loss.backward()
            twin.check()
            twin.update()


def test_inputs_of_another_stream() -> None:
    """Made on another stream, while this one is busy; the caller orders them, as for any module."""
    twin = spoiling_twin(Chain(3))
    side = torch.cuda.Stream()
    for step in range(3):
        rows = rows_on_gpu(step, WIDTH)
        single_loss(twin.single, rows).backward()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(BUSY_CYCLES)
            mine = rows_of(rows, dist.get_rank()) * 1.0
        torch.cuda.current_stream().wait_stream(side)
        mine.record_stream(torch.cuda.current_stream())
        twin.sharded(mine).square().mean().backward()
        twin.check()
        twin.update()


class Branches(nn.Module):
    """Two chains, each on a stream of its own, in turns: what one's layer needs, the other's has launched."""

    def __init__(self, width: int, depth: int = 4) -> None:
        super().__init__()
        self.left = nn.ModuleList(Layer(width, number % 2 == 0) for number in range(depth))
        self.right = nn.ModuleList(Layer(width, number % 2 == 1) for number in range(depth))
        self.streams: tuple[Any, ...] = ()
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        here = torch.cuda.current_stream()
        streams = self.streams or (here, here)
        for stream in self.streams:
            stream.wait_stream(here)
        values = [rows, rows]
        for layers in zip(self.left, self.right, strict=True):
            for side, (layer, stream) in enumerate(zip(layers, streams, strict=True)):
                with torch.cuda.stream(stream):
                    values[side] = layer(values[side])
                    if layer.is_spoiling:
                        values[side] = poisoned(values[side], layer.sizes)
        for stream in self.streams:
            here.wait_stream(stream)
        return values[0] + values[1]


@ONLY_TWO
@ON_NCCL
def test_branches_on_two_streams() -> None:
    """What was gathered for one stream is not given back to the other while it is used."""
    for reshard, width in ((True, 512), (True, 256), (False, 512)):
        twin = spoiling_twin(Branches(width), reshard_after_forward=reshard)
        twin.sharded.streams = (torch.cuda.Stream(), torch.cuda.Stream())
        with late_collectives():
            for step in range(4):
                rows = rows_on_gpu(step, width)
                single_loss(twin.single, rows).backward()
                twin.sharded(rows_of(rows, dist.get_rank())).square().mean().backward()
                twin.check()
                twin.update()


# -- memory -------------------------------------------------------------------------------

DEPTH, SIDE = 16, 1024
LAYER_BYTES = SIDE * SIDE * 4
SLACK_BYTES = LAYER_BYTES // 4  # activations


def allocated() -> int:
    """What is asked of torch's allocator now; it may give larger blocks."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def settled() -> int:
    """The same, when everything that is over has ended."""
    gc.collect()
    torch.cuda.synchronize()
    return allocated()


def peak_of(action: Callable[[], object]) -> int:
    """The most that was asked for while the action ran."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    action()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"]


def deep_model(**options: Any) -> Any:
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False, device="cuda") for _ in range(DEPTH)))
    by_layer(model, reshard_after_forward=True, **options)
    return model


def settled_before() -> int:
    """What is there without a model: a first one has left what groups and libraries keep."""
    model = deep_model()
    model(torch.randn(8, SIDE, device="cuda")).square().mean().backward()
    del model
    return settled()


def test_memory_of_a_step() -> None:
    """Shards, and two layers: the one that is computed and the one that is gathered."""
    before = settled_before()
    model = deep_model()
    rows = torch.randn(8, SIDE, device="cuda")
    num_ranks = dist.get_world_size()
    shards = settled() - before
    assert shards <= DEPTH * LAYER_BYTES // num_ranks + SLACK_BYTES
    if num_ranks == 1:
        return  # whole parameters are the shards

    def forward() -> None:
        with torch.no_grad():
            model(rows)

    def step() -> None:
        model(rows).square().mean().backward()

    forward()
    peak = peak_of(forward) - before - shards
    assert peak <= 2 * LAYER_BYTES + SLACK_BYTES, f"{peak / LAYER_BYTES:.2f} layers"
    assert settled() - before <= shards + SLACK_BYTES
    step()
    model.zero_grad()
    forward()
    # Two layers, the gradients of the one that is computed and of the one on its way; gradients of shards.
    peak = peak_of(step) - before - 2 * shards
    assert peak <= 4 * LAYER_BYTES + 2 * SLACK_BYTES, f"{peak / LAYER_BYTES:.2f} layers"
    rest = settled() - before - 2 * shards
    assert rest <= SLACK_BYTES, f"{rest / LAYER_BYTES:.2f} layers"


def test_memory_of_gradients() -> None:
    """It is given back when the next forward begins, unless somebody has them."""
    before = settled_before()
    model = deep_model()
    rows = torch.randn(8, SIDE, device="cuda")
    shards = settled() - before
    in_forward: list[int] = []

    def look(*_: Any) -> None:
        in_forward.append(allocated() - before - shards)

    model[1].register_forward_pre_hook(look)
    for _ in range(3):
        model(rows).square().mean().backward()
        model.zero_grad()
    assert max(in_forward) <= 2 * LAYER_BYTES + SLACK_BYTES, [n / LAYER_BYTES for n in in_forward]
    model(rows).square().mean().backward()
    kept: list[Any] = [param.grad for param in model.parameters()]
    right = [grad.to_local().clone() for grad in kept]
    model.zero_grad()
    model(rows * 2).square().mean().backward()
    assert all(torch.equal(grad.to_local(), other) for grad, other in zip(kept, right, strict=True))


@run_on(gpu=2, nccl=1, **LIMITS)
def test_memory_of_unshard() -> None:
    model = deep_model()
    before = settled()
    for layer in model:
        layer.unshard()
    whole = settled() - before
    is_alone = dist.get_world_size() == 1
    assert whole <= SLACK_BYTES if is_alone else whole >= DEPTH * LAYER_BYTES
    for layer in model:
        layer.reshard()
    assert settled() - before <= SLACK_BYTES


@run_on(gpu=2, nccl=1, **LIMITS)
def test_memory_of_an_offloaded_model() -> None:
    """Nothing of the model rests on the GPU: no parameters, no gradients, nothing they passed through."""
    before = settled_before()
    model = deep_model(offload_policy=CPUOffloadPolicy())
    rows = torch.randn(8, SIDE, device="cuda")

    def step() -> None:
        model(rows).square().mean().backward()

    for _ in range(3):
        step()
        assert settled() - before <= SLACK_BYTES, f"{(settled() - before) / LAYER_BYTES:.2f} layers"
        model.zero_grad()
    peak = peak_of(step) - before
    assert peak <= 6 * LAYER_BYTES + 2 * SLACK_BYTES, f"{peak / LAYER_BYTES:.2f} layers"

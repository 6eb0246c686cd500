"""Parameters that are put elsewhere: by a plan on the mesh's kind of device, by users into other dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

from tests.ranks import run_on
from tests.tensor_parallel.models import MLP, mlp_plan
from tests.tensor_parallel.twins import Twin, filled, local_of, make_mesh, numbers, tokens

pytest_plugins = ["tests.tensor_parallel.libraries"]
pytestmark = run_on(threads=2, library=["weft"])
TORCH_TOO = run_on(threads=2, library=["torch"], full=True, also=True)
ON_FOUR = run_on(threads=4, library=["weft"], full=True, also=True)
ON_GPU = run_on(gpu=2, library=["weft"], timeout=90, collective_timeout=20, also=True)

Conversion = Callable[[nn.Module], nn.Module]


class Masked(nn.Linear):
    """A Linear with a buffer of its own, and one that it doesn't have."""

    mask: torch.Tensor

    def __init__(self, width: int, height: int) -> None:
        super().__init__(width, height)
        self.register_buffer("mask", torch.ones(width))
        self.register_buffer("nothing", None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.linear(input * self.mask, self.weight, self.bias)


@ON_FOUR
def test_on_the_device_of_the_mesh(tp: Any) -> None:
    """A model in the CPU's memory; meta is another kind of device that every machine has."""
    mesh = init_device_mesh("meta", (dist.get_world_size(),))
    for source in (0, None):
        model = nn.Sequential(Masked(8, 8), nn.LayerNorm(8), nn.Embedding(6, 8), nn.Embedding(6, 8))
        plan = {
            "0": tp.ColwiseParallel(),
            "1": tp.SequenceParallel(),
            "2": tp.ColwiseParallel(),
            "3": tp.RowwiseParallel(input_layouts=Replicate()),
        }
        tp.parallelize_module(model, mesh, plan, src_data_rank=source)
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor), name
            assert param.is_leaf, name
            assert param.requires_grad, name
            assert param.device.type == local_of(param).device.type == "meta", name
        assert model[0].mask.device.type == "meta"
        assert model[0].nothing is None
        assert local_of(model[0](torch.empty(4, 8, device="meta"))).shape == (4, 8 // mesh.size())


@TORCH_TOO
@ON_GPU
def test_without_values_it_stays(tp: Any) -> None:
    """A module on the meta device gets its memory, and its values, later."""
    with torch.device("meta"):
        model = MLP()
    tp.parallelize_module(model, make_mesh(), mlp_plan(tp))
    assert all(param.is_meta for param in model.parameters())


@TORCH_TOO
@ON_GPU
def test_converted(tp: Any) -> None:
    """To other dtypes, between steps. Gradients that there are go along, and the next step adds to them."""
    narrower: list[Conversion] = [lambda model: model.to(torch.float32), lambda model: model.bfloat16()]
    wider: list[Conversion] = [lambda model: model.float(), lambda model: model.double()]
    for keeps_gradients in (False, True):
        twin = Twin(tp, filled(MLP()), make_mesh(), mlp_plan(tp))
        # Wider gradients would be compared more strictly than they were made.
        for convert in narrower if keeps_gradients else narrower + wider:
            for each in (twin.parallel, twin.single):
                convert(each)
            dtype = next(twin.single.parameters()).dtype
            twin.run(numbers(4, 8, dtype=dtype), Replicate(), Replicate())
            for name, param in twin.parallel.named_parameters():
                kinds = {param.dtype, param.grad.dtype, local_of(param).dtype, local_of(param.grad).dtype}
                assert kinds == {dtype}, f"{name}: {kinds}"
            if not keeps_gradients:
                twin.zero()


@TORCH_TOO
@ON_GPU
def test_assigned_in_another_dtype(tp: Any) -> None:
    """Tensors of a state dict in the parameters' place, of another dtype than they had."""
    twin = Twin(tp, filled(MLP()), make_mesh(), mlp_plan(tp))
    other = Twin(tp, filled(MLP(), seed=3, dtype=torch.float32), make_mesh(), mlp_plan(tp))
    for mine, theirs in ((twin.parallel, other.parallel), (twin.single, other.single)):
        mine.load_state_dict(theirs.state_dict(), assign=True)
    twin.run(numbers(4, 8, dtype=torch.float32), Replicate(), Replicate())


@TORCH_TOO
@ON_GPU
def test_swapped(tp: Any) -> None:
    """torch.utils.swap_tensors, which conversions use, between two models."""
    twin = Twin(tp, filled(MLP()), make_mesh(), mlp_plan(tp))
    other = Twin(tp, filled(MLP(), seed=3, dtype=torch.float32), make_mesh(), mlp_plan(tp))
    for mine, theirs in ((twin.parallel, other.parallel), (twin.single, other.single)):
        for param, value in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.utils.swap_tensors(param, value)
    twin.run(numbers(4, 8, dtype=torch.float32), Replicate(), Replicate())
    other.run(numbers(4, 8), Replicate(), Replicate())


@ON_FOUR
@ON_GPU
def test_lookups_without_columns(tp: Any) -> None:
    """A rank that has none of an embedding's columns doesn't differentiate the lookup: CUDA's backward of it
    reads memory that isn't there. Its weight has a gradient all the same, and its output a backward.
    """
    mesh = make_mesh()
    for requires_grad in (True, False):
        module = filled(nn.Embedding(6, mesh.size() - 1)).requires_grad_(requires_grad)
        module = tp.parallelize_module(module, mesh, tp.ColwiseParallel())
        weight = module.weight
        seen = module(tokens(3, 5, vocabulary=6))
        is_last = dist.get_rank() == mesh.size() - 1
        assert seen.shape == (3, 5, 0 if is_last else 1)
        assert seen.requires_grad == requires_grad
        assert ("EmbeddingBackward0" in names_in_graph(seen)) == (requires_grad and not is_last)
        assert module.weight is weight
        if requires_grad:
            seen.sum().backward()
            assert weight.grad.placements == (Shard(1),)
            assert local_of(weight.grad).shape == local_of(weight).shape


def names_in_graph(tensor: torch.Tensor) -> set[str]:
    """Of all nodes behind a tensor."""
    found, left = set[Any](), [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left.extend(before for before, _ in node.next_functions)
    return {node.name() for node in found}

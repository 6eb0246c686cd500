"""What could go wrong around a parallel module: hooks of nodes, errors inside, misuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import weft
from tests.ranks import run_on
from tests.tensor_parallel.models import MLP, Stacked, gathering_plan, mlp_plan
from tests.tensor_parallel.twins import (
    LAYOUTS,
    Twin,
    assert_close,
    assert_same_gradients,
    filled,
    local_of,
    make_mesh,
    numbers,
    part_of,
    whole_of,
)

pytest_plugins = ["tests.tensor_parallel.libraries"]
pytestmark = [
    run_on(threads=2, library=["weft"]),
    run_on(gloo=2, library=["weft"], full=True),
]
TORCH_TOO = run_on(threads=2, library=["torch"], full=True, also=True)


def node_of(param: torch.Tensor) -> Any:
    """Where autograd adds the parameter's gradient."""
    return param.view_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


@TORCH_TOO
def test_hooks_of_nodes(tp: Any) -> None:
    """Libraries hook the node that accumulates: it is run once, and the gradient is there behind it."""
    model, single = filled(MLP()), filled(MLP())
    tp.parallelize_module(model, make_mesh(), mlp_plan(tp))
    seen: list[tuple[str, bool]] = []
    nodes = {name: node_of(param) for name, param in model.named_parameters()}
    for name, node in nodes.items():
        param = model.get_parameter(name)
        node.register_hook(lambda *_, name=name, param=param: seen.append((name, param.grad is not None)))
    for each in (model, single):
        each(numbers(4, 8)).square().sum().backward()
    assert sorted(seen) == sorted((name, True) for name in nodes)
    assert_same_gradients(model, single)


@TORCH_TOO
def test_hooks_in_front_of_nodes(tp: Any) -> None:
    """Such a hook is called once, and changes nothing; what it is given is not promised."""
    model, single = filled(MLP()), filled(MLP())
    tp.parallelize_module(model, make_mesh(), mlp_plan(tp))
    calls: list[str] = []
    nodes = {name: node_of(param) for name, param in model.named_parameters()}
    for name, node in nodes.items():
        node.register_prehook(lambda grads, name=name: calls.append(name))
    for each in (model, single):
        each(numbers(4, 8)).square().sum().backward()
    assert sorted(calls) == sorted(nodes)
    assert_same_gradients(model, single)


@TORCH_TOO
def test_hooks_of_several_gradients(tp: Any) -> None:
    twin = Twin(tp, filled(MLP()), make_mesh(), mlp_plan(tp))
    seen: list[list[bool]] = []
    params = list(twin.parallel.parameters())
    torch.autograd.graph.register_multi_grad_hook(
        params, lambda grads: seen.append([isinstance(grad, DTensor) for grad in grads])
    )
    twin.run(numbers(4, 8), Replicate(), Replicate())
    assert seen == [[True] * len(params)]


@TORCH_TOO
def test_backward_to_some(tp: Any) -> None:
    """`backward(inputs=...)` leaves the others without a gradient."""
    for name in ("net1.weight", "net1.bias", "net2.weight", "net2.bias"):
        twin = Twin(tp, filled(MLP()), make_mesh(), mlp_plan(tp))
        for each in (twin.parallel, twin.single):
            rows = numbers(4, 8).requires_grad_()
            each(rows).square().sum().backward(inputs=[each.get_parameter(name)])
            assert rows.grad is None
        twin.check()


@TORCH_TOO
def test_frozen_between(tp: Any) -> None:
    """A parameter that is frozen between forward and backward gets no gradient."""
    twin = Twin(tp, filled(MLP()), make_mesh(), mlp_plan(tp))
    for each in (twin.parallel, twin.single):
        loss = each(numbers(4, 8).requires_grad_()).square().sum()
        each.net1.weight.requires_grad_(False)
        each.net2.bias.requires_grad_(False)
        loss.backward()
    twin.check()


@TORCH_TOO
def test_gradients_that_were_there(tp: Any) -> None:
    """What a user has of an old gradient is added to or left alone as in a single process."""
    twin = Twin(tp, filled(MLP()), make_mesh(), mlp_plan(tp))
    for set_to_none in (False, True):
        twin.run(numbers(4, 8), Replicate(), Replicate())
        kept = [(param.grad, local_of(param.grad).clone()) for param in twin.parallel.parameters()]
        for each in (twin.parallel, twin.single):
            each.zero_grad(set_to_none=set_to_none)
        twin.run(numbers(4, 8, seed=3), Replicate(), Replicate())
        if set_to_none:
            assert all(torch.equal(local_of(grad), before) for grad, before in kept)


@TORCH_TOO
def test_gradients_are_memory_of_their_own(tp: Any) -> None:
    """No two gradients share memory, nor with what came back: a sum hands one tensor to all its parts."""
    mesh = make_mesh()
    model = filled(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    plan = {"0": tp.RowwiseParallel(), "1": tp.SequenceParallel(sequence_dim=0, use_local_output=True)}
    tp.parallelize_module(model, mesh, plan)
    cotangent = numbers(4, 8, seed=3)
    first = model[0](part_of(numbers(4, 8), Shard(1), mesh))
    first.backward(cotangent)
    model[1](part_of(numbers(4, 8), Shard(0), mesh)).backward(cotangent[: 4 // mesh.size()])
    memory = [local_of(param.grad).untyped_storage().data_ptr() for param in model.parameters()]
    assert len({*memory, cotangent.untyped_storage().data_ptr()}) == len(memory) + 1


class Shifts(nn.Module):
    """Both parameters get one gradient, which autograd hands to each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + (self.a + self.b)


@TORCH_TOO
def test_one_gradient_for_two(tp: Any) -> None:
    """What is added to one of them later is not added to the other."""
    twin = Twin(tp, filled(Shifts()), make_mesh(), tp.SequenceParallel(use_local_output=True))
    for step in range(3):
        twin.run(numbers(2, 8, 8, seed=step), Shard(1), Shard(1))
    grads = [local_of(param.grad).untyped_storage().data_ptr() for param in twin.parallel.parameters()]
    assert grads[0] != grads[1]


@TORCH_TOO
def test_strides_of_all_kinds(tp: Any) -> None:
    """Transposed and expanded inputs, and gradients that come so."""
    mesh = make_mesh()
    for plan, given in ((mlp_plan(tp), Replicate()), (gathering_plan(tp), Shard(0))):
        twin = Twin(tp, filled(MLP()), mesh, plan)
        full = numbers(8, 4).t()
        weights = numbers(8, 4, seed=3)
        for each, rows, factor in (
            (twin.single, full, weights.t()),
            (twin.parallel, part_of(full, given, mesh).t().clone().t(), part_of(weights.t(), given, mesh)),
        ):
            (each(rows).t() * factor.t()).sum().backward()
        twin.check()
        twin.zero()
        row = numbers(8)
        for each, size in ((twin.single, 4), (twin.parallel, part_of(full, given, mesh).shape[0])):
            each(row.expand(size, 8)).sum().backward()
        twin.check()


@run_on(gloo=2, full=True)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode(tp: Any) -> None:
    """Of the process: not for threads."""
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        twin = Twin(tp, filled(Stacked()), make_mesh(), mlp_plan(tp, "layers.*."))
        twin.run(numbers(4, 8), Replicate(), Replicate())


@run_on(threads=4, library=["weft"])
@run_on(threads=4, library=["torch"], full=True)
def test_two_models(tp: Any) -> None:
    """On four ranks: two models on two axes of one mesh, one behind the other."""
    mesh = make_mesh(2, 2, names="dp tp")
    models = [filled(MLP()), filled(MLP(), seed=1)]
    singles = [filled(MLP()), filled(MLP(), seed=1)]
    tp.parallelize_module(models[0], mesh["tp"], mlp_plan(tp))
    tp.parallelize_module(models[1], mesh["dp"], mlp_plan(tp))
    for first, second in (models, singles):
        second(first(numbers(4, 8))).square().sum().backward()
    for model, single in zip(models, singles, strict=True):
        assert_same_gradients(model, single)


class Failing(nn.Module):
    """Raises once."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))
        self.fails = True

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.fails:
            self.fails = False
            raise ZeroDivisionError
        return rows * self.gain


@TORCH_TOO
def test_an_error_inside(tp: Any) -> None:
    """Parameters are what they were, and the next forward is right."""
    model = Failing()
    twin = Twin(tp, filled(model), make_mesh(), tp.SequenceParallel(use_local_output=True))
    before = model.gain
    with pytest.raises(ZeroDivisionError):
        model(numbers(2, 4, 8))
    assert model.gain is before
    assert isinstance(model.gain, DTensor)
    twin.single.fails = False
    twin.run(numbers(2, 8, 8), Shard(1), Shard(1))


class Pair(nn.Module):
    """Two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return rows * self.gain, {"more": rows + self.gain}


# Where torch does otherwise, or nothing.


def test_several_outputs_of_a_cut_sequence(tp: Any) -> None:
    mesh = make_mesh()
    for is_local in (True, False):
        model, single = filled(Pair()), filled(Pair())
        tp.parallelize_module(model, mesh, tp.SequenceParallel(use_local_output=is_local))
        full = numbers(2, 8, 8)
        seen, right = model(part_of(full, Shard(1), mesh)), single(full)
        for mine, whole in ((seen[0], right[0]), (seen[1]["more"], right[1]["more"])):
            assert isinstance(mine, DTensor) != is_local
            assert_close(local_of(mine), part_of(whole.detach(), Shard(1), mesh), "output")
        total: Any = sum(
            (each.to_local() if not is_local else each).sum() for each in (seen[0], seen[1]["more"])
        )
        total.backward()
        (right[0].sum() + right[1]["more"].sum()).backward()
        assert_same_gradients(model, single)


def test_a_style_inside_another(tp: Any) -> None:
    """A cut sequence through a whole whose parts are in the plan too: right, or refused."""
    model = filled(nn.Sequential(nn.LayerNorm(8), nn.Tanh(), nn.LayerNorm(8)))
    single = filled(nn.Sequential(nn.LayerNorm(8), nn.Tanh(), nn.LayerNorm(8)))
    style = tp.SequenceParallel(use_local_output=True)
    mesh = make_mesh()
    try:
        tp.parallelize_module(model, mesh, {"": style, "0": tp.SequenceParallel(use_local_output=True)})
    except weft.ConfigError:
        assert type(model[0].weight.data) is torch.Tensor
        return
    full = numbers(2, 8, 8)
    seen, right = model(part_of(full, Shard(1), mesh)), single(full)
    assert_close(local_of(seen), part_of(right.detach(), Shard(1), mesh), "output")
    seen.square().sum().backward()
    right.square().sum().backward()
    assert_same_gradients(model, single)


def test_parameters_put_in_place(tp: Any) -> None:
    """A plain tensor in the place of a split one is an error that names it; not of attributes."""
    for name in ("weight", "bias"):
        for style, given in ((tp.ColwiseParallel(), Replicate()), (tp.RowwiseParallel(), Shard(-1))):
            model = filled(nn.Sequential(nn.Linear(8, 8)))
            tp.parallelize_module(model, make_mesh(), {"0": style})
            setattr(model[0], name, nn.Parameter(numbers(8, 8) if name == "weight" else numbers(8)))
            with pytest.raises(weft.WeftError, match=name):
                model(part_of(numbers(4, 8), given, make_mesh()))


def test_parallel_after_sharding(tp: Any) -> None:
    """fully_shard comes after tensor parallelism: the other way round is refused."""
    model = filled(MLP())
    weft.fully_shard(model, mesh=make_mesh())
    before = dict(model.named_parameters())
    with pytest.raises(weft.ConfigError, match=r"net[12]"):
        tp.parallelize_module(model, make_mesh(), mlp_plan(tp))
    assert all(param is before[name] for name, param in model.named_parameters())


@run_on(threads=4)
def test_a_dtensor_of_another_mesh(tp: Any) -> None:
    """On four ranks: what lies on other axes is refused by each style."""
    mesh = make_mesh(2, 2, names="dp tp")
    given = DTensor.from_local(numbers(4, 8), mesh["dp"], [Replicate()], run_check=False)
    for module, style in (
        (nn.Linear(8, 8), tp.ColwiseParallel()),
        (nn.Linear(8, 8), tp.RowwiseParallel()),
        (nn.LayerNorm(8), tp.SequenceParallel()),
        (nn.Identity(), tp.PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())),
        (nn.Identity(), tp.PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())),
    ):
        model = tp.parallelize_module(filled(module), mesh["tp"], style)
        with pytest.raises(weft.ConfigError, match="mesh"):
            model(given)


@TORCH_TOO
def test_inputs_of_another_dtype(tp: Any) -> None:
    """An error as in a single process: nothing is cast without autocast."""
    for name, given in (("ColwiseParallel", "R"), ("RowwiseParallel", "S-1")):
        model = tp.parallelize_module(filled(nn.Linear(8, 8)), make_mesh(), getattr(tp, name)())
        with pytest.raises(RuntimeError, match="dtype"):
            model(part_of(numbers(4, 8, dtype=torch.float32), LAYOUTS[given], make_mesh()))


@TORCH_TOO
def test_a_sum_of_many(tp: Any) -> None:
    """One parallel layer in several branches whose gradients are one tensor."""
    mesh = make_mesh()
    models = [filled(nn.Linear(8, 8)), filled(nn.Linear(8, 8))]
    tp.parallelize_module(models[0], mesh, tp.ColwiseParallel())
    outputs = []
    for model in models:
        rows = numbers(4, 8).requires_grad_()
        output = model(rows) + model(rows) + model(rows * 2)
        output.square().sum().backward()
        outputs.append((output, rows.grad))
    assert_close(whole_of(outputs[0][0], Shard(-1), mesh), outputs[1][0].detach(), "output")
    assert_close(outputs[0][1], outputs[1][1], "gradient of the input")
    assert_same_gradients(*models)


# What users may get wrong: each is refused by name, where it would be wrong in silence, or fatal


def test_inputs_of_the_wrong_kind(tp: Any) -> None:
    """Each is refused by name, before anything is sent."""
    mesh = make_mesh()
    embedding = tp.parallelize_module(
        filled(nn.Embedding(6, 4)), mesh, tp.RowwiseParallel(input_layouts=Replicate())
    )
    for ids in (torch.rand(3), torch.tensor([True, False])):
        with pytest.raises(RuntimeError, match="scalar types: Long, Int"):
            embedding(ids)
    with pytest.raises(IndexError, match="index out of range in self: 6, of 6 rows"):
        embedding(torch.tensor([1, 6]))
    linear = tp.parallelize_module(filled(nn.Linear(4, 4)), mesh, tp.ColwiseParallel())
    with pytest.raises(ValueError, match=r"rank \d of 2 got an input of shape"):
        linear(torch.tensor(1.0, dtype=torch.float64))


def test_modules_that_cannot_be(tp: Any) -> None:
    """A forward on the instance would run in the style's place; batch norm would see a part only."""
    linear = nn.Linear(4, 4)
    linear.forward = lambda rows: rows  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="a forward of its own on the instance"):
        tp.parallelize_module(linear, make_mesh(), tp.ColwiseParallel())
    assert not isinstance(linear.weight, DTensor)
    with pytest.raises(NotImplementedError, match="drift apart"):
        tp.parallelize_module(nn.Sequential(nn.BatchNorm1d(4)), make_mesh(), tp.SequenceParallel())


class Scaled(nn.Module):
    """A norm with a scale from outside."""

    def forward(self, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return rows * scale


def test_plain_parameters_as_inputs(tp: Any) -> None:
    """A plain parameter beside a part would get a part of its gradient; a DTensor gets an addend."""
    mesh = make_mesh()
    module = tp.parallelize_module(Scaled(), mesh, tp.SequenceParallel(use_local_output=True))
    rows = numbers(4, 6, 8)
    mine = part_of(rows, Shard(1), mesh)
    with pytest.raises(ValueError, match="a plain parameter of shape"):
        module(mine, nn.Parameter(torch.ones(8, dtype=rows.dtype)))
    scale: Any = nn.Parameter(distribute_tensor(torch.ones(8, dtype=rows.dtype), mesh, [Replicate()]))
    module(mine, scale).square().sum().backward()
    single = torch.ones(8, dtype=rows.dtype, requires_grad=True)
    (rows * single).square().sum().backward()
    assert_close(scale.grad.full_tensor(), single.grad, "gradient of the scale")


def test_batched_gradients(tp: Any) -> None:
    """vmap's tensors have no memory to move: an error, where the process once died."""
    linear = tp.parallelize_module(filled(nn.Linear(4, 4)), make_mesh(), tp.ColwiseParallel())
    rows = numbers(2, 4).requires_grad_()
    output = linear(rows)
    every = torch.eye(output.numel(), dtype=output.dtype).view(-1, *output.shape)
    with pytest.raises(RuntimeError, match="Loop instead"):
        torch.autograd.grad(output, rows, every, is_grads_batched=True)

"""PrepareModuleInput, PrepareModuleOutput and both in one: what a module is given, and what it gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import weft.tensor_parallel as weft_tp
from tests.ranks import run_on
from tests.tensor_parallel.models import MLP, gathering_plan
from tests.tensor_parallel.twins import (
    LAYOUTS,
    Twin,
    assert_close,
    check_input_gradient,
    check_output,
    dtensor_input,
    dual_of,
    filled,
    local_input,
    local_of,
    make_mesh,
    numbers,
    part_of,
    whole_of,
)
from weft.torch_private.check import release_of

pytest_plugins = ["tests.tensor_parallel.libraries"]
pytestmark = [
    run_on(threads=2, library=["weft"]),
    run_on(threads=2, library=["torch"], full=True),
    run_on(gloo=2, library=["weft"], full=True),
    run_on(gpu=2, library=["weft"], timeout=90, collective_timeout=20),
]
ON_FOUR = run_on(threads=4, library=["weft"], full=True, also=True)

# From, to; nothing is taken apart into terms of a sum.
CHANGES = [(one, other) for one, other in itertools.product(LAYOUTS, LAYOUTS) if other != "P" or one == "P"]


class Spy(nn.Module):
    """Gives back what it got, and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        given = (*args, *kwargs.values())
        return given[0] if len(given) == 1 else given


@ON_FOUR
def test_inputs(tp: Any) -> None:
    """Each change of layout of one input, forward and backward."""
    mesh = make_mesh()
    full, cotangent = numbers(4, 8), numbers(4, 8, seed=7)
    for (one, other), is_local in itertools.product(CHANGES, (True, False)):
        given, wanted = LAYOUTS[one], LAYOUTS[other]
        style = tp.PrepareModuleInput(
            input_layouts=given, desired_input_layouts=wanted, use_local_output=is_local
        )
        spy = tp.parallelize_module(Spy(), mesh, style)
        mine = local_input(full, given, mesh)
        seen = spy(mine)
        check_output(seen, full, wanted, mesh, is_local)
        local = seen if is_local else seen.to_local()
        local.backward(part_of(cotangent, dual_of(wanted), mesh))
        check_input_gradient(mine, cotangent, given, mesh)


@ON_FOUR
def test_outputs(tp: Any) -> None:
    """Each change of layout of one output, forward and backward."""
    mesh = make_mesh()
    full, cotangent = numbers(4, 8), numbers(4, 8, seed=7)
    for (one, other), is_local in itertools.product(CHANGES, (True, False)):
        given, wanted = LAYOUTS[one], LAYOUTS[other]
        style = tp.PrepareModuleOutput(
            output_layouts=given, desired_output_layouts=wanted, use_local_output=is_local
        )
        mine = local_input(full, given, mesh)
        seen = tp.parallelize_module(nn.Identity(), mesh, style)(mine)
        check_output(seen, full, wanted, mesh, is_local)
        local = seen if is_local else seen.to_local()
        local.backward(part_of(cotangent, dual_of(wanted), mesh))
        check_input_gradient(mine, cotangent, given, mesh)


def test_several_inputs(tp: Any) -> None:
    """Placeholders leave things alone: numbers, tensors, None itself."""
    mesh = make_mesh()
    full = numbers(4, 8)
    style = tp.PrepareModuleInput(
        input_layouts=(Shard(0), None, Replicate(), None),
        desired_input_layouts=(Replicate(), None, Shard(1), None),
    )
    spy = tp.parallelize_module(Spy(), mesh, style)
    plain = numbers(3)
    spy(part_of(full, Shard(0), mesh), plain, full, "word")
    first, second, third, last = spy.args
    assert isinstance(first, DTensor)
    assert first.placements == (Replicate(),)
    assert torch.equal(local_of(first), full)
    assert second is plain
    assert isinstance(third, DTensor)
    assert third.placements == (Shard(1),)
    assert torch.equal(local_of(third), part_of(full, Shard(1), mesh))
    assert last == "word"


def test_the_same_layout(tp: Any) -> None:
    """Nothing moves; a local tensor becomes a DTensor, or stays."""
    mesh = make_mesh()
    for is_local in (True, False):
        style = tp.PrepareModuleInput(
            input_layouts=Shard(0), desired_input_layouts=Shard(0), use_local_output=is_local
        )
        spy = tp.parallelize_module(Spy(), mesh, style)
        seen = spy(numbers(2, 3))
        assert isinstance(seen, DTensor) != is_local
        assert torch.equal(local_of(seen), numbers(2, 3))
        if not is_local:
            assert seen.shape == (2 * mesh.size(), 3)


def test_dtensors_given(tp: Any) -> None:
    """A DTensor goes from where it lies to what is wanted."""
    mesh = make_mesh()
    full = numbers(4, 8)
    style = tp.PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    spy = tp.parallelize_module(Spy(), mesh, style)
    for lies in (Shard(0), Shard(1), Partial()):
        given = DTensor.from_local(part_of(full, lies, mesh), mesh, [lies], run_check=False)
        seen = spy(given)
        assert seen.placements == (Replicate(),)
        assert_close(local_of(seen), full, f"from {lies}")


def test_a_dtensor_given_twice(tp: Any) -> None:
    """What a module makes of a DTensor leaves no trace on it: each use counts once."""
    mesh = make_mesh()
    full = numbers(4, 8)
    for lies, wanted in ((Shard(0), Shard(0)), (Shard(0), Replicate()), (Replicate(), Replicate())):
        style = tp.PrepareModuleInput(input_layouts=lies, desired_input_layouts=wanted, use_local_output=True)
        spy = tp.parallelize_module(Spy(), mesh, style)
        given = dtensor_input(full, lies, mesh)
        for _ in range(2):
            spy(given)
            assert not local_of(given).requires_grad
            assert given.is_leaf
        local = spy(given)
        cotangent = numbers(*full.shape, seed=7)
        local.backward(part_of(cotangent, wanted, mesh))
        check_input_gradient(given, cotangent, lies, mesh)


def test_by_name(tp: Any) -> None:
    """Inputs by keyword; what no layout was given for stays, also where a name has no tensor this time."""
    mesh = make_mesh()
    full = numbers(4, 8)
    style = tp.PrepareModuleInput(
        input_layouts=(Shard(0),),
        desired_input_layouts=(Replicate(),),
        input_kwarg_layouts={"mask": Shard(0), "late": Replicate()},
        desired_input_kwarg_layouts={"mask": Replicate(), "late": Shard(0)},
        use_local_output=True,
    )
    spy = tp.parallelize_module(Spy(), mesh, style)
    mine = part_of(full, Shard(0), mesh)
    spy(mine, mask=mine + 1, scale=2.0)
    assert torch.equal(spy.args[0], full)
    assert set(spy.kwargs) == {"mask", "scale"}
    assert torch.equal(spy.kwargs["mask"], full + 1)
    assert spy.kwargs["scale"] == 2.0
    spy(mine, late=full)
    assert torch.equal(spy.kwargs["late"], mine)


def test_by_name_only(tp: Any) -> None:
    mesh = make_mesh()
    style = tp.PrepareModuleInput(
        input_kwarg_layouts={"x": Shard(0)}, desired_input_kwarg_layouts={"x": Replicate()}
    )
    spy = tp.parallelize_module(Spy(), mesh, style)
    positional = numbers(2)
    spy(positional, x=numbers(1, 2))
    assert spy.args[0] is positional
    assert spy.kwargs["x"].placements == (Replicate(),)
    assert spy.kwargs["x"].shape == (mesh.size(), 2)


def test_several_outputs(tp: Any) -> None:
    mesh = make_mesh()
    full = numbers(4, 8)
    style = tp.PrepareModuleOutput(
        output_layouts=(Replicate(), None, Partial()),
        desired_output_layouts=(Shard(0), None, Replicate()),
    )
    module = tp.parallelize_module(Spy(), mesh, style)
    first, second, third = module(full, "word", part_of(full, Partial(), mesh))
    assert torch.equal(first, part_of(full, Shard(0), mesh))
    assert second == "word"
    assert_close(third, full, "sum")


@run_on(threads=2, library=["weft"])
@run_on(threads=2, library=["torch"], full=True)
@run_on(gloo=2, library=["weft"], full=True)
def test_wrong_lengths(tp: Any) -> None:
    with pytest.raises(
        AssertionError, match="input_layouts and desired_input_layouts should have same length!"
    ):
        tp.PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=(Replicate(), None))
    text = "output_layouts and desired_output_layouts should have same length!"
    with pytest.raises(AssertionError, match=text):
        tp.PrepareModuleOutput(output_layouts=(Shard(0), None), desired_output_layouts=Replicate())
    text = "input_kwarg_layouts and desired_input_kwarg_layouts should have same length!"
    with pytest.raises(AssertionError, match=text):
        tp.PrepareModuleInput(
            input_kwarg_layouts={"x": Shard(0)},
            desired_input_kwarg_layouts={"x": Shard(0), "y": Shard(0)},
        )
    with pytest.raises(AssertionError, match="desired module inputs should not be None!"):
        tp.PrepareModuleInput(input_layouts=Shard(0))
    mesh = make_mesh()
    style = tp.PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    module = tp.parallelize_module(Spy(), mesh, style)
    with pytest.raises(ValueError, match="module inputs and input_layouts should have same length!"):
        module(numbers(2), numbers(2))
    style = tp.PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
    module = tp.parallelize_module(Spy(), mesh, style)
    with pytest.raises(ValueError, match="module outputs and output_layouts should have same length!"):
        module(numbers(2), numbers(2))


def test_not_a_tensor(tp: Any) -> None:
    style = tp.PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    module = tp.parallelize_module(Spy(), make_mesh(), style)
    with pytest.raises(AssertionError, match=r"expecting input to be a torch\.Tensor!"):
        module("word")


def test_nothing_becomes_a_sum(tp: Any) -> None:
    """Copies and shards can't be asked for as terms of a sum: said by the style, the plan or the call."""
    mesh = make_mesh()

    def run(module: nn.Module, make: Callable[..., Any], **layouts: Any) -> None:
        tp.parallelize_module(module, mesh, make(**layouts))(numbers(2, 8))

    # From torch 2.14 on torch's own makes addends of shards, with zeros in the place of the other parts.
    makes_addends = tp is not weft_tp and release_of(torch.__version__) not in ("2.11", "2.12", "2.13")
    for given in (Replicate(),) if makes_addends else (Replicate(), Shard(0)):
        with pytest.raises(RuntimeError, match="Partial"):
            run(Spy(), tp.PrepareModuleInput, input_layouts=given, desired_input_layouts=Partial())
        with pytest.raises(RuntimeError, match="Partial"):
            run(Spy(), tp.PrepareModuleOutput, output_layouts=given, desired_output_layouts=Partial())
    if makes_addends:
        return
    with pytest.raises(RuntimeError, match="Partial"):
        run(filled(nn.Linear(8, 8)), tp.ColwiseParallel, output_layouts=Partial())


@ON_FOUR
def test_both_in_one(tp: Any) -> None:
    """An MLP that is given copies and gives copies, and cuts the rows in between."""
    for is_local in (True, False):
        style = tp.PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Shard(0),
            use_local_input=is_local,
            output_layouts=Shard(0),
            desired_output_layouts=Replicate(),
            use_local_output=is_local,
        )
        twin = Twin(tp, filled(MLP()), make_mesh(), {"": style, **gathering_plan(tp)})
        twin.run(numbers(4, 8), Replicate(), Replicate(), is_local)


def test_around_a_module_that_does_not_know(tp: Any) -> None:
    """Gathered for a module without a plan, and dealt out again; its parameters' gradients are whole."""
    mesh = make_mesh()
    module = filled(nn.Linear(8, 6))
    style = tp.PrepareModuleInputOutput(
        input_layouts=Shard(0),
        desired_input_layouts=Replicate(),
        use_local_input=True,
        output_layouts=Replicate(),
        desired_output_layouts=Shard(0),
    )
    twin = Twin(tp, module, mesh, style)
    twin.run(numbers(8, 8), Shard(0), Shard(0))


@run_on()
@pytest.mark.parametrize("library", ["weft", "torch"])
def test_reprs(tp: Any) -> None:
    """As torch writes them."""
    assert repr(tp.PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())) == (
        "PrepareModuleInput(input_layouts=(Shard(dim=0),), desired_input_layouts=(Replicate(),), "
        "input_kwarg_layouts={}, desired_input_kwarg_layouts={}, use_local_output=False)"
    )
    assert repr(tp.PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())) == (
        "PrepareModuleOutput(output_layouts=(Shard(dim=0),), desired_output_layouts=(Replicate(),), "
        "use_local_output=True)"
    )


@run_on(threads=4)
@run_on(gloo=2, full=True)
@run_on(gpu=2, timeout=90, collective_timeout=20)
def test_gathered_from_uneven_parts(tp: Any) -> None:
    """Weft's alone: rows that don't divide, ranks without any."""
    mesh = make_mesh()
    for rows in range(1, 2 * mesh.size() + 1):
        for is_local in (True, False):
            full, cotangent = numbers(rows, 3), numbers(rows, 3, seed=7)
            style = tp.PrepareModuleInput(
                input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=is_local
            )
            mine = local_input(full, Shard(0), mesh)
            seen = tp.parallelize_module(nn.Identity(), mesh, style)(mine)
            assert seen.shape == full.shape
            local = seen if is_local else seen.to_local()
            assert torch.equal(local.detach(), full)
            local.backward(cotangent)
            assert torch.equal(mine.grad, part_of(cotangent, Shard(0), mesh))
            assert torch.equal(whole_of(mine.grad, Shard(0), mesh), cotangent)

"""Plans: which modules a name means, what is refused, whose values are taken; nothing is half done."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import weft
from tests.ranks import run_on
from tests.tensor_parallel.models import MLP, Language, Stacked, gathering_plan, language_plan, mlp_plan
from tests.tensor_parallel.twins import (
    Twin,
    assert_same_parameters,
    filled,
    full_of,
    make_mesh,
    numbers,
    tokens,
    unchanged,
)

pytest_plugins = ["tests.tensor_parallel.libraries"]
pytestmark = [
    run_on(threads=2, library=["weft"]),
    run_on(gloo=2, library=["weft"], full=True),
]
TORCH_TOO = run_on(threads=2, library=["torch"], full=True, also=True)


@contextmanager
def warned() -> Generator[list[str]]:
    """The texts of UserWarnings. Threads share the filters: in a world of one only."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
        texts += [str(each.message) for each in caught if issubclass(each.category, UserWarning)]


def is_parallel(module: nn.Module) -> bool:
    return all(isinstance(param, DTensor) for param in module.parameters())


@TORCH_TOO
def test_nested_names(tp: Any) -> None:
    plan = {**mlp_plan(tp, "layers.0."), **mlp_plan(tp, "layers.1.")}
    twin = Twin(tp, filled(Stacked()), make_mesh(), plan)
    twin.run(numbers(4, 8), Replicate(), Replicate())
    assert is_parallel(twin.parallel)


WILDCARDS = ["net?", "net*", "net[12]", "net[1-2]", "*", "?et?", "*[0-9]", "[mn]et*"]


@TORCH_TOO
def test_wildcards(tp: Any) -> None:
    """Signs, sets and ranges, in any place of a name."""
    for name in WILDCARDS:
        plan = {name: tp.ColwiseParallel(output_layouts=Replicate())}
        twin = Twin(tp, filled(MLP()), make_mesh(), plan)
        twin.run(numbers(4, 8), Replicate(), Replicate())
        assert is_parallel(twin.parallel), name


@TORCH_TOO
def test_wildcards_in_the_middle(tp: Any) -> None:
    for first in ("layers.*.", "layers.[0-9].", "lay*.?.", "*.*."):
        twin = Twin(tp, filled(Stacked()), make_mesh(), mlp_plan(tp, first))
        twin.run(numbers(4, 8), Replicate(), Replicate())
        assert is_parallel(twin.parallel), first
    twin = Twin(tp, filled(Stacked(3)), make_mesh(), mlp_plan(tp, "layers.[!1]."))
    assert [is_parallel(layer) for layer in twin.parallel.layers] == [True, False, True]
    twin.run(numbers(4, 8), Replicate(), Replicate())


@TORCH_TOO
def test_a_star_stays_within_one_name(tp: Any) -> None:
    """It matches no dot: `layers.*` are the layers, not what is in them."""

    class Note(tp.ParallelStyle):
        def __init__(self) -> None:
            self.seen: list[nn.Module] = []

        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            self.seen.append(module)
            return module

    model, note = Stacked(), Note()
    tp.parallelize_module(model, make_mesh(), {"layers.*": note})
    assert note.seen == list(model.layers)


@TORCH_TOO
def test_the_root(tp: Any) -> None:
    """An empty name is the module itself; a style instead of a dict too."""
    style = tp.PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Shard(0),
        use_local_input=True,
        output_layouts=Shard(0),
        desired_output_layouts=Replicate(),
    )
    twin = Twin(tp, filled(MLP()), make_mesh(), {"": style, **gathering_plan(tp)})
    twin.run(numbers(4, 8), Replicate(), Replicate())
    for plan in (tp.ColwiseParallel(), {"": tp.ColwiseParallel()}):
        twin = Twin(tp, filled(nn.Linear(8, 12)), make_mesh(), plan)
        twin.run(numbers(4, 8), Replicate(), Shard(-1))


@TORCH_TOO
def test_under_a_mesh(tp: Any) -> None:
    """The mesh of a `with` is taken where none is given."""
    module = filled(nn.Linear(8, 12))
    mesh = make_mesh()
    with mesh:
        tp.parallelize_module(module, parallelize_plan=tp.ColwiseParallel())
    assert module.weight.device_mesh == mesh
    assert module.weight.placements == (Shard(0),)


@run_on(threads=4, library=["weft"])
@run_on(threads=4, library=["torch"], full=True)
@run_on(weft=4, gloo=4, library=["weft"], full=True)
def test_an_axis_of_a_mesh(tp: Any) -> None:
    """On four ranks: two groups, each with a whole of its own."""
    mesh = make_mesh(2, 2, names="dp tp")
    twin = Twin(tp, filled(MLP()), mesh["tp"], mlp_plan(tp))
    twin.run(numbers(4, 8), Replicate(), Replicate())
    assert twin.parallel.net1.weight.device_mesh == mesh["tp"]
    twin = Twin(tp, filled(MLP()), mesh["dp"], mlp_plan(tp), src_data_rank=0)
    twin.run(numbers(4, 8), Replicate(), Replicate())


@TORCH_TOO
def test_one_after_another(tp: Any) -> None:
    """Several calls, each for a part."""
    mesh, model = make_mesh(), filled(MLP())
    single = filled(MLP())
    tp.parallelize_module(model.net1, mesh, tp.ColwiseParallel())
    tp.parallelize_module(model, mesh, {"net2": tp.RowwiseParallel()})
    assert_same_parameters(model, single, 0.0)
    assert torch.allclose(model(numbers(3, 8)), single(numbers(3, 8)))


@TORCH_TOO
def test_one_style_for_many(tp: Any) -> None:
    """A style object that is used in several places and in several calls keeps nothing of them."""
    row, col = tp.RowwiseParallel(input_layouts=Replicate()), tp.ColwiseParallel(output_layouts=Replicate())
    for _ in range(2):
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        twin = Twin(tp, filled(model), make_mesh(), {"0": row, "1": row, "2": col, "3": row})
        twin.run(tokens(4, 4, vocabulary=16), Replicate(), Replicate())


@TORCH_TOO
def test_a_plan_of_another_type(tp: Any) -> None:
    text = r"Expect Union\[ParallelStyle, Dict\[str, ParallelStyle\]\] for parallelize_plan"
    for plan in (["net1"], "net1", 3, tp.ColwiseParallel):
        model = filled(MLP())
        with unchanged(model), pytest.raises(TypeError, match=text):
            tp.parallelize_module(model, make_mesh(), plan)


@TORCH_TOO
def test_source_ranks(tp: Any) -> None:
    """Values are those of the source rank; without one everybody's own, and nothing is sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = make_mesh()
    for source in range(size):
        model = filled(MLP(), seed=rank)
        tp.parallelize_module(model, mesh, mlp_plan(tp), src_data_rank=source)
        assert_same_parameters(model, filled(MLP(), seed=source), 0.0)
    model, right = filled(MLP(), seed=rank), [filled(MLP(), seed=each) for each in range(size)]
    with weft.record() as events:
        tp.parallelize_module(model, mesh, mlp_plan(tp), src_data_rank=None)
    assert events == []
    rows = model.net1.weight.to_local()
    assert torch.equal(rows, right[rank].net1.weight.chunk(size, 0)[rank])
    assert torch.equal(model.net2.bias.to_local(), right[rank].net2.bias)


@TORCH_TOO
def test_source_rank_of_a_single_style(tp: Any) -> None:
    rank = dist.get_rank()
    model = filled(nn.Linear(8, 8), seed=rank)
    tp.parallelize_module(model, make_mesh(), tp.RowwiseParallel(), src_data_rank=1)
    assert_same_parameters(model, filled(nn.Linear(8, 8), seed=1), 0.0)


# Where torch does otherwise, or nothing.


def test_source_ranks_reach_the_root(tp: Any) -> None:
    """torch forgets it there."""
    model = filled(nn.Linear(8, 8), seed=dist.get_rank())
    tp.parallelize_module(model, make_mesh(), {"": tp.ColwiseParallel()}, src_data_rank=1)
    assert_same_parameters(model, filled(nn.Linear(8, 8), seed=1), 0.0)


@run_on(threads=4)
@run_on(weft=4, gloo=4, full=True)
def test_source_ranks_in_a_part_of_the_world(tp: Any) -> None:
    """On four ranks: the source is counted within the mesh's axis."""
    mesh = make_mesh(2, 2, names="dp tp")
    for axis in ("dp", "tp"):
        for source in (0, 1):
            model = filled(MLP(), seed=mesh.get_local_rank(axis))
            tp.parallelize_module(model, mesh[axis], mlp_plan(tp), src_data_rank=source)
            assert_same_parameters(model, filled(MLP(), seed=source), 0.0)


def test_strict_refuses(tp: Any) -> None:
    """Names without a module are an error that says which were near, and nothing was changed."""
    for name in ("net3", "net1.weight", "layers.0.net1", "nte1", "", "net1."):
        model = filled(MLP())
        plan: dict[str, Any] = {"net1": tp.ColwiseParallel(), "net2": tp.RowwiseParallel()}
        if name != "":
            plan[name] = tp.ColwiseParallel()
        if name == "":
            tp.parallelize_module(model, make_mesh(), plan, strict=True)
            continue
        with unchanged(model), pytest.raises(weft.ConfigError) as caught:
            tp.parallelize_module(model, make_mesh(), plan, strict=True)
        assert name in str(caught.value)
        if name in ("net3", "nte1"):
            assert "net1" in str(caught.value)


def test_bad_entries_change_nothing(tp: Any) -> None:
    """The whole plan is looked at before the first parameter changes, wherever the bad one stands."""
    good = {"layers.0.net1": tp.ColwiseParallel()}
    bad: list[tuple[type[Exception], dict[Any, Any]]] = [
        (NotImplementedError, {"layers.1": tp.ColwiseParallel()}),
        (NotImplementedError, {"": tp.RowwiseParallel()}),
        (TypeError, {"layers.1.net1": "colwise"}),
        (TypeError, {"layers.1.net1": None}),
        (TypeError, {"layers.1.net1": tp.ColwiseParallel}),
        (TypeError, {3: tp.ColwiseParallel()}),
    ]
    for error, entry in bad:
        for plan in ({**good, **entry}, {**entry, **good}):
            model = filled(Stacked())
            with unchanged(model), pytest.raises(error):
                tp.parallelize_module(model, make_mesh(), plan)


def test_two_styles_for_one_module(tp: Any) -> None:
    """In one plan or in two calls: refused, and the error names the module."""
    pairs = [
        {"net1": tp.ColwiseParallel(), "net?": tp.RowwiseParallel()},
        {"net*": tp.ColwiseParallel(), "net2": tp.ColwiseParallel()},
        {"net1": tp.ColwiseParallel(), "*1": tp.SequenceParallel()},
    ]
    for plan in pairs:
        model = filled(MLP())
        with unchanged(model), pytest.raises(weft.ConfigError, match=r"net[12]"):
            tp.parallelize_module(model, make_mesh(), plan)
    model = filled(MLP())
    tp.parallelize_module(model, make_mesh(), {"net1": tp.ColwiseParallel()})
    before = dict(model.named_parameters())
    for style in (tp.ColwiseParallel(), tp.RowwiseParallel(), tp.SequenceParallel()):
        with pytest.raises(weft.ConfigError, match="net1"):
            tp.parallelize_module(model, make_mesh(), {"net1": style})
    assert all(param is before[name] for name, param in model.named_parameters())


def test_preparing_beside_a_style(tp: Any) -> None:
    """PrepareModule* goes with any other style on one module."""
    model = filled(nn.Linear(8, 12))
    twin = Twin(tp, model, make_mesh(), tp.ColwiseParallel())
    prepare = tp.PrepareModuleInput(
        input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True
    )
    tp.parallelize_module(model, make_mesh(), prepare)
    twin.run(numbers(8, 8), Shard(0), Shard(-1))


@run_on(threads=4)
@run_on(weft=4, gloo=4, full=True)
def test_a_mesh_of_two_axes_is_refused(tp: Any) -> None:
    model = filled(MLP())
    with unchanged(model), pytest.raises(weft.ConfigError, match=r"1-?D|one axis"):
        tp.parallelize_module(model, make_mesh(2, 2, names="dp tp"), mlp_plan(tp))


def test_no_mesh_is_refused(tp: Any) -> None:
    model = filled(MLP())
    with unchanged(model), pytest.raises((RuntimeError, weft.ConfigError), match="mesh"):
        tp.parallelize_module(model, parallelize_plan=mlp_plan(tp))


def test_bad_layouts_are_refused(tp: Any) -> None:
    """As the style is made, or at the call: never later."""
    for make in (tp.ColwiseParallel, tp.RowwiseParallel):
        for layout in ("Shard(0)", 0, (Shard(0),), Shard):
            with pytest.raises((TypeError, ValueError)):
                tp.parallelize_module(filled(nn.Linear(8, 8)), make_mesh(), make(input_layouts=layout))


def test_bad_source_ranks_are_refused(tp: Any) -> None:
    for source in (-1, dist.get_world_size(), "0"):
        model = filled(MLP())
        with unchanged(model), pytest.raises(weft.ConfigError):
            tp.parallelize_module(model, make_mesh(), mlp_plan(tp), src_data_rank=source)


def test_a_shared_module_is_done_once(tp: Any) -> None:
    """One module under two names that one plan names both is one module."""
    layer = nn.Linear(8, 8)
    model = filled(nn.Sequential(layer, nn.Tanh(), layer))
    plan = {"[02]": tp.ColwiseParallel(output_layouts=Replicate())}
    twin = Twin(tp, model, make_mesh(), plan)
    assert twin.parallel[0] is twin.parallel[2]
    twin.run(numbers(4, 8), Replicate(), Replicate())


def test_a_whole_language_model(tp: Any) -> None:
    twin = Twin(tp, Language(blocks=2), make_mesh(), language_plan(tp), strict=True)
    twin.run(tokens(3, 5, vocabulary=12), Replicate(), Replicate())
    kinds = {name: isinstance(param, DTensor) for name, param in twin.parallel.named_parameters()}
    assert {name.rsplit(".", 2)[-2] for name, is_split in kinds.items() if not is_split} == {
        "norm1",
        "norm2",
        "norm",
    }
    assert full_of(twin.parallel.head.weight).shape == (12, 8)


# Names that mean nothing


def texts_of(tp: Any, module: nn.Module, plan: Any) -> list[str]:
    with warned() as texts:
        assert tp.parallelize_module(module, make_mesh(), plan) is module
    return texts


@run_on(threads=1, library=["weft"])
@run_on(threads=1, library=["torch"], full=True)
def test_a_name_without_a_module_is_a_warning_and_the_rest_is_done(tp: Any) -> None:
    model = MLP()
    plan = {"net0.hello.world": tp.ColwiseParallel(), **mlp_plan(tp), "net3": tp.ColwiseParallel()}
    texts = texts_of(tp, model, plan)
    assert len(texts) == 2
    assert "Parallelize plan key 'net0.hello.world' could not be resolved" in texts[0]
    assert "Parallelize plan key 'net3' could not be resolved" in texts[1]
    assert all("skipping this plan entry" in text for text in texts)
    assert is_parallel(model)


@run_on(threads=1)
def test_the_warning_names_what_is_near(tp: Any) -> None:
    (text,) = texts_of(tp, Stacked(), {"layers.0.nte1": tp.ColwiseParallel()})
    assert "'layers.0.nte1'" in text
    assert "layers.0.net1" in text
    (text,) = texts_of(tp, MLP(), {"nett1": tp.ColwiseParallel()})
    assert "net1" in text.replace("nett1", "")


@run_on(threads=1)
def test_nothing_near_is_a_warning_too(tp: Any) -> None:
    (text,) = texts_of(tp, MLP(), {"completely_different": tp.ColwiseParallel()})
    assert "'completely_different'" in text


@run_on(threads=1)
@pytest.mark.parametrize("name", ["layers.7.net1", "layers.*.attention", "layers.0.net1.weight", "layer.0"])
def test_a_part_that_matches_is_not_enough(tp: Any, name: str) -> None:
    model = Stacked()
    (text,) = texts_of(tp, model, {name: tp.ColwiseParallel()})
    assert f"'{name}'" in text
    assert not any(is_parallel(layer) for layer in model.layers)


@run_on(threads=1, library=["weft"])
@run_on(threads=1, library=["torch"], full=True)
def test_no_plan_is_a_warning(tp: Any) -> None:
    (text,) = texts_of(tp, MLP(), None)
    assert "No parallelize_plan is provided" in text
    assert "will do nothing" in text


@run_on(threads=1)
def test_a_plan_without_entries_says_nothing(tp: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = MLP()
        assert tp.parallelize_module(model, make_mesh(), {}) is model
        assert tp.parallelize_module(model, make_mesh(), {}, strict=True) is model


@run_on(threads=1)
def test_names_that_match_say_nothing(tp: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tp.parallelize_module(Stacked(), make_mesh(), mlp_plan(tp, "layers.*."), strict=True)


@run_on(threads=1)
def test_strict_names_every_bad_name(tp: Any) -> None:
    plan = {"net3": tp.ColwiseParallel(), "net4": tp.ColwiseParallel()}
    with pytest.raises(ValueError, match="net3"):
        tp.parallelize_module(MLP(), make_mesh(), plan, strict=True)

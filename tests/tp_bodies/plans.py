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
from tests.tp_bodies.models import MLP, Language, Stacked, gathering_plan, language_plan, mlp_plan
from tests.tp_bodies.twins import Twin, assert_same_parameters, filled, full_of, make_mesh, numbers, tokens


@contextmanager
def unchanged(module: nn.Module) -> Generator[None]:
    """Parameters, buffers and hooks are the same objects behind the block; values too."""

    def see() -> list[Any]:
        hooks = [
            (id(each), len(each._forward_hooks), len(each._forward_pre_hooks), each.forward.__func__)
            for each in module.modules()
        ]
        return [[(name, id(param)) for name, param in module.named_parameters()], hooks]

    before, values = see(), [param.detach().clone() for param in module.parameters()]
    yield
    assert see() == before
    for param, value in zip(module.parameters(), values, strict=True):
        assert type(param.data) is torch.Tensor
        assert torch.equal(param, value)


@contextmanager
def warned() -> Generator[list[str]]:
    """The texts of UserWarnings; threads share the filters, so ranks must not use this at the same time."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
        texts += [str(each.message) for each in caught if issubclass(each.category, UserWarning)]


def is_parallel(module: nn.Module) -> bool:
    return all(isinstance(param, DTensor) for param in module.parameters())


def nested_names(tp: Any) -> None:
    plan = {**mlp_plan(tp, "layers.0."), **mlp_plan(tp, "layers.1.")}
    twin = Twin(tp, filled(Stacked()), make_mesh(), plan)
    twin.run(numbers(4, 8), Replicate(), Replicate())
    assert is_parallel(twin.parallel)


WILDCARDS = ["net?", "net*", "net[12]", "net[1-2]", "*", "?et?", "*[0-9]", "[mn]et*"]


def wildcards(tp: Any) -> None:
    """Signs, sets and ranges, in any place of a name."""
    for name in WILDCARDS:
        plan = {name: tp.ColwiseParallel(output_layouts=Replicate())}
        twin = Twin(tp, filled(MLP()), make_mesh(), plan)
        twin.run(numbers(4, 8), Replicate(), Replicate())
        assert is_parallel(twin.parallel), name


def wildcards_in_the_middle(tp: Any) -> None:
    for first in ("layers.*.", "layers.[0-9].", "lay*.?.", "*.*."):
        twin = Twin(tp, filled(Stacked()), make_mesh(), mlp_plan(tp, first))
        twin.run(numbers(4, 8), Replicate(), Replicate())
        assert is_parallel(twin.parallel), first
    twin = Twin(tp, filled(Stacked(3)), make_mesh(), mlp_plan(tp, "layers.[!1]."))
    assert [is_parallel(layer) for layer in twin.parallel.layers] == [True, False, True]
    twin.run(numbers(4, 8), Replicate(), Replicate())


def a_star_stays_within_one_name(tp: Any) -> None:
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


def the_root(tp: Any) -> None:
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


def under_a_mesh(tp: Any) -> None:
    """The mesh of a `with` is taken where none is given."""
    module = filled(nn.Linear(8, 12))
    mesh = make_mesh()
    with mesh:
        tp.parallelize_module(module, parallelize_plan=tp.ColwiseParallel())
    assert module.weight.device_mesh == mesh
    assert module.weight.placements == (Shard(0),)


def an_axis_of_a_mesh(tp: Any) -> None:
    """On four ranks: two groups, each with a whole of its own."""
    mesh = make_mesh(2, 2, names="dp tp")
    twin = Twin(tp, filled(MLP()), mesh["tp"], mlp_plan(tp))
    twin.run(numbers(4, 8), Replicate(), Replicate())
    assert twin.parallel.net1.weight.device_mesh == mesh["tp"]
    twin = Twin(tp, filled(MLP()), mesh["dp"], mlp_plan(tp), src_data_rank=0)
    twin.run(numbers(4, 8), Replicate(), Replicate())


def one_after_another(tp: Any) -> None:
    """Several calls, each for a part."""
    mesh, model = make_mesh(), filled(MLP())
    single = filled(MLP())
    tp.parallelize_module(model.net1, mesh, tp.ColwiseParallel())
    tp.parallelize_module(model, mesh, {"net2": tp.RowwiseParallel()})
    assert_same_parameters(model, single, 0.0)
    assert torch.allclose(model(numbers(3, 8)), single(numbers(3, 8)))


def one_style_for_many(tp: Any) -> None:
    """A style object that is used in several places and in several calls keeps nothing of them."""
    row, col = tp.RowwiseParallel(input_layouts=Replicate()), tp.ColwiseParallel(output_layouts=Replicate())
    for _ in range(2):
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        twin = Twin(tp, filled(model), make_mesh(), {"0": row, "1": row, "2": col, "3": row})
        twin.run(tokens(4, 4, vocabulary=16), Replicate(), Replicate())


def a_plan_of_another_type(tp: Any) -> None:
    text = r"Expect Union\[ParallelStyle, Dict\[str, ParallelStyle\]\] for parallelize_plan"
    for plan in (["net1"], "net1", 3, tp.ColwiseParallel):
        model = filled(MLP())
        with unchanged(model), pytest.raises(TypeError, match=text):
            tp.parallelize_module(model, make_mesh(), plan)


def source_ranks(tp: Any) -> None:
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


def source_rank_of_a_single_style(tp: Any) -> None:
    rank = dist.get_rank()
    model = filled(nn.Linear(8, 8), seed=rank)
    tp.parallelize_module(model, make_mesh(), tp.RowwiseParallel(), src_data_rank=1)
    assert_same_parameters(model, filled(nn.Linear(8, 8), seed=1), 0.0)


# Where torch does otherwise, or nothing.


def source_ranks_reach_the_root(tp: Any) -> None:
    """torch forgets it there."""
    model = filled(nn.Linear(8, 8), seed=dist.get_rank())
    tp.parallelize_module(model, make_mesh(), {"": tp.ColwiseParallel()}, src_data_rank=1)
    assert_same_parameters(model, filled(nn.Linear(8, 8), seed=1), 0.0)


def source_ranks_in_a_part_of_the_world(tp: Any) -> None:
    """On four ranks: the source is counted within the mesh's axis."""
    mesh = make_mesh(2, 2, names="dp tp")
    for axis in ("dp", "tp"):
        for source in (0, 1):
            model = filled(MLP(), seed=mesh.get_local_rank(axis))
            tp.parallelize_module(model, mesh[axis], mlp_plan(tp), src_data_rank=source)
            assert_same_parameters(model, filled(MLP(), seed=source), 0.0)


def strict_refuses(tp: Any) -> None:
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


def bad_entries_change_nothing(tp: Any) -> None:
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


def two_styles_for_one_module(tp: Any) -> None:
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


def preparing_beside_a_style(tp: Any) -> None:
    """PrepareModule* goes with any other style on one module."""
    model = filled(nn.Linear(8, 12))
    twin = Twin(tp, model, make_mesh(), tp.ColwiseParallel())
    prepare = tp.PrepareModuleInput(
        input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True
    )
    tp.parallelize_module(model, make_mesh(), prepare)
    twin.run(numbers(8, 8), Shard(0), Shard(-1))


def a_mesh_of_two_axes_is_refused(tp: Any) -> None:
    model = filled(MLP())
    with unchanged(model), pytest.raises(weft.ConfigError, match=r"1-?D|one axis"):
        tp.parallelize_module(model, make_mesh(2, 2, names="dp tp"), mlp_plan(tp))


def no_mesh_is_refused(tp: Any) -> None:
    model = filled(MLP())
    with unchanged(model), pytest.raises((RuntimeError, weft.ConfigError), match="mesh"):
        tp.parallelize_module(model, parallelize_plan=mlp_plan(tp))


def bad_layouts_are_refused(tp: Any) -> None:
    """As the style is made, or at the call: never later."""
    for make in (tp.ColwiseParallel, tp.RowwiseParallel):
        for layout in ("Shard(0)", 0, (Shard(0),), Shard):
            with pytest.raises((TypeError, ValueError)):
                tp.parallelize_module(filled(nn.Linear(8, 8)), make_mesh(), make(input_layouts=layout))


def bad_source_ranks_are_refused(tp: Any) -> None:
    for source in (-1, dist.get_world_size(), "0"):
        model = filled(MLP())
        with unchanged(model), pytest.raises(weft.ConfigError):
            tp.parallelize_module(model, make_mesh(), mlp_plan(tp), src_data_rank=source)


def a_shared_module_is_done_once(tp: Any) -> None:
    """One module under two names that one plan names both is one module."""
    layer = nn.Linear(8, 8)
    model = filled(nn.Sequential(layer, nn.Tanh(), layer))
    plan = {"[02]": tp.ColwiseParallel(output_layouts=Replicate())}
    twin = Twin(tp, model, make_mesh(), plan)
    assert twin.parallel[0] is twin.parallel[2]
    twin.run(numbers(4, 8), Replicate(), Replicate())


def a_whole_language_model(tp: Any) -> None:
    twin = Twin(tp, Language(blocks=2), make_mesh(), language_plan(tp), strict=True)
    twin.run(tokens(3, 5, vocabulary=12), Replicate(), Replicate())
    kinds = {name: isinstance(param, DTensor) for name, param in twin.parallel.named_parameters()}
    assert {name.rsplit(".", 2)[-2] for name, is_split in kinds.items() if not is_split} == {
        "norm1",
        "norm2",
        "norm",
    }
    assert full_of(twin.parallel.head.weight).shape == (12, 8)


BODIES = [
    nested_names,
    wildcards,
    wildcards_in_the_middle,
    a_star_stays_within_one_name,
    the_root,
    under_a_mesh,
    one_after_another,
    one_style_for_many,
    source_ranks,
    source_rank_of_a_single_style,
    a_plan_of_another_type,
]
ON_FOUR = [an_axis_of_a_mesh]
WEFT_ONLY = [
    source_ranks_reach_the_root,
    strict_refuses,
    bad_entries_change_nothing,
    two_styles_for_one_module,
    preparing_beside_a_style,
    no_mesh_is_refused,
    bad_layouts_are_refused,
    bad_source_ranks_are_refused,
    a_shared_module_is_done_once,
    a_whole_language_model,
]
WEFT_ONLY_ON_FOUR = [source_ranks_in_a_part_of_the_world, a_mesh_of_two_axes_is_refused]

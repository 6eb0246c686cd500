"""Sizes that don't divide by the ranks: features, vocabulary, rows, sequence; ranks with nothing at all.

torch does not get these right with local tensors, so only a single process is asked.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

import weft
from tests.ranks import run_on
from tests.tensor_parallel.models import MLP, Language, language_plan, mlp_plan, sequence_plan
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
    sgd_of,
    tokens,
    whole_of,
)

pytest_plugins = ["tests.tensor_parallel.libraries"]
pytestmark = [
    run_on(threads=4),
    run_on(threads=2, gloo=4, full=True),
    run_on(gpu=4, timeout=90, collective_timeout=20),
]

SIZES = (1, 2, 3, 5, 7)


def test_colwise_features(tp: Any) -> None:
    for height in SIZES:
        for is_local in (True, False):
            for output in ("S-1", "R", "S0"):
                plan = tp.ColwiseParallel(output_layouts=LAYOUTS[output], use_local_output=is_local)
                twin = Twin(tp, filled(nn.Linear(4, height)), make_mesh(), plan)
                twin.run(numbers(3, 2, 4), Replicate(), LAYOUTS[output], is_local)


def test_rowwise_features(tp: Any) -> None:
    for width in SIZES:
        for is_local in (True, False):
            for given, output in (("S-1", "R"), ("R", "R"), ("S-1", "S0"), ("S0", "S1"), ("S-1", "S-1")):
                plan = tp.RowwiseParallel(
                    input_layouts=LAYOUTS[given],
                    output_layouts=LAYOUTS[output],
                    use_local_output=is_local,
                )
                twin = Twin(tp, filled(nn.Linear(width, 5)), make_mesh(), plan)
                twin.run(numbers(3, 2, width), LAYOUTS[given], LAYOUTS[output], is_local)


def test_vocabularies(tp: Any) -> None:
    for vocabulary in SIZES:
        words = tokens(3, 5, vocabulary=vocabulary)
        for output in ("R", "S0", "S1", "S-1"):
            plan = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=LAYOUTS[output])
            twin = Twin(tp, filled(nn.Embedding(vocabulary, 3, padding_idx=0)), make_mesh(), plan)
            twin.run(words, Replicate(), LAYOUTS[output])


def test_embedding_widths(tp: Any) -> None:
    words = tokens(3, 5, vocabulary=6)
    for width in SIZES:
        for output in ("S-1", "R", "S0", "S1"):
            plan = tp.ColwiseParallel(output_layouts=LAYOUTS[output])
            twin = Twin(tp, filled(nn.Embedding(6, width)), make_mesh(), plan)
            twin.run(words, Replicate(), LAYOUTS[output])


def test_tokens_that_are_cut(tp: Any) -> None:
    for length in SIZES:
        words = tokens(2, length, vocabulary=7)
        for style in (tp.RowwiseParallel, tp.ColwiseParallel):
            plan = style(input_layouts=Shard(1), output_layouts=Shard(1))
            twin = Twin(tp, filled(nn.Embedding(7, 3)), make_mesh(), plan)
            twin.run(words, Shard(1), Shard(1))


def test_sequences(tp: Any) -> None:
    """A norm on cut sequences, and layers that gather them and deal them out."""
    for length in SIZES:
        full = numbers(2, length, 4)
        for is_local in (True, False):
            plan: Any = tp.SequenceParallel(use_local_output=is_local)
            twin = Twin(tp, filled(nn.LayerNorm(4)), make_mesh(), plan)
            twin.run(full, Shard(1), Shard(1), is_local)
            twin.run(full, Replicate(), Shard(1), is_local, has_dtensor_input=True)
        plan = {
            "net1": tp.ColwiseParallel(input_layouts=Shard(1)),
            "net2": tp.RowwiseParallel(output_layouts=Shard(1)),
        }
        twin = Twin(tp, filled(MLP(4, 5)), make_mesh(), plan)
        twin.run(full, Shard(1), Shard(1))


def test_rows(tp: Any) -> None:
    for num_rows in (0, *SIZES):
        plan = {
            "net1": tp.ColwiseParallel(input_layouts=Shard(0)),
            "net2": tp.RowwiseParallel(output_layouts=Shard(0)),
        }
        twin = Twin(tp, filled(MLP(4, 6)), make_mesh(), plan)
        twin.run(numbers(num_rows, 4), Shard(0), Shard(0))


def test_columns_into_rows(tp: Any) -> None:
    """The pair of an MLP, hidden features uneven: what one gives the other takes, locally and as DTensors."""
    for hidden in SIZES:
        for is_local in (True, False):
            plan = {"net1": tp.ColwiseParallel(use_local_output=is_local), "net2": tp.RowwiseParallel()}
            twin = Twin(tp, filled(MLP(4, hidden)), make_mesh(), plan)
            twin.run(numbers(3, 4), Replicate(), Replicate())


def test_columns_that_are_cut_input(tp: Any) -> None:
    """Colwise of features that lie cut: gathered first."""
    for width in SIZES:
        plan = tp.ColwiseParallel(input_layouts=Shard(-1))
        twin = Twin(tp, filled(nn.Linear(width, 5)), make_mesh(), plan)
        twin.run(numbers(3, width), Shard(-1), Shard(-1))


def test_language(tp: Any) -> None:
    """Vocabulary, sequence and rows at once, trained for some steps."""
    for plan in (language_plan(tp), sequence_plan(tp)):
        for vocabulary, length in ((11, 5), (3, 1), (13, 7)):
            twin = Twin(tp, Language(vocabulary), make_mesh(), plan)
            for step in range(2):
                twin.zero()
                words = tokens(3, length, vocabulary=vocabulary, seed=step)
                twin.run(words, Replicate(), Replicate())
                for each in (twin.parallel, twin.single):
                    sgd_of(each, lr=0.1).step()


def test_what_each_rank_holds(tp: Any) -> None:
    """As torch.chunk cuts, which checkpoints and other libraries rely on."""
    mesh, rank = make_mesh(), dist.get_rank()
    twin = Twin(tp, filled(MLP(4, 5)), mesh, mlp_plan(tp))
    model = twin.parallel
    for param, dim in ((model.net1.weight, 0), (model.net1.bias, 0), (model.net2.weight, 1)):
        assert param.shape[dim] == 5
        held = part_of(numbers(*param.shape), Shard(dim), mesh)
        assert param.to_local().shape == held.shape
    assert len(numbers(5).chunk(mesh.size())) > rank or model.net1.weight.to_local().numel() == 0


def test_optimizers_on_uneven_parts(tp: Any) -> None:
    twin = Twin(tp, filled(MLP(4, 5)), make_mesh(), mlp_plan(tp))
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (twin.parallel, twin.single)]
    for step in range(4):
        twin.zero()
        twin.run(numbers(3, 4, seed=step), Replicate(), Replicate())
        for optimizer in optimizers:
            optimizer.step()


def test_wrong_sizes_are_named(tp: Any) -> None:
    """Every rank's input is wrong: each says which module, which rank and which sizes."""
    mesh, rank = make_mesh(), dist.get_rank()
    model = tp.parallelize_module(filled(MLP(8, 10)), mesh, mlp_plan(tp))
    fits = part_of(numbers(3, 10), Shard(1), mesh).shape[1]
    for wrong in (10, fits + 1):
        with pytest.raises(weft.WeftError) as caught:
            model.net2(numbers(3, wrong))
        text = str(caught.value)
        assert "net2" in text
        assert f"rank {rank}" in text
        assert str(wrong) in text
        assert str(fits) in text
    with pytest.raises(weft.WeftError) as caught:
        model.net1(numbers(3, 7))
    for part in ("net1", f"rank {rank}", "7", "8"):
        assert part in str(caught.value)
    assert model(numbers(3, 8)).shape == (3, 8)  # goes on


@run_on()
@pytest.mark.threads
def test_the_rank_whose_input_is_wrong_is_named(tp: Any) -> None:
    """The last rank's columns are one short: it says so, and no rank waits forever."""

    def body() -> None:
        mesh = make_mesh()
        model = tp.parallelize_module(filled(MLP(8, 12)), mesh, mlp_plan(tp))
        mine = part_of(numbers(3, 12), Shard(1), mesh)
        is_last = dist.get_rank() == dist.get_world_size() - 1
        model.net2(mine[:, 1:] if is_last else mine)

    with pytest.raises(weft.LaunchError) as caught:
        weft.launch(body, ranks=4, kind="thread", timeout=30, collective_timeout=10)
    report = caught.value.failures[3]
    (line,) = {line for line in report.splitlines() if "Error:" in line and "net2" in line}
    assert "rank 3" in line
    assert {"2", "3"} <= set(re.findall(r"\d+", line.replace("rank 3", "").replace("net2", "")))


@run_on(threads=2)
def test_oddly_cut_rows_are_right_or_refused(tp: Any) -> None:
    """Rows that are not cut as torch.chunk would: two ranks hold 1 and 3."""
    mesh, rank = make_mesh(), dist.get_rank()
    full = numbers(4, 8)
    mine = full.split([1, 3])[rank].clone().requires_grad_()
    module = filled(nn.Linear(8, 6))
    single = filled(nn.Linear(8, 6))
    tp.parallelize_module(module, mesh, tp.ColwiseParallel(input_layouts=Shard(0)))
    try:
        seen = module(mine)
    except weft.WeftError:
        return
    right = single(full)
    assert_close(whole_of(local_of(seen), Shard(1), mesh), right.detach(), "output")
    right.sum().backward()
    seen.sum().backward()
    assert_same_gradients(module, single)


def test_mixed(tp: Any) -> None:
    """An uneven chain through every layout: cut rows, cut sequence, cut features, copies."""
    chain: list[tuple[str, Placement, Placement]] = [
        ("0", Shard(0), Shard(1)),
        ("1", Shard(1), Shard(2)),
        ("2", Shard(2), Replicate()),
        ("3", Replicate(), Shard(0)),
    ]
    for styles in ("crcr", "rcrc", "cccc", "rrrr"):
        plan = {
            name: (tp.ColwiseParallel if kind == "c" else tp.RowwiseParallel)(
                input_layouts=given, output_layouts=output
            )
            for kind, (name, given, output) in zip(styles, chain, strict=True)
        }
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 2), nn.Linear(2, 3))
        twin = Twin(tp, filled(model), make_mesh(), plan)
        twin.run(numbers(5, 7, 3), Shard(0), Shard(0))

"""DDP and replicate train as torch's do, to the bit on two ranks, and as a single process does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate as torch_replicate

import weft
from tests.data_parallel.cases import FULL, cases
from weft.testing import EXACT, Trace, assert_ranks_agree, assert_same, bare, compare, train
from weft.testing.models import (
    MLP,
    BranchingMLP,
    KitModel,
    NormedMLP,
    SparseBag,
    TiedMLP,
    TinyTransformer,
    make_batches,
)
from weft.testing.pool import shared_pool

TORCH = torch.nn.parallel
STEPS = 4
MODELS: list[type[KitModel]] = [MLP, TiedMLP, TinyTransformer, SparseBag]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bucket_cap_mb": 0.0005},
    {"gradient_as_bucket_view": True},
    {"static_graph": True, "bucket_cap_mb": 0.0005},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005},
]


def body_of(model: type[KitModel], **options: Any) -> Callable[[Any], Trace]:
    def body(library: Any) -> Trace:
        batches = [batch.shard() for batch in make_batches(model(), STEPS)]
        return train(library.DistributedDataParallel(model(), **options), batches)

    return body


@pytest.mark.threads
@pytest.mark.parametrize(
    ("model", "options"),
    cases(MODELS, OPTIONS, everyday=lambda model, options: model is MLP or not options),
)
def test_to_the_bit_as_torch(model: type[KitModel], options: dict[str, Any]) -> None:
    """Two terms have one sum, whatever the order: every bit is the same."""
    compare(body_of(model, **options), TORCH, weft, ranks=2, tolerance=EXACT, single=None)


@pytest.mark.threads
@pytest.mark.parametrize(
    ("model", "options"), cases(MODELS, OPTIONS, everyday=lambda model, options: not options)
)
def test_as_one_process(model: type[KitModel], options: dict[str, Any]) -> None:
    compare(body_of(model, **options), None, weft, ranks=4)


@pytest.mark.threads
@pytest.mark.parametrize("view", [False, True])
def test_batch_norm_to_the_bit_as_torch(view: bool) -> None:
    """Buffers too: every rank has the first one's statistics before each forward."""
    body = body_of(NormedMLP, gradient_as_bucket_view=view)
    compare(body, TORCH, weft, ranks=2, tolerance=EXACT, single=None)


@pytest.mark.threads
def test_unused_parameters_to_the_bit_as_torch() -> None:
    def body(library: Any) -> Trace:
        batches = [batch.shard() for batch in make_batches(BranchingMLP(), STEPS)]
        return train(library.DistributedDataParallel(BranchingMLP(), find_unused_parameters=True), batches)

    compare(body, TORCH, weft, ranks=2, tolerance=EXACT, single=None)
    compare(body, None, weft, ranks=2)


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("backend", ["gloo", "weft"])
@pytest.mark.parametrize("model", [MLP, SparseBag])
def test_on_processes(model: type[KitModel], backend: str) -> None:
    compare(body_of(model), TORCH, weft, ranks=2, kind="process", backend=backend)


@pytest.mark.processes
def test_gloo_and_the_local_group_agree_to_the_bit() -> None:
    body = body_of(MLP, bucket_cap_mb=0.0005)
    on_gloo = shared_pool(2).run(body, args=(weft,), backend="gloo", timeout=60, by_value=True)
    on_weft = shared_pool(2).run(body, args=(weft,), backend="weft", timeout=60, by_value=True)
    for right, seen in zip(on_gloo, on_weft, strict=True):
        assert_same(right, seen, tolerance=EXACT)


# -- replicate ------------------------------------------------------------------------------


TORCH_REPLICATE = SimpleNamespace(replicate=torch_replicate)


def root(library: Any, model: KitModel, **options: Any) -> nn.Module:
    return library.replicate(model, **options)


def children(library: Any, model: KitModel, **options: Any) -> nn.Module:
    for child in model.children():
        if list(child.parameters()) and not isinstance(child, nn.ModuleList):
            library.replicate(child, **options)
        elif isinstance(child, nn.ModuleList):
            for layer in child:
                library.replicate(layer, **options)
    return model


def replicated_body(
    apply: Callable[..., nn.Module], model: type[KitModel], **options: Any
) -> Callable[[Any], Trace]:
    def body(library: Any) -> Trace:
        batches = [batch.shard() for batch in make_batches(model(), STEPS)]
        return train(apply(library, model(), **options), batches)

    return body


@pytest.mark.threads
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=FULL)])
@pytest.mark.parametrize("model", MODELS)
def test_replicate_as_torch_and_as_one_process(model: type[KitModel], ranks: int) -> None:
    body = replicated_body(root, model)
    traces = compare(body, None if model is SparseBag else TORCH_REPLICATE, weft, ranks=ranks)
    assert_ranks_agree(traces)


@pytest.mark.threads
@pytest.mark.parametrize("options", [{"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": True}], ids=str)
def test_replicate_to_the_bit_on_two_ranks(options: dict[str, Any]) -> None:
    body = replicated_body(root, MLP, **options)
    references = weft.launch(body, args=(TORCH_REPLICATE,), ranks=2, kind="thread", timeout=60)
    for right, seen in zip(references, weft.launch(body, args=(weft,), ranks=2, kind="thread"), strict=True):
        assert_same(right, seen, tolerance=EXACT)


@pytest.mark.threads
def test_replicated_children_each_for_themselves() -> None:
    compare(replicated_body(children, MLP), TORCH_REPLICATE, weft, ranks=2, single=bare)


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("backend", ["gloo", "weft"])
def test_replicate_on_processes(backend: str) -> None:
    compare(replicated_body(root, MLP), None, weft, ranks=2, kind="process", backend=backend)

"""DDP trains as torch's does, to the bit on two ranks, and as a single process does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from weft.testing import EXACT, Trace, assert_same, compare, train
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


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("model", [MLP, TiedMLP, TinyTransformer, SparseBag])
def test_to_the_bit_as_torch(model: type[KitModel], options: dict[str, Any]) -> None:
    """Two terms have one sum, whatever the order: every bit is the same."""
    compare(body_of(model, **options), TORCH, weft, ranks=2, tolerance=EXACT, single=None)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("model", [MLP, TiedMLP, TinyTransformer, SparseBag])
def test_as_one_process(model: type[KitModel], options: dict[str, Any]) -> None:
    compare(body_of(model, **options), None, weft, ranks=4)


@pytest.mark.parametrize("view", [False, True])
def test_batch_norm_to_the_bit_as_torch(view: bool) -> None:
    """Buffers too: every rank has the first one's statistics before each forward."""
    body = body_of(NormedMLP, gradient_as_bucket_view=view)
    compare(body, TORCH, weft, ranks=2, tolerance=EXACT, single=None)


def test_unused_parameters_to_the_bit_as_torch() -> None:
    def body(library: Any) -> Trace:
        batches = [batch.shard() for batch in make_batches(BranchingMLP(), STEPS)]
        return train(library.DistributedDataParallel(BranchingMLP(), find_unused_parameters=True), batches)

    compare(body, TORCH, weft, ranks=2, tolerance=EXACT, single=None)
    compare(body, None, weft, ranks=2)


@pytest.mark.parametrize("backend", ["gloo", "weft"])
@pytest.mark.parametrize("model", [MLP, SparseBag])
def test_on_processes(model: type[KitModel], backend: str) -> None:
    compare(body_of(model), TORCH, weft, ranks=2, kind="process", backend=backend)


def test_gloo_and_the_local_group_agree_to_the_bit() -> None:
    body = body_of(MLP, bucket_cap_mb=0.0005)
    on_gloo = shared_pool(2).run(body, args=(weft,), backend="gloo", timeout=60, by_value=True)
    on_weft = shared_pool(2).run(body, args=(weft,), backend="weft", timeout=60, by_value=True)
    for right, seen in zip(on_gloo, on_weft, strict=True):
        assert_same(right, seen, tolerance=EXACT)

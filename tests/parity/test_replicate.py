"""replicate trains as torch's does, to the bit, and as a single process does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed._composable.replicate import replicate as torch_replicate

import weft
from weft.testing import EXACT, Trace, assert_ranks_agree, assert_same, bare, compare, train
from weft.testing.models import MLP, KitModel, SparseBag, TiedMLP, TinyTransformer, make_batches

TORCH = SimpleNamespace(replicate=torch_replicate)
STEPS = 3


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


def body_of(apply: Callable[..., nn.Module], model: type[KitModel], **options: Any) -> Callable[[Any], Trace]:
    def body(library: Any) -> Trace:
        batches = [batch.shard() for batch in make_batches(model(), STEPS)]
        return train(apply(library, model(), **options), batches)

    return body


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", [MLP, TiedMLP, TinyTransformer, SparseBag])
def test_as_torch_and_as_one_process(model: type[KitModel], ranks: int) -> None:
    body = body_of(root, model)
    traces = compare(body, None if model is SparseBag else TORCH, weft, ranks=ranks)
    assert_ranks_agree(traces)


@pytest.mark.parametrize("options", [{"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": True}], ids=str)
def test_to_the_bit_on_two_ranks(options: dict[str, Any]) -> None:
    body = body_of(root, MLP, **options)
    references = weft.launch(body, args=(TORCH,), ranks=2, kind="thread", timeout=60)
    for right, seen in zip(references, weft.launch(body, args=(weft,), ranks=2, kind="thread"), strict=True):
        assert_same(right, seen, tolerance=EXACT)


def test_children_each_for_themselves() -> None:
    compare(body_of(children, MLP), TORCH, weft, ranks=2, single=bare)


@pytest.mark.parametrize("backend", ["gloo", "weft"])
def test_on_processes(backend: str) -> None:
    compare(body_of(root, MLP), None, weft, ranks=2, kind="process", backend=backend)

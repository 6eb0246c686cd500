"""Forward-mode AD and vmap through modules of several ranks: values, tangents and gradients of one process.

For ranks that are processes: torch keeps the level of forward-mode AD for all threads of one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad

import weft
from tests.data_parallel.twins import WIDTH, filled, make_rows, rows_of
from tests.fully_shard.models import by_layer, net
from tests.fully_shard.twins import assert_same_gradients, full_of
from tests.ranks import run_on
from weft import replicate_with_fsdp

pytestmark = [
    run_on(weft=2, timeout=90),
    # torch's own forward-mode decompositions are scripted.
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]

Pair = tuple[torch.Tensor, torch.Tensor]


def by_func(model: nn.Module, rows: torch.Tensor, tangent: torch.Tensor) -> Pair:
    output: Any = torch.func.jvp(lambda given: model(given), (rows,), (tangent,))
    return output


def by_dual(model: nn.Module, rows: torch.Tensor, tangent: torch.Tensor) -> Pair:
    with forward_ad.dual_level():
        output = forward_ad.unpack_dual(model(forward_ad.make_dual(rows, tangent)))
        assert output.tangent is not None
        return output.primal, output.tangent


def by_columns(model: nn.Module, rows: torch.Tensor, tangent: torch.Tensor) -> Pair:
    """All tangents at once, which is a jvp within a vmap."""
    columns: Any = torch.func.jacfwd(lambda given: model(given))(rows)
    return model(rows), columns.flatten(2) @ tangent.flatten()


def by_rows(model: nn.Module, rows: torch.Tensor, tangent: torch.Tensor) -> Pair:
    output: Any = torch.vmap(model)(rows)
    return output, output * tangent


WAYS = (by_func, by_dual, by_columns, by_rows)


def primal_only(pair: Pair) -> torch.Tensor:
    return pair[0].square().mean()


def tangent_only(pair: Pair) -> torch.Tensor:
    return pair[1].square().mean()


def both(pair: Pair) -> torch.Tensor:
    return pair[0].square().mean() + pair[1].square().mean()


def make_twin(wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, nn.Module]:
    single = net(width=WIDTH)
    return wrap(copy.deepcopy(single)), single


def agree(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """In each way, with losses of the output, of its tangent, and of both."""
    ours, single = make_twin(wrap)
    rank, size = dist.get_rank(), dist.get_world_size()
    for step, way in enumerate(WAYS):
        for loss in (primal_only, tangent_only, both):
            rows, tangents = make_rows(step), make_rows(step + 10)
            mine = rows_of(rows, rank).clone().requires_grad_(loss is both)
            pair = way(ours, mine, rows_of(tangents, rank))
            loss(pair).backward()
            each = [rows_of(rows, other).clone().requires_grad_(loss is both) for other in range(size)]
            pairs = [way(single, part, rows_of(tangents, other)) for other, part in enumerate(each)]
            (sum(map(loss, pairs)) / size).backward()  # type: ignore[union-attr]
            for seen, right in zip(pair, pairs[rank], strict=True):
                assert torch.allclose(seen, right, rtol=0, atol=1e-13), (way, loss)
            if loss is both:
                assert torch.allclose(mine.grad, each[rank].grad * size, rtol=0, atol=1e-13), way
            check(ours, single)
            for model in (ours, single):
                model.zero_grad()


def check(ours: nn.Module, single: nn.Module) -> None:
    if isinstance(ours, weft.DistributedDataParallel):
        ours = ours.module
    if isinstance(ours, weft.FSDPModule):
        assert_same_gradients(ours, single)
        return
    for (name, param), right in zip(ours.named_parameters(), single.parameters(), strict=True):
        assert (param.grad is None) == (right.grad is None), name  # no tangent depends on the last bias
        if param.grad is not None and right.grad is not None:
            assert (full_of(param.grad) - right.grad).abs().max() <= 1e-13, name


@pytest.mark.parametrize("reshard", [True, False, 1])
def test_sharded(reshard: bool | int) -> None:
    def wrap(model: nn.Module) -> nn.Module:
        by_layer(model, reshard_after_forward=reshard)
        return model

    agree(wrap)


def test_copies() -> None:
    """replicate_with_fsdp, replicate and DDP."""

    def layer_by_layer(model: Any) -> nn.Module:
        for layer in (*model, model):
            if any(True for _ in layer.parameters()):
                replicate_with_fsdp(layer)
        return model

    agree(layer_by_layer)
    agree(weft.replicate)
    agree(weft.DistributedDataParallel)


def test_buffers_are_synced() -> None:
    """A replicated module with buffers: they are the first rank's inside a jvp too."""
    model: Any = weft.replicate(filled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))).eval())
    model[1].running_mean.fill_(float(dist.get_rank()))
    rows = make_rows()
    by_func(model, rows, rows)
    assert model[1].running_mean.tolist() == [0.0] * WIDTH


def test_what_cannot_be_right_is_refused() -> None:
    """Reverse-mode transforms, and tangents of parameters; the model goes on as before."""
    for wrap in (lambda model: by_layer(model) or model, weft.replicate, weft.DistributedDataParallel):
        model, rows = wrap(net(width=WIDTH)), make_rows()
        with pytest.raises(NotImplementedError, match=r"inside torch\.func's grad"):
            torch.func.grad(lambda given, model=model: model(given).sum())(rows)
        model(rows).sum().backward()
    layer = weft.fully_shard(filled(nn.Linear(WIDTH, WIDTH)))
    plain = {name: full_of(param.detach()) for name, param in layer.named_parameters()}
    tangents = {name: torch.ones_like(param) for name, param in plain.items()}
    with pytest.raises(NotImplementedError, match="Give tangents to inputs only"):
        torch.func.jvp(lambda given: torch.func.functional_call(layer, given, rows), (plain,), (tangents,))
    layer(rows).sum().backward()

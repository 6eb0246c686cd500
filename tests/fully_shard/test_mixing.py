"""Several sharded models in one step, and library modules that read their parameters in their own ways."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations

from tests.fully_shard.models import WIDTH, Recurrent, as_whole, by_layer, filled, net
from tests.fully_shard.twins import Loss, Twin, make_rows, rows_of, single_loss
from tests.ranks import run_on
from weft import CPUOffloadPolicy

pytestmark = run_on(threads=(2, 4), gpu=2)
# For bodies that compare with tensors of the CPU themselves.
ON_CPU = run_on(threads=(2, 4))

TOLERANCE = 1e-11  # of longer chains of operations


def test_two_models_against_each_other() -> None:
    """As a generator and a discriminator: each in the other's backward, one of them frozen there."""
    maker, judge = (
        Twin(net()),
        Twin(filled(nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1)), 3)),
    )
    rank = dist.get_rank()
    for step in range(3):
        rows = make_rows(step)
        for kind in ("sharded", "single"):
            make, rate = getattr(maker, kind), getattr(judge, kind)

            def judge_loss(model: nn.Module, part: torch.Tensor, rank: int, make=make) -> torch.Tensor:
                return model(part).mean() - model(make(part).detach()).mean()

            def maker_loss(model: nn.Module, part: torch.Tensor, rank: int, rate=rate) -> torch.Tensor:
                return -rate(model(part)).square().mean()

            run(rate, kind, judge_loss, rows, rank)
            rate.requires_grad_(False)
            run(make, kind, maker_loss, rows, rank)
            rate.requires_grad_(True)
        for twin in (judge, maker):
            twin.check(TOLERANCE)
            twin.update()
            twin.assert_same_parameters(TOLERANCE)


def run(model: nn.Module, kind: str, loss: Loss, rows: torch.Tensor, rank: int) -> None:
    if kind == "single":
        single_loss(model, rows, loss).backward()
    else:
        loss(model, rows_of(rows, rank), rank).backward()


def test_two_models_in_one_loss() -> None:
    first, second = Twin(net()), Twin(net(2), as_whole)
    rank = dist.get_rank()
    for step in range(3):
        rows = make_rows(step)
        part = rows_of(rows, rank)
        second.sharded(torch.tanh(first.sharded(part))).square().mean().backward()
        whole = second.single(torch.tanh(first.single(rows))).square().mean()
        whole.backward()
        for twin in (first, second):
            twin.check()
            twin.update()


def test_a_teacher_without_gradients() -> None:
    """Another sharded model under no_grad, in the middle of the student's step."""
    teacher, student = Twin(net()), Twin(net())

    def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
        with torch.no_grad():
            target = (teacher.sharded if model is student.sharded else teacher.single)(rows * 2)
        return (model(rows) - target).square().mean()

    student.train(loss=loss)
    assert all(param.grad is None for param in teacher.sharded.parameters())


class Peeking(nn.Module):
    """Runs a layer without gradients before it runs it with them, and another only without."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.silent, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.silent(self.layer(rows))
        return self.last(torch.tanh(self.layer(rows) + target))


def test_parts_without_gradients() -> None:
    for reshard in (True, False):
        twin = Twin(Peeking(), reshard_after_forward=reshard)
        twin.train()
        assert twin.sharded.silent.weight.grad is None


@ON_CPU
def test_recurrent() -> None:
    for wrap in (by_layer, as_whole):
        for reshard in (True, False):
            twin = Twin(Recurrent(), wrap, reshard_after_forward=reshard)
            for step in range(3):
                twin.backward(make_rows(step))
                twin.check(TOLERANCE)
                twin.update()


class Attending(nn.Module):
    """torch's own attention and encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 7, dropout=0.0, batch_first=True)
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        tokens = rows.unsqueeze(0)
        attended, _ = self.attention(tokens, tokens, tokens)
        return self.encoder(attended)


@ON_CPU
def test_attention() -> None:
    """Training; then evaluation, which takes a faster path through the parameters."""
    twin = Twin(Attending(), reshard_after_forward=True)
    for step in range(2):
        twin.backward(make_rows(step))
        twin.check(TOLERANCE)
        twin.update()
    for model in (twin.sharded, twin.single):
        model.eval()
    with torch.no_grad():
        rows = make_rows()
        assert torch.allclose(twin.sharded(rows), twin.single(rows), rtol=1e-10, atol=1e-12)


@ON_CPU
def test_parametrized_weights() -> None:
    """Weights that are computed from parameters as they are read."""
    layers = [parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    model = filled(nn.Sequential(layers[0], nn.Tanh(), layers[1]))
    twin = Twin(model)
    for step in range(3):
        twin.backward(make_rows(step))
        twin.check(TOLERANCE)
        twin.update()


def test_gradients_of_inputs_alone() -> None:
    """autograd.grad for the input, and for a parameter's sake nothing; then a step as always."""
    twin = Twin(net(), reshard_after_forward=True)
    for step in range(2):
        rows = rows_of(make_rows(step), dist.get_rank()).requires_grad_()
        for _ in range(2):
            (seen,) = torch.autograd.grad(twin.sharded(rows).sum(), rows)
            (right,) = torch.autograd.grad(twin.single(rows).sum(), rows)
            assert torch.allclose(seen, right, rtol=1e-11, atol=0)
        assert all(param.grad is None for param in twin.sharded.parameters())
        twin.train(1)


@ON_CPU
def test_autocast() -> None:
    """Each rank computes in bfloat16 what a single process does on its rows."""
    model = net().float()
    singles = [copy.deepcopy(model) for _ in range(dist.get_world_size())]
    by_layer(model, reshard_after_forward=True)
    for step in range(2):
        rows = make_rows(step).float()
        for rank, each in enumerate(singles):
            with torch.autocast("cpu", torch.bfloat16):
                loss = each(rows_of(rows, rank)).float().square().mean()
            loss.backward()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(rows_of(rows, dist.get_rank())).float().square().mean()
        loss.backward()
    for param, *others in zip(model.parameters(), *(each.parameters() for each in singles), strict=True):
        mean: Any = sum(other.grad for other in others) / len(others)
        apart = (param.grad.full_tensor() - mean).abs().max()
        assert apart <= 1e-6 * mean.abs().max()


def test_offloaded() -> None:
    """The shards are on the CPU anyway: the policy changes nothing."""
    Twin(net(), offload_policy=CPUOffloadPolicy(pin_memory=False)).train()

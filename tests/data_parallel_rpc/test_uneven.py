"""Uneven inputs under distributed autograd: trainer r makes 2 + r steps, each in a context of its own.

A trainer whose inputs have ended takes part in the reductions of the others, and has no context to show.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.data_parallel.twins import assert_same_gradient
from tests.data_parallel_rpc.libraries import ON_TORCH, Join, dist_autograd, weft_only
from tests.data_parallel_rpc.modes import (
    Gradients,
    local_of,
    named_parameters,
    untouched_grad,
)
from tests.data_parallel_rpc.pipelines import (
    BACK,
    FRONT,
    MIDDLE,
    Expected,
    Pipeline,
    RemotePart,
    below,
    check_context,
    every_ranks,
    make_part,
    make_twin,
    mean_of,
    mean_square,
    without,
)
from tests.data_parallel_rpc.test_remote_parts import Towers, make_table, tokens_of
from tests.data_parallel_rpc.trainers import (
    LIMITS,
    Trainer,
    Wrap,
    ddp,
    replicated,
    sharded,
)
from tests.ranks import run_on

pytestmark = [
    run_on(threads=4, gloo_threads=4, **LIMITS),
    run_on(weft=4, gloo=4, full=True, **LIMITS),
]


# torch's replicate can't join.
JOINABLE: list[Wrap] = [ddp] if ON_TORCH else [ddp, replicated]


def num_steps(rank: int) -> int:
    return 2 + rank


def active_ranks(t: Trainer, step: int) -> list[int]:
    return [rank for rank in t.ranks if step < num_steps(rank)]


def expected(t: Trainer, twin: nn.Module, step: int, by_world: bool, loss: Any = mean_square) -> Gradients:
    """The sum over the trainers that have inputs, over their number or that of all."""
    found = every_ranks(twin, active_ranks(t, step), lambda model, rank: loss(model, rank, step))
    return mean_of(found, divisor=t.size if by_world else None)


def make_pipeline(t: Trainer) -> Pipeline:
    return Pipeline(make_part(FRONT), RemotePart(t.server, make_part, MIDDLE), make_part(BACK))


def test_join_of_ddp(trainer: Trainer) -> None:
    """DistributedDataParallel.join, around a model with a remote part; then evenly again."""
    for by_world in (True, False):
        model = ddp(trainer, make_pipeline(trainer), bucket_cap_mb=0.0001)
        with untouched_grad(model):
            with model.join(divide_by_initial_world_size=by_world):
                for step in range(num_steps(trainer.rank)):
                    right = expected(trainer, make_twin(), step, by_world)
                    with dist_autograd.context() as context_id:
                        dist_autograd.backward(context_id, [mean_square(model, trainer.rank, step)])
                        check_context(context_id, model, without(right, "middle"), f"step {step}")
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [mean_square(model, trainer.rank, 9)])
                check_context(context_id, model, without(Expected(trainer, 9).mean, "middle"), "evenly again")


@pytest.mark.parametrize("wrap", JOINABLE)
def test_join_inside(trainer: Trainer, wrap: Wrap) -> None:
    """Only the back is data parallel, behind a remote part; a Join of its own."""
    back = wrap(trainer, make_part(BACK))
    model = Pipeline(make_part(FRONT), RemotePart(trainer.server, make_part, MIDDLE), back)
    with untouched_grad(model), Join([back], divide_by_initial_world_size=False):
        for step in range(num_steps(trainer.rank)):
            right = expected(trainer, make_twin(), step, by_world=False)
            own = Expected(trainer, step).own
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [mean_square(model, trainer.rank, step)])
                check_context(context_id, back, below(right, "back"), f"back, step {step}")
                check_context(context_id, model.front, below(own, "front"), f"front, step {step}")


def test_two_backwards_a_context(trainer: Trainer) -> None:
    model = ddp(trainer, make_part(BACK))

    def both(model: nn.Module, rank: int, step: int) -> Tensor:
        return mean_square(model, rank, 10 * step) + mean_square(model, rank, 10 * step + 1)

    with untouched_grad(model), model.join():
        for step in range(num_steps(trainer.rank)):
            right = expected(trainer, make_part(BACK), step, True, both)
            with dist_autograd.context() as context_id:
                with model.no_sync():
                    dist_autograd.backward(context_id, [mean_square(model, trainer.rank, 10 * step)])
                dist_autograd.backward(context_id, [mean_square(model, trainer.rank, 10 * step + 1)])
                check_context(context_id, model, right, f"step {step}")


def test_a_sparse_table(trainer: Trainer) -> None:
    table, top = ddp(trainer, make_table()), RemotePart(trainer.server, make_part, BACK)
    model, twin = Towers(table, top), Towers(make_table(), make_part(BACK))

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(tokens_of(rank, step)).square().mean()

    with untouched_grad(table), table.join():
        for step in range(num_steps(trainer.rank)):
            right = below(expected(trainer, twin, step, True, loss), "here.0")
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [loss(model, trainer.rank, step)])
                check_context(context_id, table, right, f"step {step}")


def test_in_turns_with_plain_steps(trainer: Trainer) -> None:
    """Contexts and loss.backward() under one Join."""
    model = ddp(trainer, make_part(BACK))
    with model.join():
        for step in range(num_steps(trainer.rank)):
            right = expected(trainer, make_part(BACK), step, True)
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [mean_square(model, trainer.rank, step)])
                check_context(context_id, model, right, f"step {step}")
            model.zero_grad()
            mean_square(model, trainer.rank, step).backward()
            for name, param in named_parameters(model):
                assert_same_gradient(param.grad, right[name], f"step {step}, .grad of {name}")


@weft_only("puts gradients of shards into `.grad`")
def test_shards(trainer: Trainer) -> None:
    """fully_shard: a trainer with inputs has its part of the mean."""
    model = sharded(trainer, make_pipeline(trainer))
    with untouched_grad_of_the_active(trainer, model), Join([model], optimizer=None):
        for step in range(num_steps(trainer.rank)):
            right = expected(trainer, make_twin(), step, True)
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [mean_square(model, trainer.rank, step)])
                found = dist_autograd.get_gradients(context_id)
                for name, param in named_parameters(model):
                    part = torch.chunk(right[name], trainer.size)[trainer.rank]
                    where = f"step {step}, shard of {name}"
                    assert_same_gradient(local_of(found[param]), part, where, tolerance=1e-12)


def untouched_grad_of_the_active(t: Trainer, model: nn.Module) -> Any:
    """A trainer without inputs is given its share of the others' gradients, and has no context for it."""
    return untouched_grad(model) if t.rank == t.size - 1 else nullcontext()

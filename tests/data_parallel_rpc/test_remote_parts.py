"""Models with parts on the server: data parallel inside them and around them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.data_parallel.twins import WIDTH, filled
from tests.data_parallel_rpc.libraries import (
    DistributedOptimizer,
    RemoteModule,
    dist_autograd,
    rpc,
    weft_only,
)
from tests.data_parallel_rpc.modes import (
    context_gradients,
    named_parameters,
    rows_of,
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
    check,
    check_context,
    every_ranks,
    make_part,
    make_twin,
    mean_of,
    mean_square,
    own_gradients,
    without,
)
from tests.data_parallel_rpc.trainers import (
    LIMITS,
    Trainer,
    Wrap,
    ddp,
    each_wrap,
    without_sync,
)
from tests.ranks import run_on

pytestmark = [
    run_on(threads=3, gloo_threads=3, **LIMITS),
    run_on(weft=3, gloo=3, full=True, **LIMITS),
]


@each_wrap
def test_data_parallel_inside(trainer: Trainer, wrap: Wrap) -> None:
    """The back is data parallel, the front is each trainer's own."""
    middle = RemotePart(trainer.server, make_part, MIDDLE)
    model = Pipeline(make_part(FRONT), middle, wrap(trainer, make_part(BACK)))
    for i in range(3):
        right = Expected(trainer, i)
        with untouched_grad(model), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mean_square(model, trainer.rank, i)])
            check_context(context_id, model.front, below(right.own, "front"), "front")
            check_context(context_id, model.back, below(right.mean, "back"), f"back with {wrap.__name__}")
            check(middle.gradients(context_id), below(right.own, "middle"), "middle")
    assert set(middle.grads().values()) == {None}


@each_wrap
def test_data_parallel_around(trainer: Trainer, wrap: Wrap) -> None:
    """All that is here is data parallel; what is on the server is not."""
    middle = RemotePart(trainer.server, make_part, MIDDLE)
    model = wrap(trainer, Pipeline(make_part(FRONT), middle, make_part(BACK)))
    for i in range(3):
        right = Expected(trainer, i)
        with untouched_grad(model), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mean_square(model, trainer.rank, i)])
            check_context(context_id, model, without(right.mean, "middle"), f"around with {wrap.__name__}")
            check(middle.gradients(context_id), below(right.own, "middle"), "middle")
    assert set(middle.grads().values()) == {None}


@weft_only("waits for the sends of the first backward in the second")
@each_wrap
def test_two_backwards(trainer: Trainer, wrap: Wrap) -> None:
    """Both in one context, the first without sync."""
    middle = RemotePart(trainer.server, make_part, MIDDLE)
    model = wrap(trainer, Pipeline(make_part(FRONT), middle, make_part(BACK)))

    def both(twin: nn.Module, rank: int) -> Tensor:
        return mean_square(twin, rank, 1) + mean_square(twin, rank, 2)

    by_rank = every_ranks(make_twin(), trainer.ranks, both)
    for synced in (True, False):
        with untouched_grad(model), dist_autograd.context() as context_id:
            if synced:
                dist_autograd.backward(context_id, [mean_square(model, trainer.rank, 1)])
            else:
                with without_sync(model):
                    dist_autograd.backward(context_id, [mean_square(model, trainer.rank, 1)])
            dist_autograd.backward(context_id, [mean_square(model, trainer.rank, 2)])
            check_context(context_id, model, without(mean_of(by_rank), "middle"), wrap.__name__)
            check(middle.gradients(context_id), below(by_rank[trainer.rank], "middle"), "middle")


class Towers(nn.Module):
    """Parts here and there in turns."""

    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.parts = parts  # a tuple, in which modules are not found
        self.here = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))

    def forward(self, rows: Tensor) -> Tensor:
        for part in self.parts:
            rows = torch.tanh(part(rows))
        return rows


@each_wrap
def test_in_turns(trainer: Trainer, wrap: Wrap) -> None:
    """There, here, there, here: each data-parallel part has a remote one before it."""
    there = [RemotePart(trainer.server, make_part, seed) for seed in (4, 6)]
    here = [wrap(trainer, make_part(seed)) for seed in (5, 7)]
    model = Towers(there[0], here[0], there[1], here[1])
    twin = Towers(*(make_part(seed) for seed in (4, 5, 6, 7)))
    for i in range(2):
        right = Expected(trainer, i, twin)
        with untouched_grad(model), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mean_square(model, trainer.rank, i)])
            for j in range(2):
                name = f"parallel part {j} with {wrap.__name__}"
                check_context(context_id, here[j], below(right.mean, f"here.{2 * j + 1}"), name)
                check(there[j].gradients(context_id), below(right.own, f"here.{2 * j}"), f"remote part {j}")


@each_wrap
def test_remote_modules(trainer: Trainer, wrap: Wrap) -> None:
    """weft.RemoteModule in a data-parallel model."""
    middle = RemoteModule(trainer.server, make_part, (MIDDLE,))
    model = Pipeline(make_part(FRONT), middle.forward, wrap(trainer, make_part(BACK)))
    right = Expected(trainer, 0)
    with untouched_grad(model), dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [mean_square(model, trainer.rank)])
        check_context(context_id, model.back, below(right.mean, "back"), wrap.__name__)
        check_context(context_id, model.front, below(right.own, "front"), wrap.__name__)


def make_table() -> nn.EmbeddingBag:
    return filled(nn.EmbeddingBag(9, WIDTH, mode="sum", sparse=True))  # type: ignore[return-value]


def tokens_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(9, (4, 3), generator=generator)


@each_wrap
def test_a_sparse_table_elsewhere(trainer: Trainer, wrap: Wrap) -> None:
    """Words are looked up on the server, whose gradient is sparse; the dense top is data parallel."""
    table = RemotePart(trainer.server, make_table)
    top = wrap(trainer, make_part(BACK))
    model, twin = Towers(table, top), Towers(make_table(), make_part(BACK))
    for i in range(2):

        def loss(model: nn.Module, rank: int, step: int = i) -> Tensor:
            return model(tokens_of(rank, step)).square().mean()

        by_rank = every_ranks(twin, trainer.ranks, loss)
        with untouched_grad(top), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [loss(model, trainer.rank)])
            check_context(context_id, top, below(mean_of(by_rank), "here.1"), f"top with {wrap.__name__}")
            seen = table.gradients(context_id)
            assert seen["weight"].is_sparse
            check(seen, below(by_rank[trainer.rank], "here.0"), "table")


def test_a_sparse_table_here(trainer: Trainer) -> None:
    """The table is data parallel, and what comes after it is elsewhere."""
    top = RemotePart(trainer.server, make_part, BACK)
    table = ddp(trainer, make_table())
    model, twin = Towers(table, top), Towers(make_table(), make_part(BACK))
    for i in range(2):

        def loss(model: nn.Module, rank: int, step: int = i) -> Tensor:
            return model(tokens_of(rank, step)).square().mean()

        by_rank = every_ranks(twin, trainer.ranks, loss)
        with untouched_grad(table), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [loss(model, trainer.rank)])
            assert context_gradients(context_id, table)["weight"].is_sparse
            check_context(context_id, table, below(mean_of(by_rank), "here.0"), "table")
            check(top.gradients(context_id), below(by_rank[trainer.rank], "here.1"), "top")


class Moody(torch.autograd.Function):
    """Raises in backward where its input is negative."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, mood: Tensor) -> Tensor:
        ctx.is_cross = bool(mood < 0)
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        if ctx.is_cross:
            raise ValueError("in a bad mood")
        return grad_outputs[0], None


class MoodyPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = make_part(MIDDLE)

    def forward(self, rows: Tensor, mood: Tensor) -> Tensor:
        return Moody.apply(self.part(rows), mood)


@weft_only("does not recover from an error")
@each_wrap
def test_going_on_after_an_error(trainer: Trainer, wrap: Wrap) -> None:
    """The server's part fails in backward, for all trainers; the next step is as if nothing had been."""
    middle = RemotePart(trainer.server, MoodyPart)
    mood = torch.ones(())
    model = wrap(trainer, Pipeline(make_part(FRONT), lambda rows: middle(rows, mood), make_part(BACK)))
    for i in range(4):
        right = Expected(trainer, i)
        mood = torch.tensor(-1.0 if i % 2 else 1.0)
        with untouched_grad(model), dist_autograd.context() as context_id:
            loss = mean_square(model, trainer.rank, i)
            if i % 2 == 0:
                dist_autograd.backward(context_id, [loss])
                check_context(context_id, model, without(right.mean, "middle"), wrap.__name__)
                continue
            try:
                dist_autograd.backward(context_id, [loss])
            except RuntimeError as error:
                assert "in a bad mood" in str(error)  # noqa: PT017  (raises() would hide which step it was)
            else:
                raise AssertionError("the server's part did not fail")


def parameter_rrefs(part: Any) -> list[Any]:
    return [rpc.RRef(param) for param in part.local_value().parameters()]


@each_wrap
def test_training(trainer: Trainer, wrap: Wrap) -> None:
    """Steps of a DistributedOptimizer over the parameters here and there."""
    middle = RemotePart(trainer.server, make_part, MIDDLE)
    model = Pipeline(make_part(FRONT), middle, wrap(trainer, make_part(BACK)))
    theirs = rpc.rpc_sync(trainer.server, parameter_rrefs, (middle.rref,))
    ours = [rpc.RRef(param) for param in model.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, [*ours, *theirs], lr=0.1, momentum=0.9)
    # Every trainer's twin: the back has the mean, which makes it everybody's.
    twins = [make_twin() for _ in trainer.ranks]
    optimizers = [torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9) for twin in twins]
    for i in range(4):
        by_rank = [own_gradients(twin, mean_square(twin, rank, i)) for rank, twin in enumerate(twins)]
        mean = mean_of(by_rank)
        for rank, twin in enumerate(twins):
            for name, param in named_parameters(twin):
                param.grad = mean[name] if name.startswith("back") else by_rank[rank][name]
            optimizers[rank].step()
        with dist_autograd.context() as context_id:
            loss = mean_square(model, trainer.rank, i)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    outputs = model(rows_of(trainer.rank, 9))
    torch.testing.assert_close(outputs, twins[trainer.rank](rows_of(trainer.rank, 9)), rtol=1e-11, atol=1e-13)

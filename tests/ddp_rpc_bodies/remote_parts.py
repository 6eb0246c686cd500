"""Models with parts on the server: data parallel inside them and around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.data_parallel.twins import WIDTH, filled
from tests.ddp_rpc_bodies.libraries import (
    DistributedOptimizer,
    RemoteModule,
    dist_autograd,
    on_this_library,
    rpc,
)
from tests.ddp_rpc_bodies.modes import context_gradients, named_parameters, rows_of, untouched_grad
from tests.ddp_rpc_bodies.pipelines import (
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
from tests.ddp_rpc_bodies.running import Body, Trainer
from tests.ddp_rpc_bodies.wraps import WRAPS, Wrap, ddp, without_sync


def for_each_wrap(body: Callable[[Trainer, Wrap], None]) -> Body:
    def run(t: Trainer) -> None:
        for wrap in WRAPS:
            body(t, wrap)

    run.__name__ = body.__name__
    return run


def inside(t: Trainer, wrap: Wrap) -> None:
    """The back is data parallel, the front is each trainer's own."""
    middle = RemotePart(t.server, make_part, MIDDLE)
    model = Pipeline(make_part(FRONT), middle, wrap(t, make_part(BACK)))
    for i in range(3):
        right = Expected(t, i)
        with untouched_grad(model), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mean_square(model, t.rank, i)])
            check_context(context_id, model.front, below(right.own, "front"), "front")
            check_context(context_id, model.back, below(right.mean, "back"), f"back with {wrap.__name__}")
            check(middle.gradients(context_id), below(right.own, "middle"), "middle")
    assert set(middle.grads().values()) == {None}


def around(t: Trainer, wrap: Wrap) -> None:
    """All that is here is data parallel; what is on the server is not."""
    middle = RemotePart(t.server, make_part, MIDDLE)
    model = wrap(t, Pipeline(make_part(FRONT), middle, make_part(BACK)))
    for i in range(3):
        right = Expected(t, i)
        with untouched_grad(model), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mean_square(model, t.rank, i)])
            check_context(context_id, model, without(right.mean, "middle"), f"around with {wrap.__name__}")
            check(middle.gradients(context_id), below(right.own, "middle"), "middle")
    assert set(middle.grads().values()) == {None}


def two_backwards(t: Trainer, wrap: Wrap) -> None:
    """Both in one context, the first without sync."""
    middle = RemotePart(t.server, make_part, MIDDLE)
    model = wrap(t, Pipeline(make_part(FRONT), middle, make_part(BACK)))

    def both(twin: nn.Module, rank: int) -> Tensor:
        return mean_square(twin, rank, 1) + mean_square(twin, rank, 2)

    by_rank = every_ranks(make_twin(), t.ranks, both)
    for synced in (True, False):
        with untouched_grad(model), dist_autograd.context() as context_id:
            if synced:
                dist_autograd.backward(context_id, [mean_square(model, t.rank, 1)])
            else:
                with without_sync(model):
                    dist_autograd.backward(context_id, [mean_square(model, t.rank, 1)])
            dist_autograd.backward(context_id, [mean_square(model, t.rank, 2)])
            check_context(context_id, model, without(mean_of(by_rank), "middle"), wrap.__name__)
            check(middle.gradients(context_id), below(by_rank[t.rank], "middle"), "middle")


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


def in_turns(t: Trainer, wrap: Wrap) -> None:
    """There, here, there, here: each data-parallel part has a remote one before it."""
    there = [RemotePart(t.server, make_part, seed) for seed in (4, 6)]
    here = [wrap(t, make_part(seed)) for seed in (5, 7)]
    model = Towers(there[0], here[0], there[1], here[1])
    twin = Towers(*(make_part(seed) for seed in (4, 5, 6, 7)))
    for i in range(2):
        right = Expected(t, i, twin)
        with untouched_grad(model), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mean_square(model, t.rank, i)])
            for j in range(2):
                name = f"parallel part {j} with {wrap.__name__}"
                check_context(context_id, here[j], below(right.mean, f"here.{2 * j + 1}"), name)
                check(there[j].gradients(context_id), below(right.own, f"here.{2 * j}"), f"remote part {j}")


def remote_modules(t: Trainer, wrap: Wrap) -> None:
    """weft.RemoteModule in a data-parallel model."""
    middle = RemoteModule(t.server, make_part, (MIDDLE,))
    model = Pipeline(make_part(FRONT), middle.forward, wrap(t, make_part(BACK)))
    right = Expected(t, 0)
    with untouched_grad(model), dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [mean_square(model, t.rank)])
        check_context(context_id, model.back, below(right.mean, "back"), wrap.__name__)
        check_context(context_id, model.front, below(right.own, "front"), wrap.__name__)


def make_table() -> nn.EmbeddingBag:
    return filled(nn.EmbeddingBag(9, WIDTH, mode="sum", sparse=True))  # type: ignore[return-value]


def tokens_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(9, (4, 3), generator=generator)


def a_sparse_table_elsewhere(t: Trainer, wrap: Wrap) -> None:
    """Words are looked up on the server, whose gradient is sparse; the dense top is data parallel."""
    table = RemotePart(t.server, make_table)
    top = wrap(t, make_part(BACK))
    model, twin = Towers(table, top), Towers(make_table(), make_part(BACK))
    for i in range(2):

        def loss(model: nn.Module, rank: int, step: int = i) -> Tensor:
            return model(tokens_of(rank, step)).square().mean()

        by_rank = every_ranks(twin, t.ranks, loss)
        with untouched_grad(top), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [loss(model, t.rank)])
            check_context(context_id, top, below(mean_of(by_rank), "here.1"), f"top with {wrap.__name__}")
            seen = table.gradients(context_id)
            assert seen["weight"].is_sparse
            check(seen, below(by_rank[t.rank], "here.0"), "table")


def a_sparse_table_here(t: Trainer) -> None:
    """The table is data parallel, and what comes after it is elsewhere."""
    top = RemotePart(t.server, make_part, BACK)
    table = ddp(t, make_table())
    model, twin = Towers(table, top), Towers(make_table(), make_part(BACK))
    for i in range(2):

        def loss(model: nn.Module, rank: int, step: int = i) -> Tensor:
            return model(tokens_of(rank, step)).square().mean()

        by_rank = every_ranks(twin, t.ranks, loss)
        with untouched_grad(table), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [loss(model, t.rank)])
            assert context_gradients(context_id, table)["weight"].is_sparse
            check_context(context_id, table, below(mean_of(by_rank), "here.0"), "table")
            check(top.gradients(context_id), below(by_rank[t.rank], "here.1"), "top")


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


def going_on_after_an_error(t: Trainer, wrap: Wrap) -> None:
    """The server's part fails in backward, for all trainers; the next step is as if nothing had been."""
    middle = RemotePart(t.server, MoodyPart)
    mood = torch.ones(())
    model = wrap(t, Pipeline(make_part(FRONT), lambda rows: middle(rows, mood), make_part(BACK)))
    for i in range(4):
        right = Expected(t, i)
        mood = torch.tensor(-1.0 if i % 2 else 1.0)
        with untouched_grad(model), dist_autograd.context() as context_id:
            loss = mean_square(model, t.rank, i)
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


def training(t: Trainer, wrap: Wrap) -> None:
    """Steps of a DistributedOptimizer over the parameters here and there."""
    middle = RemotePart(t.server, make_part, MIDDLE)
    model = Pipeline(make_part(FRONT), middle, wrap(t, make_part(BACK)))
    theirs = rpc.rpc_sync(t.server, parameter_rrefs, (middle.rref,))
    ours = [rpc.RRef(param) for param in model.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, [*ours, *theirs], lr=0.1, momentum=0.9)
    # Every trainer's twin: the back has the mean, which makes it everybody's.
    twins = [make_twin() for _ in t.ranks]
    optimizers = [torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9) for twin in twins]
    for i in range(4):
        by_rank = [own_gradients(twin, mean_square(twin, rank, i)) for rank, twin in enumerate(twins)]
        mean = mean_of(by_rank)
        for rank, twin in enumerate(twins):
            for name, param in named_parameters(twin):
                param.grad = mean[name] if name.startswith("back") else by_rank[rank][name]
            optimizers[rank].step()
        with dist_autograd.context() as context_id:
            loss = mean_square(model, t.rank, i)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
    outputs = model(rows_of(t.rank, 9))
    torch.testing.assert_close(outputs, twins[t.rank](rows_of(t.rank, 9)), rtol=1e-11, atol=1e-13)


FOR_EACH_WRAP = [
    inside,
    around,
    in_turns,
    remote_modules,
    a_sparse_table_elsewhere,
    training,
]
# torch waits for the sends of the first backward in the second, and does not recover from an error.
ON_WEFT = [two_backwards, going_on_after_an_error]
BODIES = [
    *map(for_each_wrap, on_this_library(FOR_EACH_WRAP, ON_WEFT)),
    a_sparse_table_here,
]

"""Where data parallel happens: in several groups, on the servers of others, in handlers of calls."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.ddp_rpc_bodies.libraries import (
    DistributedDataParallel,
    dist_autograd,
    on_this_library,
    replicate,
    rpc,
)
from tests.ddp_rpc_bodies.modes import (
    Gradients,
    context_gradients,
    local_of,
    named_parameters,
    rows_of,
    untouched_grad,
)
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
)
from tests.ddp_rpc_bodies.places import call_kept, end, forget, keep, kept, kept_gradients, kept_grads, serve
from tests.ddp_rpc_bodies.running import Trainer
from tests.ddp_rpc_bodies.wraps import WRAPS, ddp, sharded


def ddp_in(group: dist.ProcessGroup, module: nn.Module, **options: Any) -> Any:
    return DistributedDataParallel(module, process_group=group, **options)


def several_groups(t: Trainer) -> None:
    """The front is everybody's, the back that of half the trainers, a remote part stands between them."""
    middle = RemotePart(t.server, make_part, MIDDLE)
    back = ddp_in(t.half, make_part(BACK), bucket_cap_mb=0.0001)
    model = Pipeline(ddp(t, make_part(FRONT), bucket_cap_mb=0.0001), middle, back)
    for step in range(3):
        by_rank = every_ranks(make_twin(), t.ranks, lambda m, rank, step=step: mean_square(m, rank, step))
        of_half = mean_of([by_rank[rank] for rank in t.ranks_of_half])
        with untouched_grad(model), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mean_square(model, t.rank, step)])
            check_context(context_id, model.front, below(mean_of(by_rank), "front"), "front")
            check_context(context_id, back, below(of_half, "back"), "back")
            check(middle.gradients(context_id), below(by_rank[t.rank], "middle"), "middle")


def several_groups_composed(t: Trainer) -> None:
    """The same with replicate, both in one module."""
    model = nn.Sequential(make_part(FRONT), nn.Tanh(), make_part(BACK))
    twin = nn.Sequential(make_part(FRONT), nn.Tanh(), make_part(BACK))
    replicate(model[2], process_group=t.half)
    replicate(model, process_group=t.group)
    by_rank = every_ranks(twin, t.ranks, mean_square)
    of_half = mean_of([by_rank[rank] for rank in t.ranks_of_half])
    with untouched_grad(model), dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [mean_square(model, t.rank)])
        check_context(context_id, model[0], below(mean_of(by_rank), "0"), "the world's")
        check_context(context_id, model[2], below(of_half, "2"), "the half's")


def the_remote_part_is_parallel(t: Trainer) -> None:
    """Each of the first half calls one of the other half, and those are data parallel among themselves."""
    middle = t.size // 2
    if t.rank >= middle:
        keep(f"worker{t.rank}", ddp_in(t.half, make_part(MIDDLE)))
    dist.barrier(t.group)
    if t.rank >= middle:
        serve(f"worker{t.rank}")
        return
    partner = f"worker{t.rank + middle}"
    model = Pipeline(make_part(FRONT), partial(call_partner, partner), make_part(BACK))
    for step in range(3):
        by_rank = every_ranks(
            make_twin(), range(middle), lambda m, rank, step=step: mean_square(m, rank, step)
        )
        with untouched_grad(model), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mean_square(model, t.rank, step)])
            seen = rpc.rpc_sync(partner, kept_gradients, (context_id,))
            check(seen, below(mean_of(by_rank), "middle"), "the remote part")
            check_context(context_id, model.front, below(by_rank[t.rank], "front"), "front")
            check_context(context_id, model.back, below(by_rank[t.rank], "back"), "back")
            assert set(rpc.rpc_sync(partner, kept_grads).values()) == {None}
    rpc.rpc_sync(partner, end)


def call_partner(partner: str, rows: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(partner, call_kept, (rows,))


def train_kept(rank: int, step: int) -> tuple[Gradients, Gradients]:
    """A handler that makes a step of the model kept here, in a context of its own; what this trainer has."""
    model = kept()
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [mean_square(model, rank, step)])
        found = dist_autograd.get_gradients(context_id)
        return own_parts(found, model.front), own_parts(found, model.back)


def own_parts(found: dict[Any, Any], part: nn.Module) -> Gradients:
    return {name: local_of(found[param]).clone() for name, param in named_parameters(part)}


def driven_by_calls(t: Trainer) -> None:
    """Trainers work in handlers: one of them tells all, itself too, what to do."""
    for wrap in WRAPS:
        middle = RemotePart(t.server, make_part, MIDDLE)
        keep(f"worker{t.rank}", Pipeline(make_part(FRONT), middle, wrap(t, make_part(BACK))))
        dist.barrier(t.group)
        if t.rank == 0:
            for step in range(3):
                drive(t, step, is_sharded=wrap is sharded)
            for rank in t.ranks:
                rpc.rpc_sync(f"worker{rank}", end)
        serve(f"worker{t.rank}")  # with no collective of its own: handlers use the group


def drive(t: Trainer, step: int, is_sharded: bool) -> None:
    calls = [rpc.rpc_async(f"worker{rank}", train_kept, (rank, step)) for rank in t.ranks]
    by_rank = every_ranks(make_twin(), t.ranks, lambda model, rank: mean_square(model, rank, step))
    mean = below(mean_of(by_rank), "back")
    for rank, call in enumerate(calls):
        front, back = call.wait()
        cut = {name: torch.chunk(grad, t.size)[rank] for name, grad in mean.items()} if is_sharded else mean
        check(back, cut, f"back on {rank}")
        check(front, below(by_rank[rank], "front"), f"front on {rank}")


def train_one_of_two(which: int, rank: int, step: int) -> Gradients:
    model = kept()[which]
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [mean_square(model, rank, step)])
        return context_gradients(context_id, model.back)


def two_backwards_at_once(t: Trainer) -> None:
    """Each trainer trains two models at a time, in groups of their own, begun in different orders.

    If a worker did one backward after the other, each could wait for the one that the other has not begun.
    """
    backs = [ddp_in(group, make_part(BACK)) for group in (t.group, t.mesh.get_group())]
    middle = RemotePart(t.server, make_part, MIDDLE)
    keep(f"worker{t.rank}", [Pipeline(make_part(FRONT), middle, back) for back in backs])
    dist.barrier(t.group)
    if t.rank == 0:
        for step in range(6):
            right = below(Expected(t, step).mean, "back")
            calls = [
                rpc.rpc_async(f"worker{rank}", train_one_of_two, ((i + rank) % 2, rank, step))
                for i in range(2)
                for rank in t.ranks
            ]
            for call in calls:
                check(call.wait(), right, f"back in step {step}")
        for rank in t.ranks:
            rpc.rpc_sync(f"worker{rank}", end)
    serve(f"worker{t.rank}")


def one_part_for_all(t: Trainer) -> None:
    """All trainers use one remote part: each context has what its own trainer gave."""
    if t.rank == 0:
        keep("worker0", RemotePart(t.server, make_part, MIDDLE).rref)
    dist.barrier(t.group)
    middle = RemotePart.__new__(RemotePart)
    middle.rref = rpc.rpc_sync("worker0", kept)
    model = Pipeline(make_part(FRONT), middle, ddp(t, make_part(BACK)))
    for step in range(3):
        right = Expected(t, step)
        with untouched_grad(model), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mean_square(model, t.rank, step)])
            check(middle.gradients(context_id), below(right.own, "middle"), "middle")
            check_context(context_id, model.back, below(right.mean, "back"), "back")
    dist.barrier(t.group)
    if t.rank == 0:
        forget("worker0")


def calls_back_to_a_trainer(t: Trainer) -> None:
    """The server's part calls the trainer's data-parallel back: all of it in one context."""
    keep(f"worker{t.rank}", ddp(t, make_part(BACK)))
    dist.barrier(t.group)
    front = make_part(FRONT)
    for step in range(2):
        right = Expected(t, step, nn.Sequential(make_part(FRONT), nn.Tanh(), make_part(BACK)))
        with dist_autograd.context() as context_id:
            hidden = torch.tanh(front(rows_of(t.rank, step)))
            output = rpc.rpc_sync(t.server, pass_on, (f"worker{t.rank}", hidden))
            dist_autograd.backward(context_id, [output.square().mean()])
            check_context(context_id, front, below(right.own, "0"), "front")
            check(kept_here(t, context_id), below(right.mean, "2"), "back")
    dist.barrier(t.group)
    forget(f"worker{t.rank}")


def kept_here(t: Trainer, context_id: int) -> Gradients:
    return rpc.rpc_sync(f"worker{t.rank}", kept_gradients, (context_id,))


def pass_on(to: str, *args: Any) -> Any:
    return rpc.rpc_sync(to, call_kept, args)


BODIES = [one_part_for_all, driven_by_calls, two_backwards_at_once, calls_back_to_a_trainer]
# torch's replicate reduces what an inner one has reduced, once more.
BODIES_OF_FOUR = on_this_library([several_groups, the_remote_part_is_parallel], [several_groups_composed])

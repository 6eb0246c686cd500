"""Where data parallel happens: in several groups, on the servers of others, in handlers of calls."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.data_parallel_rpc.libraries import (
    DistributedDataParallel,
    dist_autograd,
    replicate,
    rpc,
    weft_only,
)
from tests.data_parallel_rpc.modes import (
    Gradients,
    context_gradients,
    copied,
    local_of,
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
)
from tests.data_parallel_rpc.trainers import (
    LIMITS,
    Trainer,
    Wrap,
    ddp,
    each_wrap,
    sharded,
    without_server,
)
from tests.ranks import run_on

pytestmark = [
    run_on(threads=3, gloo_threads=3, **LIMITS),
    run_on(weft=3, gloo=3, full=True, **LIMITS),
]


# What trainers keep for each other's calls. Thread-ranks share this module: all is kept by worker.

_kept: dict[str, Any] = {}
_done: dict[str, threading.Event] = {}


def keep(worker: str, thing: Any) -> None:
    _kept[worker] = thing
    _done[worker] = threading.Event()


def end() -> None:
    """The worker that runs this need not wait any longer."""
    _done[rpc.get_worker_info().name].set()


def serve(worker: str, secs: float = 60.0) -> None:
    """Wait until somebody has called `end` here, and keep nothing."""
    assert _done[worker].wait(secs), f"nobody told {worker} to end"
    forget(worker)


def kept() -> Any:
    """What the worker that runs this keeps."""
    return _kept[rpc.get_worker_info().name]


def forget(worker: str) -> None:
    del _kept[worker]


def call_kept(*args: Any) -> Any:
    return kept()(*args)


def kept_gradients(context_id: int) -> Gradients:
    return context_gradients(context_id, kept())


def kept_grads() -> Gradients:
    return {name: copied(param.grad) for name, param in named_parameters(kept())}


def ddp_in(group: dist.ProcessGroup, module: nn.Module, **options: Any) -> Any:
    return DistributedDataParallel(module, process_group=group, **options)


@run_on(threads=4, gloo_threads=4, **LIMITS)
@run_on(weft=4, gloo=4, full=True, **LIMITS)
@without_server
def test_several_groups(trainer: Trainer) -> None:
    """The front is everybody's, the back that of half the trainers, a remote part stands between them."""
    middle = RemotePart(trainer.server, make_part, MIDDLE)
    back = ddp_in(trainer.half, make_part(BACK), bucket_cap_mb=0.0001)
    model = Pipeline(ddp(trainer, make_part(FRONT), bucket_cap_mb=0.0001), middle, back)
    for step in range(3):
        by_rank = every_ranks(
            make_twin(), trainer.ranks, lambda m, rank, step=step: mean_square(m, rank, step)
        )
        of_half = mean_of([by_rank[rank] for rank in trainer.ranks_of_half])
        with untouched_grad(model), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mean_square(model, trainer.rank, step)])
            check_context(context_id, model.front, below(mean_of(by_rank), "front"), "front")
            check_context(context_id, back, below(of_half, "back"), "back")
            check(middle.gradients(context_id), below(by_rank[trainer.rank], "middle"), "middle")


@weft_only("reduces what an inner replicate has reduced, once more")
@run_on(threads=4, gloo_threads=4, **LIMITS)
@run_on(weft=4, gloo=4, full=True, **LIMITS)
@without_server
def test_several_groups_of_one_module(trainer: Trainer) -> None:
    """The same with replicate, both in one module."""
    model = nn.Sequential(make_part(FRONT), nn.Tanh(), make_part(BACK))
    twin = nn.Sequential(make_part(FRONT), nn.Tanh(), make_part(BACK))
    replicate(model[2], process_group=trainer.half)
    replicate(model, process_group=trainer.group)
    by_rank = every_ranks(twin, trainer.ranks, mean_square)
    of_half = mean_of([by_rank[rank] for rank in trainer.ranks_of_half])
    with untouched_grad(model), dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [mean_square(model, trainer.rank)])
        check_context(context_id, model[0], below(mean_of(by_rank), "0"), "the world's")
        check_context(context_id, model[2], below(of_half, "2"), "the half's")


@run_on(threads=4, gloo_threads=4, **LIMITS)
@run_on(weft=4, gloo=4, full=True, **LIMITS)
@without_server
def test_the_remote_part_is_data_parallel(trainer: Trainer) -> None:
    """Each of the first half calls one of the other half, and those are data parallel among themselves."""
    middle = trainer.size // 2
    if trainer.rank >= middle:
        keep(f"worker{trainer.rank}", ddp_in(trainer.half, make_part(MIDDLE)))
    dist.barrier(trainer.group)
    if trainer.rank >= middle:
        serve(f"worker{trainer.rank}")
        return
    partner = f"worker{trainer.rank + middle}"
    model = Pipeline(make_part(FRONT), partial(call_partner, partner), make_part(BACK))
    for step in range(3):
        by_rank = every_ranks(
            make_twin(), range(middle), lambda m, rank, step=step: mean_square(m, rank, step)
        )
        with untouched_grad(model), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mean_square(model, trainer.rank, step)])
            seen = rpc.rpc_sync(partner, kept_gradients, (context_id,))
            check(seen, below(mean_of(by_rank), "middle"), "the remote part")
            check_context(context_id, model.front, below(by_rank[trainer.rank], "front"), "front")
            check_context(context_id, model.back, below(by_rank[trainer.rank], "back"), "back")
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


@each_wrap
def test_driven_by_calls(trainer: Trainer, wrap: Wrap) -> None:
    """Trainers work in handlers: one of them tells all, itself too, what to do."""
    middle = RemotePart(trainer.server, make_part, MIDDLE)
    keep(f"worker{trainer.rank}", Pipeline(make_part(FRONT), middle, wrap(trainer, make_part(BACK))))
    dist.barrier(trainer.group)
    if trainer.rank == 0:
        for step in range(3):
            drive(trainer, step, is_sharded=wrap is sharded)
        for rank in trainer.ranks:
            rpc.rpc_sync(f"worker{rank}", end)
    serve(f"worker{trainer.rank}")  # with no collective of its own: handlers use the group


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


def test_two_backwards_at_once(trainer: Trainer) -> None:
    """Each trainer trains two models at a time, in groups of their own, begun in different orders.

    If a worker did one backward after the other, each could wait for the one that the other has not begun.
    """
    backs = [ddp_in(group, make_part(BACK)) for group in (trainer.group, trainer.mesh.get_group())]
    middle = RemotePart(trainer.server, make_part, MIDDLE)
    keep(f"worker{trainer.rank}", [Pipeline(make_part(FRONT), middle, back) for back in backs])
    dist.barrier(trainer.group)
    if trainer.rank == 0:
        for step in range(6):
            right = below(Expected(trainer, step).mean, "back")
            calls = [
                rpc.rpc_async(f"worker{rank}", train_one_of_two, ((i + rank) % 2, rank, step))
                for i in range(2)
                for rank in trainer.ranks
            ]
            for call in calls:
                check(call.wait(), right, f"back in step {step}")
        for rank in trainer.ranks:
            rpc.rpc_sync(f"worker{rank}", end)
    serve(f"worker{trainer.rank}")


def test_one_part_for_all(trainer: Trainer) -> None:
    """All trainers use one remote part: each context has what its own trainer gave."""
    if trainer.rank == 0:
        keep("worker0", RemotePart(trainer.server, make_part, MIDDLE).rref)
    dist.barrier(trainer.group)
    middle = RemotePart.__new__(RemotePart)
    middle.rref = rpc.rpc_sync("worker0", kept)
    model = Pipeline(make_part(FRONT), middle, ddp(trainer, make_part(BACK)))
    for step in range(3):
        right = Expected(trainer, step)
        with untouched_grad(model), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mean_square(model, trainer.rank, step)])
            check(middle.gradients(context_id), below(right.own, "middle"), "middle")
            check_context(context_id, model.back, below(right.mean, "back"), "back")
    dist.barrier(trainer.group)
    if trainer.rank == 0:
        forget("worker0")


def test_calls_back_to_a_trainer(trainer: Trainer) -> None:
    """The server's part calls the trainer's data-parallel back: all of it in one context."""
    keep(f"worker{trainer.rank}", ddp(trainer, make_part(BACK)))
    dist.barrier(trainer.group)
    front = make_part(FRONT)
    for step in range(2):
        right = Expected(trainer, step, nn.Sequential(make_part(FRONT), nn.Tanh(), make_part(BACK)))
        with dist_autograd.context() as context_id:
            hidden = torch.tanh(front(rows_of(trainer.rank, step)))
            output = rpc.rpc_sync(trainer.server, pass_on, (f"worker{trainer.rank}", hidden))
            dist_autograd.backward(context_id, [output.square().mean()])
            check_context(context_id, front, below(right.own, "0"), "front")
            check(kept_here(trainer, context_id), below(right.mean, "2"), "back")
    dist.barrier(trainer.group)
    forget(f"worker{trainer.rank}")


def kept_here(t: Trainer, context_id: int) -> Gradients:
    return rpc.rpc_sync(f"worker{t.rank}", kept_gradients, (context_id,))


def pass_on(to: str, *args: Any) -> Any:
    return rpc.rpc_sync(to, call_kept, args)

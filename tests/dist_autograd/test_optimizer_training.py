"""Workers with a layer each, trained by a distributed optimizer: of one worker, of several, in parallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

import weft
from tests.dist_autograd.remote_parts import (
    Part,
    ask,
    batch,
    loss_of,
    make_parts,
    parameters_of,
    step_as_one_dies,
    step_part_of_it,
)
from tests.ranks import run_on
from tests.rpc.crew import Crew
from tests.rpc.workers import RANKS, Worker, from_worker0, takes, with_options
from weft import DistributedOptimizer, dist_autograd, rpc
from weft.dist_autograd.optimizer import step_local_optimizer

LIMITS: dict[str, Any] = {"timeout": 60, "collective_timeout": 60}

pytestmark = run_on(threads=3, **LIMITS)

KINDS = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (optim.Adam, {"lr": 0.1}),
    (optim.Adagrad, {"lr": 0.1}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@from_worker0
def test_training_is_that_of_one_process(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    parts, alone = make_parts(), [Part(rank) for rank in range(RANKS)]
    optimizer = DistributedOptimizer(kind, parameters_of(parts), **options)
    plain = kind([param for part in alone for param in part.parameters()], **options)  # type: ignore[call-arg]
    for step in range(3):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [loss_of(parts, batch(step))])
            optimizer.step(context_id)
        plain.zero_grad()
        loss_of(alone, batch(step)).backward()
        plain.step()
    for part, wanted in zip(parts, alone, strict=True):
        torch.testing.assert_close(ask(part, "values"), wanted.values())
        assert ask(part, "grads") == [None, None]
    assert sorted(rref.owner_name() for rref in optimizer.remote_optimizers) == [
        "worker0",
        "worker1",
        "worker2",
    ]


class Table(nn.EmbeddingBag):
    def __init__(self) -> None:
        super().__init__(6, 2, mode="sum", sparse=True)
        with torch.no_grad():
            self.weight.fill_(1.0)


@pytest.mark.parametrize("kind", [optim.SGD, optim.SparseAdam])
@from_worker0
def test_sparse_gradients(kind: type[optim.Optimizer]) -> None:
    remote, alone = weft.RemoteModule("worker1", Table), Table()
    rows = torch.tensor([[0, 2], [2, 3]])
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [remote(rows).square().sum()])
        DistributedOptimizer(kind, remote.remote_parameters(), lr=0.1).step(context_id)
    alone(rows).square().sum().backward()
    kind(alone.parameters(), lr=0.1).step()  # type: ignore[call-arg]
    seen = remote.state_dict()["weight"]
    torch.testing.assert_close(seen, alone.weight.detach())
    assert torch.equal(seen[[1, 4, 5]], torch.ones(3, 2))


# Several trainers


class Shared(nn.Module):
    """Its weight goes up by one with every gradient, with SGD and a learning rate of one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self) -> Tensor:
        return -(self.weight.sum() + self.bias.sum())

    def values(self) -> set[float]:
        return {*self.weight.tolist(), *self.bias.tolist()}


def step_often(module: rpc.RRef[Shared], params: list[rpc.RRef[nn.Parameter]], num_steps: int) -> None:
    optimizer = DistributedOptimizer(optim.SGD, params, lr=1.0)
    for _ in range(num_steps):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [module.rpc_sync().forward()])
            optimizer.step(context_id)


@from_worker0
def test_several_trainers_step_one_owner_at_once() -> None:
    module = weft.RemoteModule("worker1", Shared)
    first, second = module.remote_parameters()
    trainers = [
        rpc.rpc_async(f"worker{rank}", step_often, (module.module_rref, params, 25))
        for rank in range(RANKS)
        for params in ([first, second], [second, first])
    ]
    torch.futures.wait_all(trainers)
    assert module.module_rref.rpc_sync().values() == {float(RANKS * 2 * 25)}


# Errors


class Failing(optim.Optimizer):
    """Fails where its parameters are of worker 1 and 2."""

    def __init__(self, params: Any, when: str) -> None:
        super().__init__(params, {})
        self.when = when
        self._check("make")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._check("step")
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.zero_()

    def _check(self, now: str) -> None:
        worker = rpc.get_worker_info()
        if now == self.when and worker.id:
            raise ArithmeticError(f"{worker.name} can't {now}")


@pytest.mark.parametrize(("when", "doing"), [("make", "making the optimizer"), ("step", "step")])
@from_worker0
def test_the_errors_of_all_workers_are_told(when: str, doing: str) -> None:
    assert issubclass(weft.PeerError, RuntimeError)
    parts = make_parts()
    with pytest.raises(weft.PeerError) as caught:
        train_failing(parts, when)
    error = caught.value
    assert error.ranks == (1, 2)
    assert str(error).splitlines() == [
        f"DistributedOptimizer: {doing} failed on 2 of 3 workers:",
        f"  worker 'worker1' (id 1): ArithmeticError: worker1 can't {when}",
        f"  worker 'worker2' (id 2): ArithmeticError: worker2 can't {when}",
    ]
    assert isinstance(error.__cause__, ExceptionGroup)
    assert [str(cause) for cause in error.__cause__.exceptions] == [
        f"worker1 can't {when}",
        f"worker2 can't {when}",
    ]
    has_stepped = [not ask(part, "values")[0].any() for part in parts]
    assert has_stepped == [when == "step", False, False]


def train_failing(parts: list[weft.RemoteModule], when: str) -> None:
    with dist_autograd.context() as context_id:
        optimizer = DistributedOptimizer(Failing, parameters_of(parts), when)
        dist_autograd.backward(context_id, [loss_of(parts, batch(0))])
        optimizer.step(context_id)


@from_worker0
def test_one_error_is_the_cause() -> None:
    (rref,) = weft.RemoteModule("worker1", nn.Linear, (1, 1, False)).remote_parameters()
    with pytest.raises(weft.PeerError) as caught:
        DistributedOptimizer(optim.SGD, [rref], lr=-1.0)
    error = caught.value
    assert "failed on 1 of 1 workers" in str(error)
    assert "Invalid learning rate: -1.0" in str(error)
    assert isinstance(error.__cause__, ValueError)
    assert "On WorkerInfo(id=1, name=worker1)" in str(error.__cause__.__cause__)


@from_worker0
def test_what_cannot_work_is_refused() -> None:
    parts = make_parts()
    with pytest.raises(weft.ConfigTypeError, match=r"there is a Parameter in it. Use weft.rpc.RRef\(param\)"):
        DistributedOptimizer(optim.SGD, [nn.Parameter(torch.ones(1))], lr=0.1)  # type: ignore[list-item]
    with pytest.raises(weft.ConfigError, match="empty parameter list"):
        DistributedOptimizer(optim.SGD, [], lr=0.1)
    with pytest.raises(weft.PeerError, match=r"worker1.*optimizer can only optimize Tensors.*Part"):
        DistributedOptimizer(optim.SGD, [parts[1].module_rref], lr=0.1)  # type: ignore[list-item]
    optimizer = DistributedOptimizer(optim.SGD, parameters_of(parts), lr=0.1)
    with dist_autograd.context() as context_id:
        pass
    with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
        optimizer.step(context_id)
    with pytest.raises(weft.ConfigError, match=r"the state is of workers \['worker7'\]"):
        optimizer.load_state_dict({"worker7": {}})


@run_on(threads=2, **LIMITS)
@with_options(allow=["torch.optim.SGD", "torch.mul"])
@from_worker0
def test_it_works_where_peers_may_name_little() -> None:
    weight = rpc.remote("worker1", torch.mul, (torch.ones(2), 3.0))
    optimizer = DistributedOptimizer(optim.SGD, [weight], lr=0.1)
    with dist_autograd.context() as context_id:
        optimizer.step(context_id)
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(weft.PeerError, match=r"RefusedError: a peer may not use torch.optim.adam.Adam"):
        DistributedOptimizer(optim.Adam, [weight])
    with pytest.raises(weft.ConfigTypeError, match="an RRef to a LocalOptimizer, not to a Tensor"):
        rpc.rpc_sync("worker1", step_local_optimizer, (weight, 1))


# State


@from_worker0
def test_the_state_can_be_saved_and_loaded() -> None:
    parts, others = make_parts(), make_parts()
    optimizers = [
        DistributedOptimizer(optim.SGD, parameters_of(which), lr=0.1, momentum=0.9)
        for which in (parts, others)
    ]
    for step in range(2):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [loss_of(parts, batch(step))])
            optimizers[0].step(context_id)
    for part, other in zip(parts, others, strict=True):
        other.load_state_dict(part.state_dict())
    state = optimizers[0].state_dict()
    assert sorted(state) == ["worker0", "worker1", "worker2"]
    optimizers[1].load_state_dict(state)
    for which, optimizer in zip((parts, others), optimizers, strict=True):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [loss_of(which, batch(2))])
            optimizer.step(context_id)
    for part, other in zip(parts, others, strict=True):
        assert all(torch.equal(*pair) for pair in zip(ask(part, "values"), ask(other, "values"), strict=True))


# Between processes: one of them dies, one has no part in a backward


@run_on()
@pytest.mark.processes
def test_a_worker_that_took_no_part_stays_as_it_is() -> None:
    with Crew(3) as crew:
        crew.join()
        values = crew[0].do(step_part_of_it)
    is_same = [torch.equal(value, Part(rank).weight) for rank, value in enumerate(values)]
    assert is_same == [False, False, True]


@run_on()
@pytest.mark.processes
def test_a_worker_that_dies_is_named_and_the_others_have_stepped() -> None:
    with Crew(3) as crew:
        crew.join()
        with takes(at_most_secs=15):
            told, ranks, stepped = crew[0].do(step_as_one_dies)
    assert "step failed on 1 of 3 workers" in told
    assert "worker 'worker2' (id 2): PeerError: worker 'worker2' (id 2) is gone" in told
    assert ranks == (2,)
    assert not torch.equal(stepped, Part(1).weight)


# Under data parallel


def train_in_parallel(wrap: str, optimizer_kind: str) -> Tensor:
    """Steps of a module that all ranks train together: with contexts, or without."""
    rank = dist.get_rank()
    part = Part(0)
    model = weft.DistributedDataParallel(part, find_unused_parameters=True) if wrap == "ddp" else part
    if wrap == "fully_shard":
        weft.fully_shard(part)
    plain = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    distributed = DistributedOptimizer(
        optim.SGD, [rpc.RRef(param) for param in model.parameters()], lr=0.1, momentum=0.9
    )
    for step in range(3):
        if optimizer_kind == "distributed":
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [loss_of([model], batch(step + rank))])
                distributed.step(context_id)
            assert model.get_parameter("weight" if wrap != "ddp" else "module.weight").grad is None
        else:
            plain.zero_grad()
            loss_of([model], batch(step + rank)).backward()
            plain.step()
    weight = part.weight
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()


@run_on(threads=2, **LIMITS)
@pytest.mark.parametrize("wrap", ["ddp", "fully_shard"])
def test_modules_that_are_trained_in_parallel(worker: Worker, wrap: str) -> None:
    seen, wanted = (train_in_parallel(wrap, kind) for kind in ("distributed", "plain"))
    assert not torch.equal(seen.cpu(), Part(0).weight)
    torch.testing.assert_close(seen, wanted)

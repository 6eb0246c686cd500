"""A distributed optimizer steps parameters of several workers, which are threads of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

import weft
from tests.dist_autograd_bodies.remote_parts import (
    RANKS,
    Part,
    ask,
    batch,
    loss_of,
    make_parts,
    on_threads,
    parameters_of,
)
from weft import DistributedOptimizer, dist_autograd, rpc
from weft.dist_autograd.optimizer import LocalOptimizer, step_local_optimizer
from weft.dist_autograd.quick_steps import step_quickly

# Steps


KINDS = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (optim.Adam, {"lr": 0.1}),
    (optim.Adagrad, {"lr": 0.1}),
]


def train_as_one_process(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
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


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_training_is_that_of_one_process(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    on_threads(train_as_one_process, kind, options)


class Table(nn.EmbeddingBag):
    def __init__(self) -> None:
        super().__init__(6, 2, mode="sum", sparse=True)
        with torch.no_grad():
            self.weight.fill_(1.0)


def step_sparse(kind: type[optim.Optimizer]) -> tuple[Tensor, Tensor]:
    remote, alone = weft.RemoteModule("worker1", Table), Table()
    rows = torch.tensor([[0, 2], [2, 3]])
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [remote(rows).square().sum()])
        DistributedOptimizer(kind, remote.remote_parameters(), lr=0.1).step(context_id)
    alone(rows).square().sum().backward()
    kind(alone.parameters(), lr=0.1).step()  # type: ignore[call-arg]
    return remote.state_dict()["weight"], alone.weight.detach()


@pytest.mark.parametrize("kind", [optim.SGD, optim.SparseAdam])
def test_sparse_gradients(kind: type[optim.Optimizer]) -> None:
    seen, wanted = on_threads(step_sparse, kind)
    torch.testing.assert_close(seen, wanted)
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


def step_from_everywhere() -> set[float]:
    module = weft.RemoteModule("worker1", Shared)
    first, second = module.remote_parameters()
    trainers = [
        rpc.rpc_async(f"worker{rank}", step_often, (module.module_rref, params, 25))
        for rank in range(RANKS)
        for params in ([first, second], [second, first])
    ]
    torch.futures.wait_all(trainers)
    return module.module_rref.rpc_sync().values()


def test_several_trainers_step_one_owner_at_once() -> None:
    assert on_threads(step_from_everywhere) == {float(RANKS * 2 * 25)}


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


def fail(when: str) -> tuple[weft.PeerError, list[Tensor]]:
    parts = make_parts()
    with pytest.raises(weft.PeerError) as caught:
        train_failing(parts, when)
    return caught.value, [ask(part, "values")[0] for part in parts]


def train_failing(parts: list[weft.RemoteModule], when: str) -> None:
    with dist_autograd.context() as context_id:
        optimizer = DistributedOptimizer(Failing, parameters_of(parts), when)
        dist_autograd.backward(context_id, [loss_of(parts, batch(0))])
        optimizer.step(context_id)


@pytest.mark.parametrize(("when", "doing"), [("make", "making the optimizer"), ("step", "step")])
def test_the_errors_of_all_workers_are_told(when: str, doing: str) -> None:
    error, values = on_threads(fail, when)
    assert issubclass(weft.PeerError, RuntimeError)
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
    has_stepped = [not value.any() for value in values]
    assert has_stepped == [when == "step", False, False]


def fail_alone() -> weft.PeerError:
    (rref,) = weft.RemoteModule("worker1", nn.Linear, (1, 1, False)).remote_parameters()
    with pytest.raises(weft.PeerError) as caught:
        DistributedOptimizer(optim.SGD, [rref], lr=-1.0)
    return caught.value


def test_one_error_is_the_cause() -> None:
    error = on_threads(fail_alone)
    assert "failed on 1 of 1 workers" in str(error)
    assert "Invalid learning rate: -1.0" in str(error)
    assert isinstance(error.__cause__, ValueError)
    assert "On WorkerInfo(id=1, name=worker1)" in str(error.__cause__.__cause__)


def refuse() -> None:
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


def test_what_cannot_work_is_refused() -> None:
    on_threads(refuse)


def step_with_little_allowed() -> None:
    options = rpc.TensorPipeRpcBackendOptions(allow=["torch.optim.SGD", "torch.mul"])
    rpc.init_rpc(f"worker{dist.get_rank()}", rpc_backend_options=options)
    if dist.get_rank() == 0:
        weight = rpc.remote("worker1", torch.mul, (torch.ones(2), 3.0))
        optimizer = DistributedOptimizer(optim.SGD, [weight], lr=0.1)
        with dist_autograd.context() as context_id:
            optimizer.step(context_id)
        optimizer.load_state_dict(optimizer.state_dict())
        with pytest.raises(weft.PeerError, match=r"RefusedError: a peer may not use torch.optim.adam.Adam"):
            DistributedOptimizer(optim.Adam, [weight])
        with pytest.raises(weft.ConfigTypeError, match="an RRef to a LocalOptimizer, not to a Tensor"):
            rpc.rpc_sync("worker1", step_local_optimizer, (weight, 1))
    rpc.shutdown()


def test_it_works_where_peers_may_name_little() -> None:
    weft.launch(step_with_little_allowed, ranks=2, kind="thread", timeout=60)


def load_crafted_states() -> None:
    options = rpc.TensorPipeRpcBackendOptions(allow=["torch.optim.Adam", "torch.mul"])
    rpc.init_rpc(f"worker{dist.get_rank()}", rpc_backend_options=options)
    if dist.get_rank() == 0:
        weight = rpc.remote("worker1", torch.mul, (torch.ones(100), 3.0))
        for is_fused in (True, False):
            optimizer = DistributedOptimizer(optim.Adam, [weight], lr=0.1, fused=is_fused)
            state = optimizer.state_dict()["worker1"]
            kept = {"step": torch.tensor(1.0), "exp_avg": torch.ones(1, 2), "exp_avg_sq": torch.ones(3)}
            short = {**state, "state": {0: kept}}
            single = {**state, "state": {0: kept | {"exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)}}}
            chosen = {
                **state,
                "param_groups": [{**group, "fused": not is_fused} for group in state["param_groups"]],
            }
            for crafted in (
                chosen,
                {"state": [], "param_groups": {}},
                *([short, single] if is_fused else []),
            ):
                with pytest.raises(weft.PeerError, match="has not the form that weft's workers send"):
                    optimizer.load_state_dict({"worker1": crafted})
            optimizer.load_state_dict(optimizer.state_dict())
    rpc.shutdown()


def test_fused_kernels_get_no_state_that_is_too_short() -> None:
    weft.launch(load_crafted_states, ranks=2, kind="thread", timeout=60)


FUSED = [
    (optim.SGD, {"lr": 1.0, "momentum": 0.5}),
    (optim.Adam, {"lr": 0.5, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.5}),
    (optim.Adagrad, {"lr": 0.5}),
]
ROWS, COLUMNS = 40, 50


def step_once(
    kind: type[optim.Optimizer], options: dict[str, Any], grad: Tensor, state: Any = None
) -> Tensor:
    """A parameter's values after a step, with a gradient and a state that lie in any way."""
    local = LocalOptimizer(kind, [nn.Parameter(torch.zeros(COLUMNS, ROWS).t())], kwargs=options)
    ((_, twin),) = local._pairs
    if state is not None:
        twin.grad = torch.ones_like(twin)
        local.optim.step()
        for name in local.optim.state[twin].keys() - {"step"}:
            local.optim.state[twin][name] = state()
    twin.grad = grad
    step_quickly(local.optim)
    return twin.detach()


@pytest.mark.parametrize(("kind", "options"), FUSED)
def test_fused_kernels_walk_gradients_and_states_that_lie_in_any_way(
    kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    """Torch's kernels walk each from its first element on: they would read and write beyond expanded ones."""
    fused = options | {"fused": True}
    grads = [
        torch.tensor(2.0).expand(ROWS, COLUMNS),
        torch.arange(float(COLUMNS)).expand(ROWS, COLUMNS),
        torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS),
        torch.arange(float(2 * ROWS * COLUMNS)).view(ROWS, 2 * COLUMNS)[:, ::2],
    ]
    for grad in grads:
        torch.testing.assert_close(step_once(kind, fused, grad), step_once(kind, options, grad.clone()))
        expanded = step_once(kind, fused, grad, lambda: torch.tensor(0.5).expand(ROWS, COLUMNS))
        written_out = step_once(kind, options, grad.clone(), lambda: torch.full((ROWS, COLUMNS), 0.5))
        torch.testing.assert_close(expanded, written_out)


def test_fused_kernels_get_no_parameter_that_lies_in_its_own_way() -> None:
    for param in (torch.zeros(1).expand(100), torch.zeros(100, 2)[:, 0]):
        local = LocalOptimizer(optim.SGD, [param.requires_grad_()], kwargs={"lr": 1.0, "fused": True})
        ((_, twin),) = local._pairs
        twin.grad = torch.ones(100)
        with pytest.raises(weft.ConfigError, match="elements must lie side by side"):
            step_quickly(local.optim)


@pytest.mark.parametrize("state", [torch.zeros(1), torch.zeros(100, 1), torch.zeros(100).to_sparse()])
def test_fused_kernels_get_no_state_of_another_shape(state: Tensor) -> None:
    local = LocalOptimizer(optim.Adam, [torch.zeros(100).requires_grad_()], kwargs={"lr": 1.0, "fused": True})
    ((_, twin),) = local._pairs
    twin.grad = torch.ones(100)
    step_quickly(local.optim)
    local.optim.state[twin]["exp_avg"] = state
    with pytest.raises(weft.ConfigError, match="the state 'exp_avg' of a parameter"):
        step_quickly(local.optim)


def step_by_sums() -> None:
    """The gradient of a sum is one number, expanded: so it travels, and so it arrives at its parameter."""
    rpc.init_rpc(f"worker{dist.get_rank()}")
    if dist.get_rank() == 0:
        weight = rpc.remote("worker1", make_weight)
        optimizer = DistributedOptimizer(optim.SGD, [weight], lr=1.0, fused=True)
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [weight.to_here().sum()])
            optimizer.step(context_id)
        assert weight.to_here().equal(torch.full((10_000,), -1.0))
    rpc.shutdown()


def make_weight() -> Tensor:
    return torch.zeros(10_000, requires_grad=True)


def test_a_fused_step_with_the_gradient_of_a_sum() -> None:
    weft.launch(step_by_sums, ranks=2, kind="thread", timeout=60)


# State


def take_state_over() -> None:
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


def test_the_state_can_be_saved_and_loaded() -> None:
    on_threads(take_state_over)


# Under data parallel


def train_in_parallel(wrap: str, optimizer_kind: str) -> Tensor:
    """Steps of a module that all ranks train together: with contexts, or without."""
    rank = dist.get_rank()
    rpc.init_rpc(f"worker{rank}")
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
    rpc.shutdown()
    weight = part.weight
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()


@pytest.mark.parametrize("wrap", ["ddp", "fully_shard"])
def test_modules_that_are_trained_in_parallel(wrap: str) -> None:
    seen, wanted = (
        weft.launch(train_in_parallel, ranks=2, kind="thread", args=(wrap, kind), timeout=60)
        for kind in ("distributed", "plain")
    )
    for here, there in zip(seen, wanted, strict=True):
        assert not torch.equal(here.cpu(), Part(0).weight)
        torch.testing.assert_close(here, there)

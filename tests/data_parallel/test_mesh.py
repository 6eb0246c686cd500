"""Data parallel along an axis of a mesh, over tensor-parallel modules: memory, traffic, hooks, placements."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import weft
from tests.data_parallel.cases import cases
from tests.data_parallel.mesh_twins import (
    MLP,
    Branching,
    MeshTwin,
    Normed,
    assert_lies_as,
    cut,
    full,
    local_grads,
    make_rows,
    memory_of,
    mesh_of,
)
from tests.data_parallel.twins import WIDTH, assert_same_gradient, filled
from tests.ranks import run_on
from weft.comm_hooks import GradBucket
from weft.comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from weft.data_parallel import MixedPrecision
from weft.errors import ConfigError, DesyncError, StateError
from weft.optimizers.in_backward import apply_optimizer_in_backward
from weft.tensor_parallel import parallelize_module
from weft.testing import Expect, assert_calls

pytestmark = run_on(threads=4)

VIEW = pytest.mark.parametrize("view", [False, True])


def settled_twin(model: nn.Module, **options: Any) -> MeshTwin:
    """After two steps buckets are as they will be; gradients are None."""
    twin = MeshTwin(model, **options)
    for step in range(2):
        twin.step(step)
    return twin


# Memory


@VIEW
def test_gradients_are_views_of_one_bucket(view: bool) -> None:
    """Plain ones and those in DTensors."""
    twin = settled_twin(Normed(), gradient_as_bucket_view=view)
    twin.backward(make_rows(5))
    twin.check()
    assert len({memory_of(grad) for grad in local_grads(twin.model)}) == 1
    before = [param.grad for param in twin.model.parameters()]
    twin.zero(to_none=False)
    twin.backward(make_rows(6))
    twin.check()
    for param, grad in zip(twin.model.parameters(), before, strict=True):
        assert param.grad is grad  # no DTensor is made in a step


def test_gradients_that_the_user_keeps_keep_their_values() -> None:
    for keep in (kept_dtensors, kept_locals):
        twin = settled_twin(Normed())
        twin.backward(make_rows(5))
        kept = keep(twin.model)
        values = [full(grad).clone() for grad in kept]
        twin.zero()
        twin.backward(make_rows(6))
        twin.check()
        for grad, value in zip(kept, values, strict=True):
            assert torch.equal(full(grad), value)


def kept_dtensors(model: nn.Module) -> list[Any]:
    return [param.grad for param in model.parameters() if isinstance(param, DTensor)]


def kept_locals(model: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [grad.to_local() for grad in kept_dtensors(model)]


def test_the_mean_is_copied_into_a_gradient_of_the_users_own() -> None:
    twin = settled_twin(Normed())
    own = {}
    for name, param in twin.model.named_parameters():
        own[name] = param.grad = torch.zeros_like(param)
    twin.backward(make_rows(5))
    twin.check()
    for name, param in twin.model.named_parameters():
        assert param.grad is own[name]  # those that get addends too: they were added up in it


def test_two_dtensors_may_share_what_came() -> None:
    """Summing the addends of one must not change the other's, nor what flows on."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Parameter(torch.zeros(3, WIDTH)) for _ in range(2))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            one, two = (
                param.to_local(grad_placements=[Partial()]) if isinstance(param, DTensor) else param
                for param in (self.one, self.two)
            )
            return (rows + one + two).square()

    mesh = mesh_of()
    model = filled(Shift())
    single = copy.deepcopy(model)
    for name in ("one", "two"):
        whole = getattr(model, name).detach()
        setattr(model, name, nn.Parameter(distribute_tensor(whole, mesh["tp"], [Replicate()])))
    ddp = weft.DistributedDataParallel(model, device_mesh=mesh["dp"])
    for step in range(3):
        rows = make_rows(step)[:, 0].requires_grad_()
        ddp(rows.chunk(2)[mesh["dp"].get_local_rank()]).mean().backward()
        seen, rows.grad = rows.grad, None
        losses = [single(part).mean() for part in rows.chunk(2)]
        torch.stack(losses).sum().backward()
        mine = slice(3 * mesh["dp"].get_local_rank(), 3 * mesh["dp"].get_local_rank() + 3)
        assert torch.equal(seen[mine], rows.grad[mine])
        for param, right in zip(model.parameters(), single.parameters(), strict=True):
            # Two ranks with the same rows: their addends come to twice the gradient of one.
            assert_same_gradient(full(param.grad), right.grad, tolerance=1e-12)
            param.grad = right.grad = None


# Traffic


def test_only_addends_are_summed_on_the_parameters_axis_and_buckets_hold_local_gradients() -> None:
    twin = settled_twin(Normed())
    with weft.record() as events:
        twin.backward(make_rows(5))
    ours = [event for event in events if event.feature == "ddp"]
    numel = sum(grad.numel() for grad in local_grads(twin.model))
    marks = len(twin.params) + 1
    assert_calls(
        ours,
        [
            Expect("all_reduce", bytes_in=8 * WIDTH),
            Expect("all_reduce", bytes_in=8 * WIDTH),
            Expect("all_reduce", bytes_in=8 * (numel + marks)),
        ],
    )
    facts = twin.parallel._get_ddp_logging_data()
    assert facts["total_parameter_size_bytes"] == 8 * numel
    assert facts["bucket_sizes"] == str(8 * numel)


def test_without_sync_nothing_is_sent() -> None:
    twin = settled_twin(Normed())
    with weft.record() as events, twin.parallel.no_sync():
        twin.backward(make_rows(5))
    assert not [event for event in events if event.feature == "ddp"]


# Hooks


def test_a_gradient_hook_sees_the_parameters_and_local_numbers() -> None:
    twin = MeshTwin(Normed())
    group = twin.mesh["dp"].get_group()

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        again = bucket.with_buffer(bucket.buffer().float())
        assert {*map(id, again.parameters())} == {*map(id, bucket.parameters())}
        assert all(grad.dtype == torch.float32 for grad in again.gradients())
        for param, grad, piece in zip(bucket.parameters(), bucket.gradients(), bucket.pieces(), strict=True):
            assert param is twin.params[names[id(param)]]
            if isinstance(param, DTensor):
                assert_lies_as(grad, param)
                assert isinstance(grad, DTensor)
                grad = grad.to_local()
            assert not isinstance(piece, DTensor)
            assert (piece.shape, piece.data_ptr()) == (grad.shape, grad.data_ptr())
            grad.div_(group.size())
        assert bucket.buffer().numel() == sum(piece.numel() for piece in bucket.pieces())
        return weft.comm.all_reduce(bucket.buffer(), group=group).future()

    names = {id(param): name for name, param in twin.params.items()}
    twin.parallel.register_comm_hook(None, hook)
    for step in range(3):
        twin.step(step)


def test_low_rank_gradients_of_full_rank_are_the_mean() -> None:
    """PowerSGD looks at each gradient's shape: the local one."""
    twin = MeshTwin(MLP())
    state = PowerSGDState(
        twin.mesh["dp"].get_group(),
        matrix_approximation_rank=WIDTH,
        start_powerSGD_iter=2,
        min_compression_rate=0.1,
    )
    twin.parallel.register_comm_hook(state, powerSGD_hook)
    for step in range(4):
        twin.backward(make_rows(step))
        twin.check(1e-6)
        twin.zero()


def test_optimizers_in_backward_step_with_the_mean() -> None:
    twin = MeshTwin(Normed())
    optimizer = torch.optim.SGD(twin.single.parameters(), lr=0.1)
    apply_optimizer_in_backward(torch.optim.SGD, twin.model.parameters(), {"lr": 0.1})
    for step in range(3):
        twin.backward(make_rows(step))
        optimizer.step()
        twin.zero()
    twin.check_parameters()


def test_tensor_hooks_run_once_with_what_came() -> None:
    twin = MeshTwin(Normed())
    seen: list[torch.Tensor] = []
    twin.model.norm.weight.register_hook(seen.append)
    twin.step(0)
    (grad,) = seen
    assert isinstance(grad, DTensor)


def test_a_hook_that_makes_a_plain_tensor_of_a_gradient_is_named() -> None:
    twin = MeshTwin(Normed())
    twin.model.norm.weight.register_hook(lambda grad: full(grad))
    with pytest.raises(StateError, match=r"'norm\.weight'.*came as a Tensor.*must return a DTensor"):
        twin.run(twin.parallel, make_rows(0), twin.dp_rank).backward()


# Placements


@pytest.mark.parametrize(
    ("have", "want"),
    cases(
        [Partial(), Partial("avg"), Replicate(), Shard(0), Shard(1)],
        [Replicate(), Shard(0), Shard(1)],
        everyday=lambda have, want: want != Shard(1) or have in (Partial(), Shard(0)),
    ),
)
def test_gradients_in_any_placements_come_to_the_parameters(have: Any, want: Any) -> None:
    mesh = mesh_of()
    rank = mesh["dp"].get_local_rank()
    whole = torch.arange(24.0).reshape(4, 6) * (1 + rank)
    if isinstance(have, Partial):
        part = whole * (0.25 if mesh["tp"].get_local_rank() else 0.75)
        given = DTensor.from_local(
            part if have == Partial() else 2 * part, mesh["tp"], [have], run_check=False
        )
    else:
        given = distribute_tensor(whole, mesh["tp"], [have], src_data_rank=None)

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh["tp"], [want]))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return Given.apply(self.weight, rows)

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return rows.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return given.clone(), None

    ddp = weft.DistributedDataParallel(Scale(), device_mesh=mesh["dp"])
    for _ in range(2):
        ddp(torch.ones(1)).backward()
        assert_lies_as(ddp.module.weight.grad, ddp.module.weight)
        assert torch.equal(full(ddp.module.weight.grad), torch.arange(24.0).reshape(4, 6) * 1.5)
        ddp.zero_grad()


def test_parameters_on_several_axes_besides() -> None:
    """Addends on one of them."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "a", "b"))
    model: Any = nn.Module()
    whole = torch.arange(8.0).reshape(2, 4)
    model.weight = nn.Parameter(distribute_tensor(whole, mesh["a", "b"], [Replicate(), Shard(1)]))
    model.forward = lambda rows: (model.weight.to_local(grad_placements=[Partial(), Shard(1)]) * rows).sum()
    ddp = weft.DistributedDataParallel(model, device_mesh=mesh["dp"])
    for _ in range(2):
        ddp(torch.ones(1)).backward()
        assert_lies_as(model.weight.grad, model.weight)
        assert torch.equal(full(model.weight.grad), torch.full((2, 4), 2.0))
        ddp.zero_grad()


# Precision


def test_mixed_precision() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    twin = MeshTwin(MLP(), dtype=torch.float32, mixed_precision=precision)
    for step in range(3):
        twin.backward(make_rows(step).float())
        for param in twin.model.parameters():
            assert param.grad.dtype == torch.float32
        twin.check(0.06)
        twin.zero()


# Refusals


def split_mlp(axis: str = "tp") -> nn.Module:
    model = filled(MLP())
    parallelize_module(model, mesh_of()[axis], model.plan())
    return model


def test_a_group_that_holds_several_pieces_is_refused() -> None:
    for options in ({}, {"device_mesh": mesh_of()["tp"]}):
        with pytest.raises(ConfigError, match=r"'up\.weight' is a DTensor on ranks .*mesh\['tp'\]"):
            weft.DistributedDataParallel(split_mlp(), **options)


def test_a_parameter_whose_mesh_has_the_data_parallel_axis_is_refused() -> None:
    mesh = mesh_of()
    for requires_grad in (True, False):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        whole = distribute_tensor(model[0].weight.detach(), mesh, [Replicate(), Shard(0)], src_data_rank=None)
        model[0].weight = nn.Parameter(whole, requires_grad=requires_grad)
        with pytest.raises(RuntimeError, match=r"'0\.weight' is a DTensor on ranks \[0, 1, 2, 3\]"):
            weft.DistributedDataParallel(model, device_mesh=mesh["dp"])


def test_another_group_must_fit_too() -> None:
    mesh = mesh_of()
    ddp = weft.DistributedDataParallel(split_mlp(), device_mesh=mesh["dp"])
    with pytest.raises(ConfigError, match="one rank in common"):
        ddp._update_process_group(dist.group.WORLD)
    assert ddp.process_group is mesh["dp"].get_group()
    ddp(make_rows(0)).sum().backward()


def test_ranks_with_different_pieces_are_told_so() -> None:
    """A group across the axes: equal shapes, and yet not the same parameter."""
    model = split_mlp()
    pairs = [dist.new_group(pair) for pair in ([0, 3], [1, 2])]
    with pytest.raises(DesyncError, match=r"piece \(.*piece \(") as caught:
        weft.DistributedDataParallel(model, process_group=pairs[dist.get_rank() in (1, 2)])
    assert "'up.weight' of shape [3, 6], float64, piece (1,) of [7, 6]" in str(caught.value)


def test_sparse_gradients_are_refused() -> None:
    mesh = mesh_of()
    model = nn.Sequential(nn.Embedding(4, 4, sparse=True))
    cut(model, mesh["tp"])
    with pytest.raises(ConfigError, match=r"'0\.weight' is a DTensor.*sparse=False"):
        weft.DistributedDataParallel(model, device_mesh=mesh["dp"])


# replicate


def test_parameters_on_the_whole_mesh_are_refused_at_once_and_nothing_is_changed() -> None:
    model = filled(MLP())
    parallelize_module(model, mesh_of()["tp"], model.plan())
    with pytest.raises(ConfigError, match=r"'up\.weight' is a DTensor on ranks .*one rank in common"):
        weft.replicate(model)
    assert type(model) is MLP
    weft.replicate(model, device_mesh=mesh_of()["dp"])


def test_ignored_modules_may_lie_anywhere() -> None:
    mesh = mesh_of()
    model = filled(MLP())
    parallelize_module(model, mesh["tp"], model.plan())
    weft.replicate(model, ignored_modules=[model.up, model.down])  # over all four ranks
    model(make_rows(mesh["dp"].get_local_rank())[:2]).sum().backward()
    mean = model.head.bias.grad
    assert isinstance(model.up.weight.grad, DTensor)
    assert not isinstance(mean, DTensor)
    weft.comm.broadcast(right := mean.clone(), 0).wait()
    assert torch.equal(mean, right)


def test_children_are_replicated_before_their_parent() -> None:
    """Two reducers at work in one backward, both with addends to sum."""

    def wrap(model: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for child in (model.norm, model.down):
            weft.replicate(child, device_mesh=device_mesh)
        return weft.replicate(model, device_mesh=device_mesh)

    twin = MeshTwin(Branching(), wrap)
    for step in range(3):
        twin.step(step)

"""replicate: data parallel without a wrapper, on a module, its children or both."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import weft
from tests.data_parallel.cases import FULL, cases
from tests.data_parallel.hooks import future_of, mean_hook
from tests.data_parallel.libraries import ON_TORCH, DistributedDataParallel, replicate, weft_only
from tests.data_parallel.models import Branches, loss_by_rank
from tests.data_parallel.twins import (
    WIDTH,
    Twin,
    all_ranks,
    assert_same_gradients,
    filled,
    gradients_of,
    make_rows,
    mean_square,
    net,
    rows_of,
)
from tests.ranks import run_on

if ON_TORCH:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
else:
    from weft.comm_hooks import default_hooks

pytestmark = run_on(threads=2)


def replicated(model: nn.Module, **options: Any) -> Twin:
    return Twin(model, wrap=replicate, **options)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("cap", [0.0001, pytest.param(25, marks=FULL)])
def test_gradients_are_those_of_a_single_process(view: bool, cap: float) -> None:
    twin = replicated(net(), gradient_as_bucket_view=view, bucket_cap_mb=cap)
    for step in range(3):
        twin.step(make_rows(step))


@run_on(threads=4)
def test_four_ranks() -> None:
    twin = replicated(net())
    for step in range(3):
        twin.step(make_rows(step))


def test_the_module_itself_comes_back() -> None:
    model = net()
    assert replicate(model) is model
    assert isinstance(model, nn.Sequential)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in net().named_parameters()]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in net().named_modules()]
    assert type(model[0]) is nn.Linear


def test_the_state_dict_is_as_before() -> None:
    model = filled(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    right = copy.deepcopy(model.state_dict())
    replicate(model)
    seen = model.state_dict()
    assert list(seen) == list(right)
    assert all(torch.equal(seen[name], right[name]) for name in right)
    mean_square(model, rows_of(make_rows(), dist.get_rank()), 0).backward()
    assert list(model.state_dict()) == list(right)
    model.load_state_dict(right)


@run_on(threads=3)
def test_parameters_come_from_the_first_rank() -> None:
    model = filled(nn.Linear(WIDTH, WIDTH), seed=dist.get_rank())
    replicate(model)
    model(make_rows())  # torch does it in the first forward
    right = filled(nn.Linear(WIDTH, WIDTH), seed=0)
    assert torch.equal(model.weight, right.weight)


def test_ignored_modules_stay_local() -> None:
    model, bare = net(), net()
    replicate(model, ignored_modules=[model[2]])
    for step in range(2):
        rows = rows_of(make_rows(step), dist.get_rank())
        for one in (model, bare):
            one.zero_grad()
            mean_square(one, rows, 0).backward()
        assert_same_gradients(model[2], bare[2])
        for place in (0, 4):
            mean = torch.stack(all_ranks(bare[place].weight.grad)).mean(0)
            torch.testing.assert_close(model[place].weight.grad, mean, rtol=1e-12, atol=1e-14)


def test_children_each_for_themselves() -> None:
    model = net()
    twin = Twin(model, wrap=lambda whole: whole)
    for child in model:
        if list(child.parameters()):
            replicate(child)
    for step in range(3):
        twin.step(make_rows(step))


@weft_only("reduces what the children have twice")
def test_children_then_the_root() -> None:
    """The root takes care of what no child does; every gradient is reduced once."""
    model = net()
    twin = Twin(model, wrap=lambda whole: whole)
    replicate(model[0])
    replicate(model[2])
    replicate(model)
    for step in range(3):
        twin.step(make_rows(step))
    with weft.record() as events:
        twin.backward(make_rows(5))
    sent = sum(e.bytes_in for e in events if e.op.startswith("all_reduce") and e.dtype.is_floating_point)
    right = 3 * (WIDTH * WIDTH + WIDTH) * 8
    assert right <= sent <= right + 2 * 6 * 8  # a flag for each parameter and bucket may ride along


def test_twice_on_one_module_is_refused_by_name() -> None:
    model = net()
    replicate(model)
    with pytest.raises((RuntimeError, ValueError, AssertionError), match="replicate") as caught:
        replicate(model)
    assert ON_TORCH or "Sequential" in str(caught.value)


def test_a_hook() -> None:
    twin = replicated(net())
    calls: list[int] = []

    def hook(state, bucket):
        state.append(bucket.index())
        return mean_hook(None, bucket)

    twin.parallel.register_comm_hook(calls, hook)
    for step in range(2):
        calls.clear()
        twin.step(make_rows(step))
        assert calls
        assert calls == list(range(len(calls)))


def test_a_hook_decides_what_the_gradients_become() -> None:
    model: Any = replicate(net())
    model.register_comm_hook(None, lambda state, bucket: future_of(bucket.buffer().fill_(4.0)))
    mean_square(model, make_rows(), 0).backward()
    assert all((param.grad == 4).all() for param in model.parameters())


def test_gradient_sync_switched_off_and_on() -> None:
    twin = replicated(net())
    for step in range(3):
        local = net()
        local.load_state_dict(twin.single.state_dict())
        twin.parallel.set_requires_gradient_sync(False)
        for part in range(2):
            rows = make_rows(10 * step + part)
            twin.backward(rows)
            mean_square(local, rows_of(rows, dist.get_rank()), 0).backward()
        assert_same_gradients(twin.parallel, local)
        twin.parallel.set_requires_gradient_sync(True)
        twin.backward(make_rows(10 * step + 5))
        twin.check()
        twin.update()


def test_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    twin = replicated(net(), device_mesh=mesh)
    for step in range(2):
        twin.step(make_rows(step))


@run_on(threads=4)
def test_one_axis_of_a_mesh() -> None:
    """Rows of the mesh replicate; its columns know nothing of each other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "replicas"))
    model = net()
    bare = copy.deepcopy(model)
    replicate(model, device_mesh=mesh["replicas"])
    rows = rows_of(make_rows(), dist.get_rank())
    mean_square(model, rows, 0).backward()
    mean_square(bare, rows, 0).backward()
    mates = [0, 1] if dist.get_rank() < 2 else [2, 3]
    local = all_ranks(bare[0].weight.grad)
    mean = torch.stack([local[mate] for mate in mates]).mean(0)
    torch.testing.assert_close(model[0].weight.grad, mean, rtol=1e-12, atol=1e-14)


def test_the_state_is_there() -> None:
    model = replicate(net())
    assert replicate.state(model) is not None
    if not ON_TORCH:
        assert replicate.state(net()) is None


def test_a_device_of_the_cpu_is_accepted() -> None:
    twin = replicated(net(), device_id=torch.device("cpu"))
    twin.step(make_rows())


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"Expected device_id to be int or torch\.device"):
        replicate(net(), device_id=[torch.device("cpu")])


@weft_only("raises without the flag")
def test_unused_parameters() -> None:
    twin = replicated(Branches("abc"))
    for step, names in enumerate([("ab", "c"), ("a",), ("c", "b"), ("abc",)]):
        twin.step(make_rows(step), loss_by_rank(*names))


def test_buffers_are_broadcast() -> None:
    model: Any = nn.Sequential(net(1), nn.BatchNorm1d(WIDTH).double())
    replicate(model)
    if ON_TORCH:
        pytest.skip("torch gives DDP the parameters and forgets the buffers")
    for _ in range(2):
        model[1].running_mean.fill_(float(dist.get_rank() + 5))
        model.eval()
        model(make_rows())
        assert (model[1].running_mean == 5).all()


@weft_only("refuses it")
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_deepcopy_is_a_replica_too(steps_before: int) -> None:
    twin = replicated(net())
    for step in range(steps_before):
        twin.step(make_rows(step))
    other = Twin(net(), wrap=lambda whole: whole)
    other.parallel, other.single = copy.deepcopy(twin.parallel), copy.deepcopy(twin.single)
    for step in range(2):
        other.step(make_rows(step + 5))
    assert all(param.grad is None for param in twin.parallel.parameters())
    twin.step(make_rows(9))


def test_a_replica_inside_of_a_plain_module() -> None:
    model = nn.Sequential(net(), nn.Identity())
    twin = Twin(model, wrap=lambda whole: whole)
    replicate(model[0])
    for step in range(2):
        twin.step(make_rows(step))


@weft_only("makes a container without modules")
def test_indexing_a_container_gives_what_is_in_it() -> None:
    model: Any = replicate(net())
    part = model[:2]
    assert isinstance(part, nn.Sequential)
    assert part[0] is model[0]


# -- the contract's tests, eagerly: accumulation, checkpoints and hooks, beside DDP ------------

DIM = 24
ROUNDINGS = {
    "": 1e-6,
    "fp16_compress_hook": 2**-9,
    "bf16_compress_hook": 2**-6,
}  # of the tensor's largest value
HOOKS = [name for name in ROUNDINGS if not (ON_TORCH and name.startswith("bf16"))]  # torch: on a GPU only


class Net(nn.Module):
    """Four layers, the first of them behind a checkpoint if asked for."""

    def __init__(self, use_checkpoint: bool = False) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3, self.fc4 = (nn.Linear(DIM, DIM) for _ in range(4))
        self.use_checkpoint = use_checkpoint
        filled(self, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = checkpoint(self.fc1, x, use_reentrant=False) if self.use_checkpoint else self.fc1(x)
        return self.fc4(self.fc3(self.fc2(first)))


def train_beside_a_single_process(use_checkpoint: bool, no_sync: bool, hook: str) -> None:
    single = Net(use_checkpoint)
    replica: Any = replicate(copy.deepcopy(single), bucket_cap_mb=0.002)
    ddp = DistributedDataParallel(copy.deepcopy(single), bucket_cap_mb=0.002)
    if hook:
        for model in (replica, ddp):
            model.register_comm_hook(None, getattr(default_hooks, hook))
    models: list[Any] = [single, replica, ddp]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    for step in range(6):
        is_synced = not no_sync or step % 2 == 1
        rows = make_rows(step, width=DIM).float()
        mine = rows_of(rows, dist.get_rank())
        replica.set_requires_gradient_sync(is_synced)
        single(rows).square().mean().backward()
        replica(mine).square().mean().backward()
        with ddp.no_sync() if not is_synced else torch.enable_grad():
            ddp(mine).square().mean().backward()
        if is_synced:
            assert_same_gradients(replica, single, ROUNDINGS[hook])
            for name, grad in gradients_of(ddp).items():
                assert torch.equal(grad, gradients_of(replica)[name]), name
            # All go on from one point: what a hook rounds off is no error of the next step.
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            replica.load_state_dict(single.state_dict())
            ddp.module.load_state_dict(single.state_dict())


@pytest.mark.parametrize(
    ("use_checkpoint", "no_sync", "hook"),
    cases(
        [False, True],
        [False, True],
        HOOKS,
        everyday=lambda use_checkpoint, no_sync, hook: not hook or not (use_checkpoint or no_sync),
    ),
)
def test_replicate_and_ddp(use_checkpoint: bool, no_sync: bool, hook: str) -> None:
    train_beside_a_single_process(use_checkpoint, no_sync, hook)


@run_on(threads=4)
def test_on_four_ranks() -> None:
    train_beside_a_single_process(use_checkpoint=True, no_sync=True, hook="")

"""Data parallel along one axis of a mesh, over modules that are tensor parallel along another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from tests.data_parallel.mesh_twins import (
    MLP,
    MODELS,
    Branching,
    Deep,
    MeshTwin,
    Normed,
    Words,
    assert_lies_as,
    cut,
    full,
    local_grads,
    make_rows,
    mesh_of,
    wrapper,
)
from tests.data_parallel.twins import ROUNDINGS, WIDTH, assert_same_gradient, filled
from tests.ranks import run_on
from weft import DistributedDataParallel, replicate
from weft.comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from weft.join import Join
from weft.tensor_parallel import (
    parallelize_module,
)

pytestmark = [
    run_on(threads=4, kind=["ddp"]),
    run_on(threads=4, kind=["replicate"], full=True),
    # One kind on each backend: what differs between them doesn't know of the group.
    run_on(weft=4, kind=["ddp"], full=True),
    run_on(gloo=4, kind=["replicate"], full=True),
]


def test_training(kind: str) -> None:
    for make in MODELS:
        train(MeshTwin(make(), kind, bucket_cap_mb=0.0005), torch.optim.SGD, ROUNDINGS)
    # Adam's steps are as large for a small gradient as for a large one, and so are roundings.
    train(MeshTwin(Words(), kind), torch.optim.Adam, 1e5 * ROUNDINGS)


def train(twin: MeshTwin, optimizer: Callable[..., torch.optim.Optimizer], tolerance: float) -> None:
    optimizers = [optimizer(model.parameters(), lr=0.01) for model in (twin.model, twin.single)]
    for step in range(5):
        twin.backward(make_rows(step))
        twin.check(tolerance)
        for each in optimizers:
            each.step()
        twin.zero()
    twin.check_parameters(tolerance)


def test_other_meshes(kind: str) -> None:
    """The axes in the other order, and axes of one rank."""
    for dp, tp, order in ((2, 2, "tp dp"), (4, 1, "dp tp"), (1, 4, "dp tp")):
        twin = MeshTwin(Words(), kind, mesh_of(dp, tp, order))
        for step in range(3):
            twin.step(step)


def test_accumulation(kind: str) -> None:
    for view in (False, True):
        twin = MeshTwin(Words(), kind, gradient_as_bucket_view=view, bucket_cap_mb=0.0005)
        for step in range(2):
            for part in range(2):
                with without_sync(twin.parallel):
                    twin.backward(make_rows(10 * step + part))
            twin.backward(make_rows(10 * step + 2))
            twin.check()
            twin.backward(make_rows(10 * step + 3))  # on top of a mean, which all ranks have
            twin.check()
            twin.zero(to_none=step == 0)


@contextmanager
def without_sync(model: Any) -> Generator[None]:
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def test_sync_noticed_late(kind: str) -> None:
    """One backward through two forwards. Addends of the one without sync come before the other is seen."""
    twin = MeshTwin(Branching(), kind, bucket_cap_mb=0.0005)
    twin.step(0)
    for step in range(1, 3):
        rows = make_rows(step)
        synced = twin.run(twin.parallel, rows, twin.dp_rank, branches=False)
        with without_sync(twin.parallel):
            local = twin.run(twin.parallel, rows, twin.dp_rank)
        (synced + local).backward()
        for rank in range(2):
            loss: Any = sum(twin.run(twin.single, rows, rank, branches=wanted) for wanted in (False, True))
            (loss / 2).backward()
        twin.check()
        twin.zero()


def test_different_buckets(kind: str) -> None:
    """Ranks of one tensor-parallel group plan other buckets, and stay in step on their own axis."""
    twin = MeshTwin(Deep(), kind, bucket_cap_mb=0.0002)
    for step in range(4):
        twin.step(step)
    replica = twin.parallel._replica if kind == "ddp" else replicate.state(twin.parallel).replica
    plans: list[Any] = [None, None]
    own = [bucket.params for bucket in replica.reducer.bucket_set.plan]
    dist.all_gather_object(plans, own, group=twin.mesh["tp"].get_group())
    assert plans[0] != plans[1]


def test_unused_after_accumulation(kind: str) -> None:
    """What came without sync, as addends too, is reduced with a step that doesn't use those parameters."""
    for options in ({}, {"find_unused_parameters": True}):
        twin = MeshTwin(Branching(), kind, bucket_cap_mb=0.0005, **options)
        for step in range(2):
            with without_sync(twin.parallel):
                twin.backward(make_rows(step))
            twin.backward(make_rows(10 + step), lambda _: {"branches": False})
            # Nobody used them in the step that reduced, but somebody since the last reduction.
            twin.check()
            twin.zero()


def test_unused_on_one_rank(kind: str) -> None:
    for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        twin = MeshTwin(Branching(), kind, bucket_cap_mb=0.0005, **options)
        for step in range(2):
            twin.step(step, lambda dp_rank, step=step: {"branches": dp_rank == step % 2})
        twin.step(5, lambda _: {"branches": False})
        assert all(param.grad is None for param in twin.model.parameters())


def test_static_graph(kind: str) -> None:
    twin = MeshTwin(Normed(), kind, static_graph=True, bucket_cap_mb=0.0005)
    for step in range(3):
        twin.step(step)


def test_compressed(kind: str) -> None:
    for hook, roundings in ((fp16_compress_hook, 2**-9), (bf16_compress_hook, 2**-6)):
        twin = MeshTwin(Normed(), kind, dtype=torch.float32)
        twin.parallel.register_comm_hook(twin.mesh["dp"].get_group(), hook)
        for step in range(2):
            twin.backward(make_rows(step).float())
            twin.check(roundings)
            twin.zero()


def test_hooks_of_parameters(kind: str) -> None:
    """They see the mean, in a DTensor."""
    twin = MeshTwin(Normed(), kind)
    seen: dict[str, torch.Tensor] = {}

    def note(param: torch.Tensor, name: str) -> None:
        assert param.grad is not None
        assert name not in seen
        if isinstance(param, DTensor):
            assert_lies_as(param.grad, param)
        seen[name] = param.grad.clone()

    for name, param in twin.model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, name=name: note(param, name))
    for step in range(2):
        twin.backward(make_rows(step))
        assert seen.keys() == twin.params.keys()
        for name, grad in seen.items():
            assert_same_gradient(full(grad), twin.single.get_parameter(name).grad, name)
        seen.clear()
        twin.zero()


@run_on(threads=4, kind=["ddp", "replicate"])
@run_on(weft=4, kind=["ddp"], full=True)
@run_on(gloo=4, kind=["replicate"], full=True)
def test_uneven_inputs(kind: str) -> None:
    """Tensor-parallel groups join whole."""
    twin = MeshTwin(Words(), kind, bucket_cap_mb=0.0005)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (twin.model, twin.single)]
    num_steps = [2, 4]
    with Join([twin.parallel], divide_by_initial_world_size=False):
        for step in range(num_steps[twin.dp_rank]):
            twin.run(twin.parallel, make_rows(step), twin.dp_rank).backward()
            optimizers[0].step()
            twin.model.zero_grad()
    for step in range(max(num_steps)):
        active = [rank for rank in range(2) if step < num_steps[rank]]
        losses = [twin.run(twin.single, make_rows(step), rank) for rank in active]
        torch.stack(losses).mean().backward()
        optimizers[1].step()
        twin.single.zero_grad()
    twin.check_parameters()


def test_own_gradients_after_joining(kind: str) -> None:
    """A rank that joined has its own gradients back, in their memory."""
    twin = MeshTwin(Normed(), kind, gradient_as_bucket_view=True)
    twin.step(0)
    with Join([twin.parallel]):
        twin.backward(make_rows(1))
        pointers = [grad.data_ptr() for grad in local_grads(twin.model)]
        if twin.dp_rank == 1:
            twin.run(twin.parallel, make_rows(2), 1).backward()
    if twin.dp_rank == 0:
        twin.check()
        assert pointers == [grad.data_ptr() for grad in local_grads(twin.model)]


def test_copies(kind: str) -> None:
    twin = MeshTwin(Words(), kind)
    twin.step(0)
    before = twin.params
    twin.parallel = copy.deepcopy(twin.parallel)
    twin.model = twin.parallel.module if kind == "ddp" else twin.parallel
    twin.params = dict(twin.model.named_parameters())
    assert not {*map(id, before.values())} & {*map(id, twin.params.values())}
    for step in range(1, 3):
        twin.step(step)


def test_states(kind: str) -> None:
    """state_dict has DTensors under the bare model's names, and takes them back."""
    twin = MeshTwin(Words(), kind)
    twin.step(0)
    state = {name: value.clone() for name, value in twin.parallel.state_dict().items()}
    assert [name.removeprefix("module.") for name in state] == list(twin.single.state_dict())
    assert isinstance(state["module." * (kind == "ddp") + "norm.weight"], DTensor)
    saved = {name: full(value) for name, value in state.items()}
    twin.step(1)
    twin.parallel.load_state_dict(state)
    for name, value in twin.parallel.state_dict().items():
        assert torch.equal(full(value), saved[name])
    twin.single.load_state_dict({name.removeprefix("module."): value for name, value in saved.items()})
    twin.step(2)


class Cut(nn.Module):
    """Rows of a weight over the ranks, one of which has none; and a scale whose gradients are addends."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(1, WIDTH))
        self.many = nn.Parameter(torch.zeros(5, WIDTH))
        self.scales = nn.ParameterList(nn.Parameter(torch.zeros(3)) for _ in range(4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        total = rows.new_zeros(())
        for weight, scale in ((self.rows, self.scales[0]), (self.many, self.scales[1])):
            for other in (scale, self.scales[2], self.scales[3]):
                total = (
                    total
                    + (rows @ opened(weight).t()).square().sum() * opened(other, adds=True).square().sum()
                )
        return total.reshape(1)


def opened(param: torch.Tensor, *, adds: bool = False) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return param
    return param.to_local(grad_placements=[Partial()] if adds else None)


def test_uneven_shards(kind: str) -> None:
    """Ranks of a tensor-parallel group have other buckets, and sum addends in one order all the same."""
    for cap in (0.00005, 25):
        mesh = mesh_of()
        model = filled(Cut())
        single = copy.deepcopy(model)
        cut(model, mesh["tp"])
        assert model.rows.to_local().shape[0] == 1 - mesh["tp"].get_local_rank()
        wrapped = wrapper(kind)(model, device_mesh=mesh["dp"], bucket_cap_mb=cap)
        for step in range(3):
            rows = make_rows(step)
            own = rows.chunk(2)[mesh["dp"].get_local_rank()]
            # The ranks' losses add up to the single's, as the rows of a weight do.
            wrapped(own).sum().backward()
            (single(rows).sum() / 2).backward()
            for (name, param), right in zip(model.named_parameters(), single.parameters(), strict=True):
                assert isinstance(param, DTensor)
                assert_lies_as(param.grad, param)
                assert_same_gradient(full(param.grad), right.grad, name)
                param.grad = right.grad = None


class Buffered(MLP):
    """With a buffer that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))


def test_parameters_from_the_first_rank(kind: str) -> None:
    """Each piece, frozen ones and buffers too, from the first of its own data-parallel group."""
    mesh = mesh_of()
    model = filled(Buffered(), seed=mesh["dp"].get_local_rank())
    model.count.fill_(dist.get_rank())
    model.up.weight.requires_grad_(False)
    parallelize_module(model, mesh["tp"], model.plan(), src_data_rank=None)
    wrapped = wrapper(kind)(model, device_mesh=mesh["dp"])
    wrapped(make_rows(0)[:2]).sum().backward()
    right = filled(Buffered(), seed=0)
    for name, param in model.named_parameters():
        assert torch.equal(full(param.detach()), right.get_parameter(name).detach()), name
    assert model.count.tolist() == [mesh["tp"].get_local_rank()] * 2  # the first ranks are 0 and 1
    assert model.up.weight.grad is None

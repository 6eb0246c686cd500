"""Data parallel along one axis of a mesh, over modules that are tensor parallel along another.

On four ranks. Every model stands beside a bare copy, which sees the rows of all data-parallel ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, debug, distribute_tensor

from tests.data_parallel_bodies.twins import ROUNDINGS, WIDTH, assert_same_gradient, filled
from weft import DistributedDataParallel, replicate
from weft.comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from weft.join import Join
from weft.tensor_parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

LENGTH, HIDDEN, WORDS = 5, 7, 11  # which no number of ranks here divides
Plan = dict[str, ParallelStyle]


def mesh_of(dp: int = 2, tp: int = 2, order: str = "dp tp") -> DeviceMesh:
    sizes = {"dp": dp, "tp": tp}
    names = tuple(order.split())
    return init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=names)


def in_a_new_world(body: Callable[[str], None], kind: str) -> None:
    """Run a body in a process that has had a world before.

    torch keeps what it found out about DTensors, by meshes that are equal to those of now and whose groups
    are gone.
    """
    debug._clear_sharding_prop_cache()
    body(kind)


# Models, and how each is split. Some parameters stay plain.


class MLP(nn.Module):
    """Two layers that are split, one that isn't."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.down(torch.tanh(self.up(rows)))))

    def plan(self) -> Plan:
        return {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Normed(MLP):
    """With a norm on parts of the sequence: its gradients come as addends (Partial)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.down(torch.tanh(self.up(rows))))
        return self.head(torch.tanh(self.out(hidden)))

    def plan(self) -> Plan:
        return {
            "up": ColwiseParallel(),
            "down": RowwiseParallel(output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }


class Words(Normed):
    """With an embedding in front."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(self.words((rows[..., 0] * 100).long() % WORDS))

    def plan(self) -> Plan:
        return {**super().plan(), "words": RowwiseParallel(input_layouts=Replicate())}


class Branching(Normed):
    """Uses its branches when the rows say so: parameters without gradients, split ones and others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 3)
        self.extra = nn.LayerNorm(WIDTH)

    def forward(self, rows: torch.Tensor, *, branches: bool = True) -> torch.Tensor:
        output = super().forward(rows)
        if not branches:
            return output
        normed = self.extra(self.down(torch.tanh(self.up(rows))))
        normed = normed if not isinstance(normed, DTensor) else normed.redistribute(placements=[Replicate()])
        local = normed.to_local() if isinstance(normed, DTensor) else normed
        return output + self.b(torch.tanh(self.a(local)))

    def plan(self) -> Plan:
        return {**super().plan(), "a": ColwiseParallel(), "b": RowwiseParallel(), "extra": SequenceParallel()}


class Block(nn.Module):
    """A norm between layers that are so narrow that ranks have very different parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH), nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.out(self.norm(self.down(torch.tanh(self.up(rows)))))


class Deep(nn.Module):
    """Sums of addends between the collectives of other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.blocks(rows)

    def plan(self) -> Plan:
        return {f"blocks.*.{name}": style for name, style in Normed().plan().items()}


MODELS: list[type[MLP]] = [MLP, Normed, Words]


def make_rows(step: int, dp: int = 2) -> torch.Tensor:
    """Sequences of all data-parallel ranks, the same everywhere."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(3 * dp, LENGTH, WIDTH, generator=generator, dtype=torch.float64)


def full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


Wrap = Callable[..., Any]


def wrapper(kind: str | Wrap) -> Wrap:
    if not isinstance(kind, str):
        return kind
    return DistributedDataParallel if kind == "ddp" else replicate


class MeshTwin:
    """`parallel` is on the mesh and gets its data-parallel rank's rows; `single` is bare and gets all."""

    def __init__(
        self,
        model: Any,
        kind: str | Wrap = "ddp",
        mesh: DeviceMesh | None = None,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> None:
        self.mesh = mesh_of() if mesh is None else mesh
        self.model = filled(model, dtype=dtype)
        self.single = copy.deepcopy(self.model)
        parallelize_module(self.model, self.mesh["tp"], self.model.plan())
        self.params = dict(self.model.named_parameters())
        self.parallel: Any = wrapper(kind)(self.model, device_mesh=self.mesh["dp"], **options)
        self.dp_size = self.mesh["dp"].size()
        self.dp_rank = self.mesh["dp"].get_local_rank()

    def run(self, model: Any, rows: torch.Tensor, dp_rank: int, **kwargs: Any) -> torch.Tensor:
        own = rows.chunk(self.dp_size)[dp_rank]
        return model(own, **kwargs).square().mean()

    def backward(
        self, rows: torch.Tensor, by_rank: Callable[[int], dict[str, Any]] = lambda dp_rank: {}
    ) -> None:
        losses = [self.run(self.single, rows, rank, **by_rank(rank)) for rank in range(self.dp_size)]
        torch.stack(losses).mean().backward()
        self.run(self.parallel, rows, self.dp_rank, **by_rank(self.dp_rank)).backward()

    def check(self, tolerance: float = ROUNDINGS) -> None:
        """Every gradient is the single process's, and lies as its parameter, which is the one it was."""
        assert dict(self.model.named_parameters()).keys() == self.params.keys()
        for name, param in self.model.named_parameters():
            assert param is self.params[name]
            if isinstance(param, DTensor) and param.grad is not None:
                assert_lies_as(param.grad, param)
            right = self.single.get_parameter(name).grad
            assert_same_gradient(full(param.grad), right, name, tolerance)

    def zero(self, *, to_none: bool = True) -> None:
        for model in (self.model, self.single):
            model.zero_grad(set_to_none=to_none)

    def step(self, step: int, by_rank: Callable[[int], dict[str, Any]] = lambda dp_rank: {}) -> None:
        """Backward, check, plain SGD."""
        self.backward(make_rows(step, self.dp_size), by_rank)
        self.check()
        for model in (self.model, self.single):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        self.zero()

    def check_parameters(self, tolerance: float = ROUNDINGS) -> None:
        for name, param in self.model.named_parameters():
            assert_same_gradient(
                full(param.detach()), self.single.get_parameter(name).detach(), name, tolerance
            )


def assert_lies_as(grad: torch.Tensor, param: DTensor) -> None:
    assert isinstance(grad, DTensor)
    assert grad.placements == param.placements
    assert grad.device_mesh == param.device_mesh
    assert (grad.shape, grad.stride(), grad.dtype) == (param.shape, param.stride(), param.dtype)
    assert grad.to_local().shape == param.to_local().shape


def local_grads(model: nn.Module) -> list[torch.Tensor]:
    """In memory: what the gradients are made of."""
    with torch.no_grad():
        return [
            param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            for param in model.parameters()
        ]


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# Bodies


def training(kind: str) -> None:
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


def other_meshes(kind: str) -> None:
    """The axes in the other order, and axes of one rank."""
    for dp, tp, order in ((2, 2, "tp dp"), (4, 1, "dp tp"), (1, 4, "dp tp")):
        twin = MeshTwin(Words(), kind, mesh_of(dp, tp, order))
        for step in range(3):
            twin.step(step)


def accumulation(kind: str) -> None:
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


def sync_noticed_late(kind: str) -> None:
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
            losses = (twin.run(twin.single, rows, rank, branches=wanted) for wanted in (False, True))
            (sum(losses) / 2).backward()
        twin.check()
        twin.zero()


def different_buckets(kind: str) -> None:
    """Ranks of one tensor-parallel group plan other buckets, and stay in step on their own axis."""
    twin = MeshTwin(Deep(), kind, bucket_cap_mb=0.0002)
    for step in range(4):
        twin.step(step)
    replica = twin.parallel._replica if kind == "ddp" else replicate.state(twin.parallel).replica
    plans: list[Any] = [None, None]
    own = [bucket.params for bucket in replica.reducer.buckets.plan]
    dist.all_gather_object(plans, own, group=twin.mesh["tp"].get_group())
    assert plans[0] != plans[1]


def unused_after_accumulation(kind: str) -> None:
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


def unused_on_one_rank(kind: str) -> None:
    for options in ({}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        twin = MeshTwin(Branching(), kind, bucket_cap_mb=0.0005, **options)
        for step in range(2):
            twin.step(step, lambda dp_rank, step=step: {"branches": dp_rank == step % 2})
        twin.step(5, lambda _: {"branches": False})
        assert all(param.grad is None for param in twin.model.parameters())


def static_graph(kind: str) -> None:
    twin = MeshTwin(Normed(), kind, static_graph=True, bucket_cap_mb=0.0005)
    for step in range(3):
        twin.step(step)


def compressed(kind: str) -> None:
    for hook, roundings in ((fp16_compress_hook, 2**-9), (bf16_compress_hook, 2**-6)):
        twin = MeshTwin(Normed(), kind, dtype=torch.float32)
        twin.parallel.register_comm_hook(twin.mesh["dp"].get_group(), hook)
        for step in range(2):
            twin.backward(make_rows(step).float())
            twin.check(roundings)
            twin.zero()


def hooks_of_parameters(kind: str) -> None:
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


def uneven_inputs(kind: str) -> None:
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


def own_gradients_after_joining(kind: str) -> None:
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


def copies(kind: str) -> None:
    twin = MeshTwin(Words(), kind)
    twin.step(0)
    before = twin.params
    twin.parallel = copy.deepcopy(twin.parallel)
    twin.model = twin.parallel.module if kind == "ddp" else twin.parallel
    twin.params = dict(twin.model.named_parameters())
    assert not {*map(id, before.values())} & {*map(id, twin.params.values())}
    for step in range(1, 3):
        twin.step(step)


def states(kind: str) -> None:
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


def cut(model: nn.Module, mesh: DeviceMesh) -> None:
    for owner in model.modules():
        for name, param in list(owner.named_parameters(recurse=False)):
            placement = Shard(0) if param.ndim == 2 else Replicate()
            placed = distribute_tensor(param.detach(), mesh, [placement], src_data_rank=None)
            owner.register_parameter(name, nn.Parameter(placed))


def uneven_shards(kind: str) -> None:
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


def parameters_from_the_first_rank(kind: str) -> None:
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


BODIES = [
    training,
    other_meshes,
    accumulation,
    sync_noticed_late,
    different_buckets,
    unused_after_accumulation,
    unused_on_one_rank,
    static_graph,
    compressed,
    hooks_of_parameters,
    uneven_inputs,
    own_gradients_after_joining,
    copies,
    states,
    uneven_shards,
    parameters_from_the_first_rank,
]

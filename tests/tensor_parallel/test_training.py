"""Tensor parallelism under data parallelism, on a mesh of two axes: training is a single process's.

Each row of the mesh is a TP group, which gets rows of its own; the single process gets all of them.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import weft
from tests.data_parallel.deaths import Sighting, sightings
from tests.local.deaths import nothing_left_behind, run_to_the_end
from tests.ranks import run_on
from tests.tensor_parallel.models import (
    MLP,
    Language,
    Net,
    Stacked,
    language_plan,
    mlp_plan,
    net_plan,
    next_token_loss,
    sequence_plan,
)
from tests.tensor_parallel.twins import (
    assert_close,
    assert_is_part,
    assert_same_gradients,
    assert_same_parameters,
    filled,
    full_of,
    local_of,
    make_mesh,
    numbers,
    tokens,
)
from weft.join import Join
from weft.testing import Fault, inject

pytest_plugins = ["tests.tensor_parallel.libraries"]
pytestmark = [
    run_on(threads=4),
    run_on(weft=4, gloo=4, full=True),
    run_on(gpu=4, timeout=90, collective_timeout=20),
]

STEPS = 20
# A gradient's last bits become the step's: Adam divides by its size.
TOLERANCE = 1e-10
ROWS, LENGTH, VOCABULARY = 4, 9, 12


@dataclass(frozen=True)
class Setting:
    """How one model is trained."""

    data: str  # which data parallelism
    has_cut_sequence: bool = False
    is_tied: bool = False
    is_checkpointed: bool | None = None
    max_norm: float | None = None
    micro_batches: int = 1
    keeps_gradients: bool = False  # as zeros, instead of None
    vocabulary: int = VOCABULARY

    def __str__(self) -> str:
        said = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "data"}
        default = Setting(self.data)
        changed = [f"{name}={value}" for name, value in said.items() if value != getattr(default, name)]
        return ", ".join([self.data, *changed])

    @property
    def num_axes(self) -> int:
        return 3 if self.data == "hybrid" else 2


def data_axes(mesh: DeviceMesh, setting: Setting) -> Any:
    return mesh["replicate", "shard"] if setting.num_axes == 3 else mesh["dp"]


def mesh_for(setting: Setting) -> DeviceMesh:
    """Two by two, or two by two by two."""
    if setting.num_axes == 3:
        return make_mesh(2, 2, dist.get_world_size() // 4, names="replicate shard tp")
    return make_mesh(dist.get_world_size() // 2, 2, names="dp tp")


def share(model: Any, mesh: DeviceMesh, setting: Setting) -> Any:
    """Data parallelism around a model that is parallel already; what to call from now on."""
    axes = data_axes(mesh, setting)
    match setting.data:
        case "none":
            return model
        case "replicate":
            return weft.replicate(model, device_mesh=axes)
        case "ddp":
            return weft.DistributedDataParallel(model, process_group=axes.get_group())
        case "ddp on a mesh":
            return weft.DistributedDataParallel(model, device_mesh=axes)
        case "ddp in small buckets":
            return weft.DistributedDataParallel(
                model, process_group=axes.get_group(), bucket_cap_mb=0.0001, gradient_as_bucket_view=True
            )
        case "fully_shard as a whole":
            return weft.fully_shard(model, mesh=axes)
        case "fully_shard" | "hybrid":
            for block in model.blocks:
                weft.fully_shard(block, mesh=axes)
            return weft.fully_shard(model, mesh=axes)
        case other:
            raise AssertionError(other)


def place_of(mesh: DeviceMesh, setting: Setting) -> tuple[int, int]:
    """Which part of the rows this rank gets, of how many."""
    if setting.data == "none":
        return 0, 1
    if setting.num_axes == 3:
        return mesh.get_local_rank("replicate") * 2 + mesh.get_local_rank("shard"), 4
    return mesh.get_local_rank("dp"), mesh.size(0)


def batches(setting: Setting, step: int) -> Iterator[torch.Tensor]:
    """The tokens of all ranks, for each micro batch."""
    for number in range(setting.micro_batches):
        yield tokens(ROWS * 2, LENGTH, vocabulary=setting.vocabulary, seed=10 * step + number)


def sync_last(model: Any, shared: Any, setting: Setting, is_last: bool) -> Any:
    """Gradients of micro batches before the last are not exchanged."""
    if setting.data.startswith("ddp"):
        return nullcontext() if is_last else shared.no_sync()
    if setting.data == "replicate":
        shared.set_requires_gradient_sync(is_last)
    elif setting.data != "none":
        model.set_requires_gradient_sync(is_last)
    return nullcontext()


class LocalAdam:
    """Adam on what this rank holds: the same steps in a tenth of the time, for most of the tests."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        self.params = list(params)
        self.locals = [local_of(param).detach() for param in self.params]
        self.optimizer = torch.optim.Adam(self.locals, lr=lr)

    def step(self) -> None:
        for param, local in zip(self.params, self.locals, strict=True):
            grad: Any = param.grad
            is_sum = isinstance(param, DTensor) and any(each.is_partial() for each in grad.placements)
            local.grad = full_of(grad) if is_sum else local_of(grad)
        self.optimizer.step()


def train(tp: Any, setting: Setting, steps: int = STEPS, is_thorough: bool = False) -> None:
    mesh = mesh_for(setting)
    single = Language(setting.vocabulary, blocks=1, is_tied=setting.is_tied)
    model: Any = copy.deepcopy(single)
    model.is_checkpointed = setting.is_checkpointed
    plan = (sequence_plan if setting.has_cut_sequence else language_plan)(tp)
    tp.parallelize_module(model, mesh["tp"], plan)
    shared = share(model, mesh, setting)
    make: Any = torch.optim.Adam if is_thorough else LocalAdam
    optimizers = [make(model.parameters(), lr=0.01), torch.optim.Adam(single.parameters(), lr=0.01)]
    place, num_parts = place_of(mesh, setting)
    for step in range(steps):
        for each in (model, single):
            each.zero_grad(set_to_none=not setting.keeps_gradients)
        losses = []
        for number, words in enumerate(batches(setting, step)):
            with sync_last(model, shared, setting, is_last=number == setting.micro_batches - 1):
                loss = next_token_loss(shared, words.chunk(num_parts)[place]) / setting.micro_batches
                loss.backward()
            right = next_token_loss(single, words) / setting.micro_batches
            right.backward()
            losses.append((loss.detach(), right.detach()))
        check_losses(losses, mesh)
        check_gradients(model, single, setting)
        clip(model, single, setting)
        for optimizer in optimizers:
            optimizer.step()
    right = dict(single.named_parameters())
    for name, param in model.named_parameters():
        assert_is_part(param, right[name].detach(), name, TOLERANCE)


def check_losses(losses: list[Any], mesh: DeviceMesh) -> None:
    """The mean of the parts' losses is the single process's."""
    seen = torch.stack([loss for loss, _ in losses])
    dist.all_reduce(seen)
    for mine, (_, right) in zip(seen / mesh.size(), losses, strict=True):
        assert_close(mine, right, "loss", TOLERANCE)


def check_gradients(model: Any, single: nn.Module, setting: Setting) -> None:
    """Those that data parallelism has been over lie as their parameters do."""
    right = {name: param.grad for name, param in single.named_parameters()}
    seen: dict[str, Any] = dict(model.named_parameters())
    assert list(seen) == list(right)
    for name, param in seen.items():
        assert isinstance(param.grad, DTensor) == isinstance(param, DTensor), name
        grad: Any = param.grad
        if isinstance(param, DTensor) and setting.data != "none":
            assert grad.placements == param.placements, name
        assert_is_part(param.grad, right[name], f"gradient of {name}", TOLERANCE)


def clip(model: Any, single: nn.Module, setting: Setting) -> None:
    if setting.max_norm is None:
        return
    seen = weft.clip_grad_norm_(model.parameters(), setting.max_norm)
    right = nn.utils.clip_grad_norm_(single.parameters(), setting.max_norm)
    assert right > setting.max_norm, "nothing to clip"
    assert_close(seen, right, "norm", TOLERANCE)
    check_gradients(model, single, setting)


SETTINGS = [
    Setting("replicate", has_cut_sequence=True, max_norm=0.01),
    Setting("replicate", is_tied=True, has_cut_sequence=True),
    Setting("ddp on a mesh"),
    Setting("ddp", micro_batches=2, has_cut_sequence=True),
    Setting("fully_shard", has_cut_sequence=True, is_checkpointed=False),
    Setting("fully_shard", micro_batches=2, max_norm=0.01),
]
MORE_SETTINGS = [
    Setting("replicate"),
    Setting("replicate", micro_batches=2),
    Setting("replicate", has_cut_sequence=True, keeps_gradients=True),
    Setting("ddp"),
    Setting("ddp", is_checkpointed=False, has_cut_sequence=True),
    Setting("ddp", has_cut_sequence=True, keeps_gradients=True),
    Setting("ddp", is_tied=True),
    Setting("ddp", vocabulary=11, max_norm=0.01),
    Setting("ddp in small buckets", has_cut_sequence=True),
    Setting("fully_shard"),
    Setting("fully_shard", is_checkpointed=True, max_norm=0.01),
    Setting("fully_shard", has_cut_sequence=True, keeps_gradients=True),
    Setting("fully_shard", vocabulary=11, has_cut_sequence=True),
    Setting("fully_shard as a whole"),
    Setting("fully_shard as a whole", is_tied=True),
]
WITHOUT_DATA = [
    Setting("none"),
    Setting("none", has_cut_sequence=True),
    Setting("none", has_cut_sequence=True, keeps_gradients=True),
]
ON_GPU = [
    Setting("none", has_cut_sequence=True, vocabulary=11, max_norm=0.01),
    Setting("replicate"),
    Setting("replicate", has_cut_sequence=True, max_norm=0.01),
    Setting("replicate", micro_batches=2, is_tied=True),
    Setting("ddp"),
    Setting("ddp in small buckets", has_cut_sequence=True),
    Setting("ddp", is_checkpointed=False, vocabulary=11, max_norm=0.01),
    Setting("fully_shard", has_cut_sequence=True, max_norm=0.01),
    Setting("fully_shard", is_checkpointed=True, vocabulary=11),
    Setting("fully_shard", micro_batches=2),
]
ON_NCCL = [
    Setting("replicate", has_cut_sequence=True, max_norm=0.01),
    Setting("ddp", is_checkpointed=False, vocabulary=11, max_norm=0.01),
    Setting("fully_shard", has_cut_sequence=True, max_norm=0.01),
    Setting("fully_shard", micro_batches=2),
]
PAIRS = [
    Setting("none", has_cut_sequence=True),
    Setting("replicate", has_cut_sequence=True, vocabulary=11),
    Setting("ddp", is_checkpointed=False),
    Setting("fully_shard", has_cut_sequence=True, max_norm=0.01),
]


@run_on(threads=2, setting=[Setting("none", vocabulary=11, max_norm=0.01, has_cut_sequence=True)])
@run_on(threads=2, setting=WITHOUT_DATA, full=True)
@run_on(threads=4, setting=SETTINGS, timeout=60, collective_timeout=20)
@run_on(threads=4, setting=MORE_SETTINGS, timeout=60, collective_timeout=20, full=True)
@run_on(gpu=4, setting=ON_GPU, timeout=90, collective_timeout=20)
@run_on(nccl=4, setting=ON_NCCL)
def test_training(tp: Any, setting: Setting) -> None:
    train(tp, setting, steps=5)


@run_on(threads=8, timeout=60, collective_timeout=20, full=True)
def test_hybrid_sharding(tp: Any) -> None:
    train(tp, Setting("hybrid", has_cut_sequence=True), steps=3)


@run_on(threads=2, setting=[Setting("none"), Setting("none", has_cut_sequence=True)], timeout=60, full=True)
@run_on(weft=4, gloo=4, setting=PAIRS, timeout=60, full=True)
def test_twenty_steps_of_adam(tp: Any, setting: Setting) -> None:
    train(tp, setting, STEPS, is_thorough=True)


@run_on(threads=4, weft=4, gloo=4, is_checkpointed=[False])
@run_on(threads=4, is_checkpointed=[True], full=True)
@run_on(gpu=4, is_checkpointed=[False], timeout=90, collective_timeout=20)
def test_four_layers_under_replicate(tp: Any, is_checkpointed: bool) -> None:
    """Three steps of SGD with replicate over tensor parallelism are those of a single process."""
    mesh = make_mesh(2, dist.get_world_size() // 2, names="dp tp")
    model: Any = Net(is_checkpointed=is_checkpointed)
    single = Net()
    tp.parallelize_module(model, mesh["tp"], net_plan(tp))
    weft.replicate(model, device_mesh=mesh["dp"])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model, single)]
    for step in range(3):
        rows = numbers(2, 8, seed=step)  # one row for each of the two groups
        loss = model(rows.chunk(2)[mesh.get_local_rank("dp")]).sum()
        loss.backward()
        (single(rows).sum() / 2).backward()
        assert_same_gradients(model, single)
        for name, param in model.named_parameters():
            assert param.grad.placements == param.placements, name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, single)


def test_hooks_of_communication(tp: Any) -> None:
    """A comm hook of DDP sees local gradients, and halves them here."""
    mesh = make_mesh(dist.get_world_size() // 2, 2, names="dp tp")
    model, single = filled(MLP()), filled(MLP())
    tp.parallelize_module(model, mesh["tp"], mlp_plan(tp))
    shared = weft.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    group = mesh["dp"].get_group()
    seen: list[type] = []

    def hook(state: Any, bucket: Any) -> Any:
        buffer = bucket.buffer()
        seen.append(type(buffer))
        return weft.comm.all_reduce(buffer, group=group).future().then(lambda done: done.value() / 4)

    shared.register_comm_hook(None, hook)
    rows = numbers(4, 8)
    shared(rows.chunk(2)[mesh.get_local_rank("dp")]).square().mean().backward()
    (single(rows).square().mean() / 2).backward()
    assert set(seen) == {torch.Tensor}
    assert_same_gradients(model, single)


def test_uneven_inputs(tp: Any) -> None:
    """Whole TP groups run out of rows, one after another; those that joined follow."""
    mesh = make_mesh(2, dist.get_world_size() // 2, names="dp tp")
    model, single = filled(MLP()), filled(MLP())
    tp.parallelize_module(model, mesh["tp"], mlp_plan(tp))
    shared = weft.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, single)]
    place = mesh.get_local_rank("dp")
    counts = [3, 5]
    with Join([shared]):
        for step in range(counts[place]):
            rows = numbers(4, 8, seed=step).chunk(2)[place]
            optimizers[0].zero_grad()
            shared(rows).square().mean().backward()
            optimizers[0].step()
    for step in range(max(counts)):
        parts = numbers(4, 8, seed=step).chunk(2)
        optimizers[1].zero_grad()
        losses = [single(parts[each]).square().mean() for each in (0, 1) if step < counts[each]]
        (torch.stack(losses).sum() / 2).backward()
        optimizers[1].step()
    assert_same_parameters(model, single)  # those that joined early have got the others' at the end


def test_half_precision(tp: Any) -> None:
    """fully_shard casts the parts of parameters to bfloat16; gradients and parameters stay in float32."""
    mesh = make_mesh(2, dist.get_world_size() // 2, names="dp tp")
    model, single = (filled(MLP(), dtype=torch.float32) for _ in range(2))
    tp.parallelize_module(model, mesh["tp"], mlp_plan(tp))
    policy = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    weft.fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    rows = numbers(4, 8, dtype=torch.float32)
    seen = model(rows.chunk(2)[mesh.get_local_rank("dp")])
    assert seen.dtype == torch.bfloat16
    seen.float().square().mean().backward()
    single(rows).square().mean().backward()
    assert all(param.dtype == param.grad.dtype == torch.float32 for param in model.parameters())
    assert_same_gradients(model, single, tolerance=5e-2)


def test_parameters_for_users(tp: Any) -> None:
    """Names and types as before the data parallelism; the axis of data is not in a DDP's placements."""
    for data in ("replicate", "ddp"):
        setting = Setting(data)
        mesh = mesh_for(setting)
        model: Any = Language()
        names = [name for name, _ in model.named_parameters()]
        tp.parallelize_module(model, mesh["tp"], language_plan(tp))
        before = dict(model.named_parameters())
        shared = share(model, mesh, setting)
        assert [name.removeprefix("module.") for name, _ in shared.named_parameters()] == names
        assert all(param is before[name] for name, param in model.named_parameters())
        assert model.head.weight.device_mesh == mesh["tp"]
        assert model.blocks[0].mlp.net2.bias.placements == (Replicate(),)


# A rank dies in the middle of a step


NUM_STEPS = 4
NOTICED_SECS = 8.0  # about one; the rest is for a machine that has other things to do


def train_until_one_dies(tp: Any, folder: Path, fault: Fault) -> None:
    """Every survivor's error, in forward or in backward, says who went. A step has two sums each way."""
    rank = dist.get_rank()
    model = tp.parallelize_module(filled(Stacked()), make_mesh(), mlp_plan(tp, "layers.*."))
    with inject(fault) as faults:
        for step in faults.steps(NUM_STEPS):
            began = time.monotonic()
            try:
                model(numbers(4, 8, seed=step).requires_grad_()).square().sum().backward()
            except weft.PeerError as error:
                secs = time.monotonic() - began
                ranks = list(error.ranks)
                seen = Sighting(fault.rank, rank, type(error).__name__, ranks, step, secs, str(error))
                (folder / f"sighting.{fault.rank}.{rank}").write_text(json.dumps(asdict(seen)))
                raise
    raise AssertionError("nobody died")


@run_on()
@pytest.mark.processes
@pytest.mark.parametrize(
    ("backend", "call"),
    [
        pytest.param("weft", 1, marks=pytest.mark.full, id="forward"),
        pytest.param("weft", 3, id="backward"),
        pytest.param("gloo", 3, marks=pytest.mark.full, id="gloo"),
    ],
)
def test_a_rank_that_dies_is_named_on_every_other(tp: Any, backend: str, call: int, tmp_path: Path) -> None:
    fault = Fault(rank=2, action="kill", op="all_reduce", feature="tp", call=call, step=1)
    with nothing_left_behind():
        error = run_to_the_end(
            train_until_one_dies, (tp, tmp_path, fault), ranks=3, backend=backend, collective_timeout=30
        )
    seen = sightings(tmp_path)
    assert [sighting.rank for sighting in seen] == [0, 1], error
    for sighting in seen:
        assert sighting.error == "PeerError", sighting
        assert sighting.ranks == [2], sighting
        assert sighting.step == 1, sighting
        assert sighting.secs < NOTICED_SECS, sighting

"""What a recorded collective is about: a bucket, a param group, a module. Ranks are threads."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import weft
from tests.ranks import run_on
from weft import comm
from weft.comm.call import stand_aside
from weft.comm.record import stand_for
from weft.comm_hooks import DDPCommHookType, powerSGD_hook, register_ddp_comm_hook
from weft.comm_hooks.in_order import run_in_order
from weft.tensor_parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

pytestmark = run_on(threads=2, timeout=60)


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def labels_of(model: nn.Module, feature: str) -> list[tuple[str, str]]:
    with weft.record() as events:
        model(torch.ones(2, 8)).sum().backward()
    found = [event for event in events.by_feature(feature) if not event.is_note]
    for event in found:
        if event.wait_start_secs is not None:
            assert event.start_secs <= event.wait_start_secs <= event.end_secs
    return sorted({(event.op, event.label) for event in found})


@pytest.mark.parametrize("hook", [None, "FP16_COMPRESS", "QUANTIZE_PER_TENSOR", "powersgd"])
def test_buckets(hook: str | None) -> None:
    model = weft.DistributedDataParallel(make_model(), bucket_cap_mb=0.0005)
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook is not None:
        register_ddp_comm_hook(DDPCommHookType[hook], model)
    labels = [labels_of(model, "ddp") for _ in range(3)][-1]
    buckets = {label for _, label in labels if label.startswith("bucket ")}
    assert {"bucket 0", "bucket 1"} <= buckets, labels
    assert {label for _, label in labels} - buckets <= {"used parameters"}, labels


def test_other_collectives_of_data_parallel() -> None:
    model = weft.DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
    assert ("broadcast", "buffers") in labels_of(model, "ddp")


@pytest.mark.parametrize("hook", [False, True])
@run_on(threads=4, timeout=60)
def test_param_groups(hook: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make_model()
    weft.fully_shard(model[0], mesh=mesh)
    weft.fully_shard(model, mesh=mesh)
    if hook:
        model.register_comm_hook(None, weft.comm_hooks.default_hooks.bf16_compress_hook)  # type: ignore[attr-defined]
    labels = labels_of(model, "fsdp")
    reductions = {"all_reduce"} if hook else {"reduce_scatter_spread", "all_reduce"}
    for op in {"all_gather_spread", *reductions}:
        assert len({label for found, label in labels if found == op}) == 2, labels
    assert "" not in {label for _, label in labels}, labels


def test_split_modules() -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = make_model()
    layout = PrepareModuleInput(
        input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True
    )
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": layout})
    labels = labels_of(model, "tp")
    assert ("all_reduce", "2") in labels
    assert {label for _, label in labels} == {"2", "4"}


def test_a_rank_goes_on_while_its_hooks_wait() -> None:
    group = dist.group.WORLD
    assert group is not None
    tensor = torch.ones(4)
    with weft.record() as events:
        run_in_order(
            group, tensor, lambda: comm.all_reduce(tensor, group=group, is_waited=True).wait()
        ).wait()
        comm.all_reduce(tensor, group=group, is_waited=True)
    assert [event.wait_start_secs is not None for event in events] == [False, True]


def test_a_rank_stands_still_for_collectives_of_another_thread() -> None:
    group = dist.group.WORLD
    assert group is not None
    begun = threading.Event()
    world = dist.distributed_c10d._world.entered.world  # type: ignore[attr-defined]

    def beside() -> None:
        stand_aside()
        dist.distributed_c10d._world.entered.world = world  # type: ignore[attr-defined]
        comm.all_reduce(torch.ones(4), group=group, label="bucket 0", is_waited=True)
        begun.wait()
        comm.all_reduce(torch.ones(4), group=group, label="bucket 1", is_waited=True)
        comm.all_reduce(torch.ones(4), group=group, label="bucket 2", is_waited=True)

    thread = threading.Thread(target=beside)

    def wait() -> None:
        begun.set()
        thread.join()

    with weft.record() as events:
        thread.start()
        stand_for("bucket 1", group, wait)
    assert [event.label for event in events] == ["bucket 0", "bucket 1", "bucket 2"]
    stood = [event.wait_start_secs is not None for event in events]
    assert stood == [False, True, False]

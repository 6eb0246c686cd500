"""Under torch's LocalTensorMode weft refuses what asks which rank it is on; plain collectives are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import weft
from weft import comm, tensor_parallel
from weft.errors import UnsupportedError

local_tensor = pytest.importorskip("torch.distributed._local_tensor")
RANKS = 4


@pytest.fixture(autouse=True)
def simulated_world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,))


def zero() -> object:
    params = nn.Linear(8, 8).parameters()
    return weft.ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)


def split(style: tensor_parallel.ParallelStyle) -> nn.Module:
    return tensor_parallel.parallelize_module(nn.Linear(8, 8), mesh(), style)


FEATURES: dict[str, Callable[[], object]] = {
    "colwise": lambda: split(tensor_parallel.ColwiseParallel()),
    "inputs": lambda: split(
        tensor_parallel.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0))
    ),
    "fully_shard": lambda: weft.fully_shard(nn.Linear(8, 8), mesh=mesh()),
    "replicate": lambda: weft.replicate(nn.Linear(8, 8))(torch.ones(2, 8)),
    "replicate_with_fsdp": lambda: weft.replicate_with_fsdp(nn.Linear(8, 8), mesh=mesh()),
    "ddp": lambda: weft.DistributedDataParallel(nn.Linear(8, 8)),
    "zero": zero,
}


@pytest.mark.parametrize("name", FEATURES)
def test_features_are_refused(name: str) -> None:
    with local_tensor.LocalTensorMode(RANKS), pytest.raises(UnsupportedError, match="LocalTensorMode"):
        FEATURES[name]()


def test_a_model_that_was_split_before_is_refused_at_its_collective() -> None:
    model = tensor_parallel.parallelize_module(
        nn.Linear(8, 8), mesh(), tensor_parallel.RowwiseParallel(input_layouts=Replicate())
    )
    with local_tensor.LocalTensorMode(RANKS), pytest.raises(UnsupportedError, match="LocalTensorMode"):
        model(torch.ones(2, 8))


def test_plain_collectives_are_right() -> None:
    with local_tensor.LocalTensorMode(RANKS) as mode:
        tensor = mode.rank_map(lambda rank: torch.full((2,), float(rank)))
        gathered: Any = torch.zeros(2 * RANKS)
        comm.all_gather_into_tensor(gathered, tensor).wait()
        comm.all_reduce(tensor).wait()
        assert tensor.reconcile().tolist() == [6.0, 6.0]
        assert gathered.reconcile().tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]

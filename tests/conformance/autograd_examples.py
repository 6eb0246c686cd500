"""Tests of distributed autograd as torch ships them, small, to test the machine with. They are a suite."""

from __future__ import annotations

import sys
import unittest
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.optim import DistributedOptimizer

NUM_GPUS = 64


def skip_if_lt_x_gpu(count: int) -> Any:
    return unittest.skip(f"needs {count} GPUs")


class Fixture(unittest.TestCase):
    rank = -1
    file_name = ""

    def init_rpc(self) -> None:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{self.file_name}")
        rpc.init_rpc(f"worker{self.rank}", rank=self.rank, world_size=2, rpc_backend_options=options)


class Examples:
    def test_names_are_replaced(self) -> None:
        found = (
            dist_autograd.backward,
            dist_autograd.context,
            dist_autograd._new_context,
            DistributedOptimizer,
        )
        assert {name.__module__.split(".")[0] for name in found} == {"weft"}

    def test_gradients_come_from_the_other_rank(self) -> None:
        self.init_rpc()
        mine = torch.ones(2, requires_grad=True)
        with dist_autograd.context() as context_id:
            theirs = rpc.rpc_sync(f"worker{1 - self.rank}", torch.mul, args=(mine, 2 + self.rank))
            dist_autograd.backward(context_id, [theirs.sum()])
            assert dist_autograd.get_gradients(context_id)[mine].tolist() == [2.0 + self.rank] * 2
        rpc.shutdown()

    def test_takes_torchs_engine(self) -> None:
        torch._C._distributed_autograd._new_context()

    def test_takes_torchs_optimizer(self) -> None:
        sys.modules["torch.distributed.optim.optimizer"].DistributedOptimizer(torch.optim.SGD, [])

    def test_leaves_by_an_exit_code(self) -> None:
        sys.exit(0)

    @skip_if_lt_x_gpu(NUM_GPUS)
    def test_needs_gpus(self) -> None:
        raise AssertionError("no machine has so many")


class MoreExamples:
    def test_names_are_replaced(self) -> None:
        raise AssertionError("the other one of this name passes")

"""RPC tests as torch ships them, small, to test the machine with. They are a suite of their own."""

from __future__ import annotations

import os
import threading
import unittest

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed.rpc import RRef, WorkerInfo
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu

arrived = threading.Event()


class Fixture(unittest.TestCase):
    rank = -1
    file_name = ""

    def init_rpc(self) -> None:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{self.file_name}")
        rpc.init_rpc(f"worker{self.rank}", rank=self.rank, world_size=2, rpc_backend_options=options)


class Examples:
    def test_names_are_replaced(self) -> None:
        assert {found.__module__.split(".")[0] for found in (rpc.rpc_sync, RRef, WorkerInfo)} == {"weft"}
        assert rpc.api.__name__ == "weft.rpc.api"

    def test_calls_leave_the_caller(self) -> None:
        self.init_rpc()
        assert rpc.rpc_sync(f"worker{1 - self.rank}", os.getpid) != os.getpid()
        rpc.shutdown()

    def test_methods_of_the_test_are_sent(self) -> None:
        self.init_rpc()
        assert rpc.rpc_sync(f"worker{1 - self.rank}", self.add, args=(2,)) == self.rank + 2
        rpc.shutdown()

    def add(self, number: int) -> int:
        return self.rank + number

    def test_leaves_an_agent_and_globals(self) -> None:
        self.init_rpc()
        arrived.set()

    def test_finds_neither(self) -> None:
        assert not arrived.is_set()
        assert not dist.is_initialized()
        assert "RANK" not in os.environ
        with pytest.raises(RuntimeError, match="not been initialized"):
            rpc.get_worker_info()

    def test_fails_while_another_waits(self) -> None:
        self.init_rpc()
        assert self.rank == 0, "the other one"
        rpc.shutdown()

    def test_uses_a_name_that_weft_lacks(self) -> None:
        rpc._server_process_global_profile()

    def test_takes_torchs_engine(self) -> None:
        torch._C._distributed_rpc.TensorPipeAgent()

    @skip_if_lt_x_gpu(64)
    def test_needs_gpus(self) -> None:
        raise AssertionError("no machine has so many")

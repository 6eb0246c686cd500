"""A test class as torch ships them, small, to test the machine with. It is a suite of its own."""

from __future__ import annotations

import os
import sys
import threading
import unittest

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BACKEND = os.environ.get("BACKEND", "")


def skip_if_lt_x_gpu(count: int):  # type: ignore[no-untyped-def]
    return unittest.skip(f"needs {count} GPUs")


def build():  # type: ignore[no-untyped-def]
    return DistributedDataParallel


class Fixture(unittest.TestCase):
    rank = -1


class Outer:
    class Examples:
        def test_names_are_replaced(self) -> None:
            assert build().__module__.split(".")[0] == "weft"
            assert nn.parallel.DistributedDataParallel is build()

        @skip_if_lt_x_gpu(2)
        def test_runs_on_the_cpu(self) -> None:
            model = nn.Linear(2, 2).cuda(self.rank)
            ddp = nn.parallel.DistributedDataParallel(model, device_ids=[self.rank])
            ddp(torch.ones(1, 2, device=self.rank)).sum().backward()
            assert model.weight.grad.device == torch.device(f"cuda:{self.rank}")

        @skip_if_lt_x_gpu(3)
        def test_has_three_ranks(self) -> None:
            assert DistributedDataParallel
            assert dist.get_world_size() == 3

        def test_fails(self) -> None:
            assert DistributedDataParallel == self.rank, "one is a class"

        @unittest.skipIf(BACKEND == "gloo", "not with gloo")
        def test_is_skipped(self) -> None:
            DistributedDataParallel(nn.Linear(1, 1))

        def test_takes_torchs_engine(self) -> None:
            assert DistributedDataParallel
            dist.Reducer([], [])

        def test_dies(self) -> None:
            assert DistributedDataParallel
            if self.rank == 1:
                os._exit(3)
            dist.barrier()

        def test_hangs(self) -> None:
            assert DistributedDataParallel
            threading.Event().wait()

        def test_leaves_traces(self) -> None:
            assert DistributedDataParallel
            os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
            dist.set_debug_level_from_env()
            torch.set_default_dtype(torch.float64)

        def test_finds_no_traces(self) -> None:
            assert DistributedDataParallel
            assert dist.get_debug_level() == dist.DebugLevel.OFF
            assert torch.ones(1).dtype == torch.float32

        def test_leaves_by_an_exit_code(self) -> None:
            assert DistributedDataParallel
            sys.exit(87)

        def test_does_not_concern_weft(self) -> None:
            DistributedDataParallel = self.rank
            assert DistributedDataParallel == self.rank

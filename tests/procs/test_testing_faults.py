"""Faults that end a rank's process, and parity over process-ranks."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from weft import comm
from weft.errors import LaunchError
from weft.testing import Fault, Trace, compare, inject, shared_pool, train
from weft.testing.models import MLP, make_batches


def reduce_five_times(fault: Fault) -> None:
    with inject(fault):
        for _ in range(5):
            comm.all_reduce(torch.ones(4)).wait()


@pytest.mark.parametrize(
    ("action", "headline"),
    [("kill", "died: killed by SIGKILL"), ("exit", "died: exited with code 1")],
)
def test_a_rank_dies_at_its_call_and_the_other_names_it(action: Any, headline: str) -> None:
    fault = Fault(1, action, op="all_reduce", call=3)
    with pytest.raises(LaunchError) as caught:
        shared_pool(2).run(reduce_five_times, args=(fault,), timeout=30)
    failures = caught.value.failures
    assert headline in failures[1]
    assert "PeerError" in failures[0]
    assert "rank 1" in failures[0]
    # The rank that died can tell nothing any more: the others say what was injected.
    assert f"injected: {fault!r}" in failures[0]


@pytest.mark.full
def test_a_stopped_rank_goes_on_when_it_is_continued() -> None:
    pool = shared_pool(2)

    def body(pids: list[int]) -> float:
        with inject(Fault(1, "stop", op="all_reduce")):
            if dist.get_rank() == 0:
                # The parent's SIGCHLD is the launcher's; the peer asks the kernel.
                while _state_of(pids[1]) != "T":
                    os.sched_yield()
                os.kill(pids[1], signal.SIGCONT)
            return comm.all_reduce(torch.ones(1)).wait().item()

    assert pool.run(body, args=(pool.pids,), timeout=30) == [2.0, 2.0]


def _state_of(pid: int) -> str:
    """The kernel's letter for what a process does; T: stopped by a signal."""
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def ddp_body(library: Any) -> Trace:
    return train(library.DistributedDataParallel(MLP()), [batch.shard() for batch in make_batches(MLP(), 2)])


@pytest.mark.parametrize("backend", ["weft", "gloo"])
def test_parity_over_processes(backend: str) -> None:
    never = SimpleNamespace(DistributedDataParallel=lambda model: model)
    torch_library = SimpleNamespace(DistributedDataParallel=DistributedDataParallel)
    compare(ddp_body, torch_library, torch_library, kind="process", backend=backend)
    with pytest.raises(AssertionError, match="rank 0 and rank 1 differ"):
        compare(ddp_body, torch_library, never, kind="process", backend=backend)

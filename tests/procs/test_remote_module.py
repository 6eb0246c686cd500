"""RemoteModule on rank-processes, and one whose worker dies."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from torch import nn

import weft
from tests.rpc_bodies import remote_module_forward, remote_module_sending, remote_module_state
from tests.rpc_bodies.remote_module_workers import Mortal, from_worker0
from tests.rpc_bodies.running import on_processes
from weft import RemoteModule, rpc
from weft.testing import shared_pool


@pytest.mark.parametrize("module", [remote_module_forward, remote_module_state, remote_module_sending])
def test_bodies(module: ModuleType) -> None:
    bodies: list[Callable[[], None]] = module.BODIES
    on_processes([from_worker0(body) for body in bodies])


def lose_the_worker(folder: Path) -> None:
    rpc.init_rpc(f"worker{dist.get_rank()}")
    if dist.get_rank() == 1:
        rpc.shutdown()
    identity, mortal = RemoteModule("worker1", nn.Identity), RemoteModule("worker1", Mortal)
    assert identity(1) == 1
    began = time.monotonic()
    future = mortal.forward_async()
    uses: list[Callable[[], object]] = [
        future.wait,
        lambda: identity(1),
        lambda: identity.forward_async(1).wait(),
        identity.state_dict,
        identity.eval,
        lambda: RemoteModule("worker1", nn.Identity).forward(1),
    ]
    for use in uses:
        with pytest.raises(weft.PeerError, match="worker1") as caught:
            use()
        assert caught.value.ranks == (1,)
    assert time.monotonic() - began < 2
    rpc.shutdown(graceful=False)
    (folder / "seen").touch()


def test_a_dead_worker_is_named_soon(tmp_path: Path) -> None:
    with pytest.raises(weft.LaunchError, match="rank 1"):
        shared_pool(2).run(lose_the_worker, args=(tmp_path,), timeout=30)
    assert (tmp_path / "seen").exists()

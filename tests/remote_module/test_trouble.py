"""What a peer cannot do to a worker that allows little, and what callers hear of a worker that died."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.ranks import run_on
from tests.remote_module.modules import Mortal, Net, Peeking, call_three_ways, make_rows, strides_of
from tests.rpc.workers import from_worker0, with_options
from weft import RemoteModule, rpc
from weft.testing import shared_pool

pytestmark = run_on(threads=3, timeout=90, collective_timeout=60)

ALLOWED = ["weft.rpc.remote_module_owner", "weft.rpc.remote_module", "tests.remote_module"]


@with_options(allow=ALLOWED)
@from_worker0
def test_workers_may_allow_little() -> None:
    remote = weft.RemoteModule("worker1", Net)
    remote.load_state_dict(remote.eval().double().state_dict())
    assert len(remote.remote_parameters()) == len(remote.remote_gradients()) == 4
    outputs = rpc.rpc_sync("worker2", call_three_ways, (remote.float(), make_rows()))
    assert [output.shape for output in outputs] == [make_rows().shape] * 3
    with pytest.raises(weft.RefusedError, match="Identity"):
        weft.RemoteModule("worker1", nn.Identity).forward(1)


@with_options(allow=ALLOWED)
@from_worker0
def test_paths_run_no_property() -> None:
    remote = weft.RemoteModule("worker1", Peeking)
    assert remote.get_submodule("linear").remote_parameters()
    assert remote.get_parameter("linear.weight").to_here().shape
    for ask in (remote.get_submodule, remote.get_parameter, remote.get_buffer):
        for path in ("peeked", "linear.peeked", "peeked.weight", "forward"):
            with pytest.raises(AttributeError, match=r"has no (part|module)"):
                ask(path)
    assert Peeking.seen == []


@with_options(allow=ALLOWED)
@from_worker0
def test_assigned_parameters_have_memory_for_each_element() -> None:
    remote = weft.RemoteModule("worker1", Net)
    found = Net().state_dict()
    state = {name: value[:1].expand(value.shape) if value.dim() else value for name, value in found.items()}
    remote.load_state_dict(state, assign=True)
    for rref in remote.remote_parameters():
        assert 0 not in rpc.rpc_sync("worker1", strides_of, (rref,))
    assert remote.state_dict()["linear.weight"].equal(state["linear.weight"])


@pytest.fixture
def new_memory_is_nan() -> Generator[None]:
    """torch writes NaN into new memory here, as others had something in it before."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("new_memory_is_nan")
@with_options(allow=ALLOWED)
@from_worker0
def test_a_peer_does_not_read_memory_that_was_freed() -> None:
    remote = weft.RemoteModule("worker1", Net)
    assert remote.to("meta").to_empty(device="cpu").device == "cpu"
    values = [*remote.state_dict().values(), *(rref.to_here() for rref in remote.buffers())]
    assert len(values) > 4
    assert not any(value.bool().any() for value in values)


@run_on()
def test_it_needs_rpc() -> None:
    with pytest.raises(AssertionError, match="RemoteModule only works in RPC"):
        weft.RemoteModule("worker1", nn.Identity)


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


@run_on()
@pytest.mark.processes
def test_a_dead_worker_is_named_soon(tmp_path: Path) -> None:
    with pytest.raises(weft.LaunchError, match="rank 1"):
        shared_pool(2).run(lose_the_worker, args=(tmp_path,), timeout=30)
    assert (tmp_path / "seen").exists()

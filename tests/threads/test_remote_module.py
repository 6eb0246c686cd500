"""RemoteModule on thread-ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

import weft
from tests.rpc_bodies import remote_module_forward, remote_module_sending, remote_module_state
from tests.rpc_bodies.remote_module_sending import call_three_ways
from tests.rpc_bodies.remote_module_workers import Net, from_worker0, make_rows
from tests.rpc_bodies.running import on_threads
from weft import rpc

BODIES = [*remote_module_forward.BODIES, *remote_module_state.BODIES, *remote_module_sending.BODIES]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_body(body: Callable[[], None]) -> None:
    on_threads(from_worker0(body))


def work_within_limits() -> None:
    remote = weft.RemoteModule("worker1", Net)
    remote.load_state_dict(remote.eval().double().state_dict())
    assert len(remote.remote_parameters()) == len(remote.remote_gradients()) == 4
    outputs = rpc.rpc_sync("worker2", call_three_ways, (remote.float(), make_rows()))
    assert [output.shape for output in outputs] == [make_rows().shape] * 3
    with pytest.raises(weft.RefusedError, match="Identity"):
        weft.RemoteModule("worker1", nn.Identity).forward(1)


def test_workers_that_allow_little() -> None:
    names = ["weft.rpc.remote_module_owner", "weft.rpc.remote_module", "tests.rpc_bodies"]
    on_threads(from_worker0(work_within_limits), allow=names)


def test_it_needs_rpc() -> None:
    with pytest.raises(AssertionError, match="RemoteModule only works in RPC"):
        weft.RemoteModule("worker1", nn.Identity)

"""RemoteModule on thread-ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import weft
from tests.rpc_bodies import remote_module_forward, remote_module_sending, remote_module_state
from tests.rpc_bodies.remote_module_sending import call_three_ways
from tests.rpc_bodies.remote_module_workers import Net, Peeking, from_worker0, make_rows, strides_of
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
    names = ["weft.rpc.remote_module_owner", "weft.rpc.remote_module", "tests.rpc", "tests.rpc_bodies"]
    on_threads(from_worker0(work_within_limits), allow=names)


def follow_paths() -> None:
    remote = weft.RemoteModule("worker1", Peeking)
    assert remote.get_submodule("linear").remote_parameters()
    assert remote.get_parameter("linear.weight").to_here().shape
    for ask in (remote.get_submodule, remote.get_parameter, remote.get_buffer):
        for path in ("peeked", "linear.peeked", "peeked.weight", "forward"):
            with pytest.raises(AttributeError, match=r"has no (part|module)"):
                ask(path)
    assert Peeking.seen == []


def test_paths_run_no_property() -> None:
    names = ["weft.rpc.remote_module_owner", "weft.rpc.remote_module", "tests.rpc", "tests.rpc_bodies"]
    on_threads(from_worker0(follow_paths), allow=names)


def assign_expanded() -> None:
    remote = weft.RemoteModule("worker1", Net)
    found = Net().state_dict()
    state = {name: value[:1].expand(value.shape) if value.dim() else value for name, value in found.items()}
    remote.load_state_dict(state, assign=True)
    for rref in remote.remote_parameters():
        assert 0 not in rpc.rpc_sync("worker1", strides_of, (rref,))
    assert remote.state_dict()["linear.weight"].equal(state["linear.weight"])


def test_assigned_parameters_have_memory_for_each_element() -> None:
    names = ["weft.rpc.remote_module_owner", "weft.rpc.remote_module", "tests.rpc", "tests.rpc_bodies"]
    on_threads(from_worker0(assign_expanded), allow=names)


def empty_a_module() -> None:
    remote = weft.RemoteModule("worker1", Net)
    assert remote.to("meta").to_empty(device="cpu").device == "cpu"
    values = [*remote.state_dict().values(), *(rref.to_here() for rref in remote.buffers())]
    assert len(values) > 4
    assert not any(value.bool().any() for value in values)


def test_a_peer_does_not_read_memory_that_was_freed() -> None:
    """torch writes NaN into new memory here, as others had something in it before."""
    names = ["weft.rpc.remote_module_owner", "weft.rpc.remote_module", "tests.rpc", "tests.rpc_bodies"]
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        on_threads(from_worker0(empty_a_module), allow=names)
    finally:
        torch.use_deterministic_algorithms(False)


def test_it_needs_rpc() -> None:
    with pytest.raises(AssertionError, match="RemoteModule only works in RPC"):
        weft.RemoteModule("worker1", nn.Identity)

"""RemoteModule on a GPU: inputs go to the module's device, outputs come back to where they can go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_on
from tests.remote_module.modules import Net, make_rows, read, run_backward_there
from tests.rpc.workers import from_worker0, with_options
from weft import RemoteModule, rpc

pytestmark = run_on(gpu_threads=2, gpu=2, timeout=90, collective_timeout=60)


class Nested(nn.Module):
    """Takes tensors apart and puts them together again, on its own device."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, given: Tensor, *, more: dict[str, list[Tensor]], word: str) -> Any:
        return {"sum": (given + self.one, [tensor + self.one for tensor in more["more"]]), "word": word}


def assert_close(found: Tensor, expected: Tensor, device: str = "cpu") -> None:
    assert str(found.device) == device
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-4, atol=1e-5)


@from_worker0
def test_without_a_device_map() -> None:
    for place in ("worker1/cuda:0", "rank:1/cuda:0"):
        remote = RemoteModule(place, Net)
        assert (remote.device, remote.is_device_map_set) == ("cuda:0", False)
        assert read(remote, "linear.weight.device") == torch.device("cuda", 0)
        assert_close(remote(make_rows()), Net()(make_rows()))
    nested = RemoteModule("worker1/cuda:0", Nested)
    for call in (nested.forward, lambda *args, **kwargs: nested.forward_async(*args, **kwargs).wait()):
        output = call(torch.ones(2), more={"more": [torch.zeros(2)]}, word="a")
        assert output["word"] == "a"
        assert_close(output["sum"][0], torch.full((2,), 2.0))
        assert_close(output["sum"][1][0], torch.ones(2))
    with pytest.raises(RuntimeError, match="device map"):
        nested(torch.ones(2, device="cuda"), more={"more": []}, word="a")


@with_options(device_maps={"worker1": {0: 0}})
@from_worker0
def test_with_a_device_map() -> None:
    remote, local = RemoteModule("worker1/cuda:0", Net), Net()
    assert remote.is_device_map_set is True
    for rows in (make_rows(), make_rows().cuda()):
        assert_close(remote(rows), local(make_rows()), "cuda:0")
    for key, value in remote.state_dict().items():
        assert_close(value, local.state_dict()[key], "cuda:0")
    remote.load_state_dict({key: value.cuda() for key, value in Net(scale=2.0).state_dict().items()})
    assert_close(remote(make_rows()), Net(scale=2.0)(make_rows()), "cuda:0")


@from_worker0
def test_state_on_a_gpu() -> None:
    remote, local = RemoteModule("worker1/cuda:0", Net), Net()
    rpc.rpc_sync("worker1", run_backward_there, (remote.get_module_rref(), make_rows()))
    local(make_rows()).square().sum().backward()
    for name, param in local.named_parameters():
        gradient = remote.remote_gradients()[name]
        assert gradient is not None
        assert param.grad is not None
        assert_close(gradient, param.grad)
    for key, value in remote.state_dict().items():
        assert_close(value, local.state_dict()[key])
    for assign in (False, True):
        state = {key: value.cuda() for key, value in Net(scale=3.0).state_dict().items()}
        remote.load_state_dict(state, assign=assign)
        assert read(remote, "linear.weight.device") == torch.device("cuda", 0)
        assert_close(remote.state_dict()["linear.weight"], torch.full((3, 3), 1.5))


@from_worker0
def test_from_device_to_device() -> None:
    remote = RemoteModule("worker1", Net)
    for move, device in (
        (lambda: remote.cuda(), "cuda:0"),
        (lambda: remote.cpu(), "cpu"),
        (lambda: remote.to("cuda:0"), "cuda:0"),
        (lambda: remote.to(device="cpu", dtype=torch.float64), "cpu"),
        (lambda: remote.cuda(0), "cuda:0"),
    ):
        assert move() is remote
        assert read(remote, "linear.weight.device") == torch.device(device)
        assert torch.device(remote.device).type == torch.device(device).type
        remote.float()
        assert_close(remote(make_rows()), Net()(make_rows()))
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        RemoteModule("worker1/cuda:100", Net).forward()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        remote.to("cuda:100")
    assert remote.device == "cuda:0"

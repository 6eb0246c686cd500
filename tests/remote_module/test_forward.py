"""Making a RemoteModule and calling it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.ranks import run_on
from tests.remote_module.modules import Echo, Moody, Net, make_rows
from tests.rpc.workers import from_worker0
from weft import RemoteModule, rpc
from weft.rpc import remote_module_methods

pytestmark = [
    run_on(threads=3, timeout=90, collective_timeout=60),
    run_on(weft=3, timeout=90, collective_timeout=60, full=True),
]


@from_worker0
def test_forward_gives_what_the_module_gives() -> None:
    remote = RemoteModule("worker1", Net, kwargs={"scale": 2.0})
    expected = Net(scale=2.0)(make_rows())
    for output in (
        remote(make_rows()),
        remote.forward(make_rows()),
        remote.forward_async(make_rows()).wait(),
    ):
        torch.testing.assert_close(output, expected)


@from_worker0
def test_arguments_arrive_as_they_were_given() -> None:
    remote = RemoteModule("worker1", Echo)
    # The names of the parameters of functions on the way.
    names = ("device", "args", "kwargs", "module_rref", "timeout", "func", "to")
    kwargs: dict[str, Any] = dict.fromkeys(names, 1)
    seen = remote.forward(torch.ones(2), ["a", (torch.zeros(1),)], None, **kwargs)
    assert seen["kwargs"] == kwargs
    tensor, listed, nothing = seen["args"]
    assert tensor.tolist() == [1, 1]
    assert (listed[0], listed[1][0].tolist(), nothing) == ("a", [0], None)
    assert remote.forward_async(word=3).wait()["kwargs"] == {"word": 3}


@from_worker0
def test_a_single_tensor_stays_one() -> None:
    output = RemoteModule("worker1", nn.Identity)(make_rows())
    assert isinstance(output, torch.Tensor)
    assert torch.equal(output, make_rows())


@from_worker0
def test_a_forward_is_one_call() -> None:
    remote = RemoteModule("worker1", nn.Identity)
    remote.forward(0)
    calls: list[str] = []

    def count(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return getattr(rpc, name)(*args, **kwargs)

        return call

    names = ("rpc_sync", "rpc_async", "remote")
    counting = SimpleNamespace(**{name: count(name) for name in names})
    given = remote_module_methods.api
    remote_module_methods.api = counting  # type: ignore[assignment]
    try:
        assert remote.forward(1) == 1
        assert remote(2) == 2
        assert remote.forward_async(3).wait() == 3
    finally:
        remote_module_methods.api = given
    assert calls == ["rpc_sync", "rpc_sync", "rpc_async"]


@from_worker0
def test_grad_mode_is_the_callers() -> None:
    remote = RemoteModule("worker1", Echo)
    assert remote()["grad"] is True
    with torch.no_grad():
        assert remote()["grad"] is False
        assert remote.forward_async().wait()["grad"] is False


def add_hooks(module_rref: Any) -> None:
    module = module_rref.local_value()
    module.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    module.register_forward_hook(lambda module, args, output: output * 10)


@from_worker0
def test_hooks_of_the_module_run() -> None:
    remote = RemoteModule("worker1", nn.Identity)
    rpc.rpc_sync("worker1", add_hooks, args=(remote.get_module_rref(),))
    assert remote.forward(1) == 20
    assert remote.forward_async(1).wait() == 20


@from_worker0
def test_errors_are_the_modules_own() -> None:
    remote = RemoteModule("worker1", Moody)
    for error in (KeyError("lost"), ZeroDivisionError("by zero")):
        with pytest.raises(type(error), match=str(error.args[0])):
            remote(error)
    with pytest.raises(TypeError, match="positional argument"):
        remote.forward()


@from_worker0
def test_a_module_that_was_not_made_is_told_of_when_it_is_used() -> None:
    text = r"Expect `module_cls\(\*args, \*\*kwargs\)` returns an instance of <class nn.Module>,"
    for use in (lambda remote: remote.forward(), lambda remote: remote.state_dict()):
        with pytest.raises(ValueError, match=text):
            use(RemoteModule("worker1", dict))
        with pytest.raises(OSError, match="no disk"):
            use(RemoteModule("worker1", Moody, (OSError("no disk"),)))
    with pytest.raises(TypeError, match="unexpected keyword"):
        RemoteModule("worker1", Net, kwargs={"nonsense": 1}).forward()


@from_worker0
def test_places_are_read() -> None:
    for place, on in (("worker1", "worker1"), ("worker1/cpu", "worker1"), ("rank:1", 1), ("rank:1/cpu", 1)):
        remote = RemoteModule(place, Echo)
        assert (remote.on, remote.device) == (on, "cpu")
        assert remote.module_rref.owner() == rpc.get_worker_info("worker1")
    here = RemoteModule("cpu", Echo)
    assert (here.on, here.device, here.module_rref.is_owner()) == ("worker0", "cpu", True)
    assert here.forward(1)["args"] == (1,)
    assert str(remote) == "RemoteModule(on=1, device='cpu')"


@from_worker0
def test_bad_places_are_refused() -> None:
    for place in ("/", "/cpu", "worker1/cpu/cpu", "rank:x/cpu", "a:b:c", ""):
        text = f"Could not parse remote_device: {place}. The valid format is '<workername>/<device>'"
        with pytest.raises(ValueError, match=text):
            RemoteModule(place, Net)
    for place, text in (
        ("worker1/foo", "Expected one of .+ device type at start of device string"),
        ("worker1/cpu2", "Invalid device string: 'cpu2'"),
        ("worker1/", "Device string must not be empty"),
    ):
        with pytest.raises(RuntimeError, match=text):
            RemoteModule(place, Net)
    with pytest.raises(TypeError, match="Invalid type for remote_device"):
        RemoteModule(1, Net)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="nobody"):
        RemoteModule("nobody", Net)


class NotAnInterface:
    """Not decorated."""


@from_worker0
def test_script_interfaces_are_refused() -> None:
    interface = type("Interface", (), {"__torch_script_interface__": True})
    with pytest.raises(ValueError, match=r"must be a type object decorated by @torch\.jit\.interface"):
        RemoteModule("worker1", Net, _module_interface_cls=NotAnInterface)
    with pytest.raises(weft.UnsupportedError, match="TorchScript"):
        RemoteModule("worker1", Net, _module_interface_cls=interface)
    assert RemoteModule("worker1", Net).is_scriptable is False


@from_worker0
def test_one_is_made_of_an_rref() -> None:
    remote = RemoteModule("worker1", Net)
    again = RemoteModule.init_from_module_rref("worker1/cpu", remote.get_module_rref())
    # The text names another worker than the one that has the module: the module is where it is.
    astray = RemoteModule.init_from_module_rref("worker2", remote.get_module_rref())
    remote.apply(zero_weights)
    for one in (again, astray):
        assert one.on == "worker1"
        assert torch.equal(one(make_rows()), remote(make_rows()))
        assert one.state_dict()["linear.weight"].abs().sum() == 0
    wrong: Any = rpc.RRef("no module")
    with pytest.raises(TypeError, match="RRef to a str"):
        RemoteModule.init_from_module_rref("worker0", wrong).forward()


def zero_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.weight)


class Doubling(RemoteModule):
    """A subclass with a forward of its own."""

    def forward(self, *args: Any) -> Any:
        return 2 * self.forward_async(*args).wait()


@from_worker0
def test_a_subclass_may_have_its_own_forward() -> None:
    assert Doubling("worker1", nn.Identity)(4) == 8

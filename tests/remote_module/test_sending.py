"""RemoteModules that go from worker to worker, and what becomes of the module."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.ranks import run_on
from tests.remote_module.modules import Net, Watched, call_three_ways, count_watched, make_rows
from tests.rpc.workers import from_worker0, wait_until
from weft import RemoteModule, rpc
from weft.rpc.remote_module import _REMOTE_MODULE_PICKLED_ATTRIBUTES

pytestmark = [
    run_on(threads=3, timeout=90, collective_timeout=60),
    run_on(weft=3, timeout=90, collective_timeout=60, full=True),
]


def attributes_of(remote: RemoteModule) -> dict[str, Any]:
    return remote.__dict__


def double_and_pass_back(remote: RemoteModule) -> RemoteModule:
    return remote.double().eval()


def run_hybrid(hybrid: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return hybrid(rows)


@from_worker0
def test_one_that_was_sent_is_the_same_module() -> None:
    remote = RemoteModule("worker1", Net)
    attributes = rpc.rpc_sync("worker2", attributes_of, (remote,))
    assert list(attributes) == [*_REMOTE_MODULE_PICKLED_ATTRIBUTES, "forward_async", "forward"]
    assert (attributes["on"], attributes["device"]) == ("worker1", "cpu")
    assert attributes["is_device_map_set"] is attributes["is_scriptable"] is False
    torch.testing.assert_close(attributes["forward"](make_rows()), Net()(make_rows()))
    # To the worker that has the module, and to one that has not.
    for worker in ("worker1", "worker2", "worker0"):
        for output in rpc.rpc_sync(worker, call_three_ways, (remote, make_rows())):
            torch.testing.assert_close(output, Net()(make_rows()))
    back = rpc.rpc_sync("worker2", double_and_pass_back, (remote,))
    assert back.state_dict()["linear.weight"].dtype == torch.float64
    assert (back.training, back.on) == (False, "worker1")
    assert remote.state_dict()["linear.weight"].dtype == torch.float64


@from_worker0
def test_one_that_was_sent_can_be_all_that_the_first_can() -> None:
    back = rpc.rpc_sync("worker2", double_and_pass_back, (RemoteModule("worker1", Net),))
    assert len(back.state_dict()) == len(Net().state_dict())
    assert str(back) == "RemoteModule(on='worker1', device='cpu')"
    back(make_rows().double())
    assert back.training is False
    assert back.train().training is True
    holder = nn.Sequential(back)
    assert next(iter(holder.state_dict())) == "0.linear.weight"
    holder.load_state_dict(holder.state_dict())
    with pytest.raises(AttributeError, match="nonsense"):
        back.nonsense  # noqa: B018


@from_worker0
def test_they_travel_inside_of_others() -> None:
    near = nn.Linear(3, 3)
    hybrid = nn.Sequential(near, RemoteModule("worker1", Net))
    output = rpc.rpc_sync("worker2", run_hybrid, (hybrid, make_rows()))
    torch.testing.assert_close(output, Net()(near(make_rows())))


class Named(RemoteModule):
    """A subclass."""

    def forward(self, rows: torch.Tensor) -> Any:
        return type(self).__name__, self.forward_async(rows).wait()


def class_and_output(remote: RemoteModule) -> Any:
    return remote(torch.ones(1))


@from_worker0
def test_a_subclass_stays_one() -> None:
    name, output = rpc.rpc_sync("worker2", class_and_output, (Named("worker1", nn.Identity),))
    assert (name, output.tolist()) == ("Named", [1.0])


@from_worker0
def test_an_added_attribute_stays_behind() -> None:
    remote = RemoteModule("worker1", Net)
    remote.note = 1
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("weft.rpc.remote_module")
    logger.addHandler(handler)
    try:
        assert "note" not in rpc.rpc_sync("worker1", attributes_of, (remote,))
    finally:
        logger.removeHandler(handler)
    assert texts == ["The new attribute ``note`` of RemoteModule is ignored during RPC pickling."]


@from_worker0
def test_plain_pickle_refuses_it() -> None:
    remote = RemoteModule("worker1", Net)
    for save in (
        lambda: torch.save(remote, io.BytesIO()),
        lambda: pickle.dumps(remote),
        lambda: copy.deepcopy(nn.Sequential(remote)),
    ):
        with pytest.raises(RuntimeError, match="RemoteModule can only be pickled when using RPC") as caught:
            save()
        assert isinstance(caught.value, weft.WeftError)


@from_worker0
def test_the_module_goes_with_the_last_of_them() -> None:
    gc.collect()
    gc.disable()  # reference counts alone must do
    try:
        before = rpc.rpc_sync("worker1", count_watched)
        remote = RemoteModule("worker1", Watched)
        again = rpc.rpc_sync("worker2", pass_back, (remote,))
        submodule = remote.get_submodule("")
        assert torch.equal(again(make_rows()), make_rows())
        assert rpc.rpc_sync("worker1", count_watched) == before + 1
        del remote, submodule
        assert torch.equal(again(make_rows()), make_rows())
        again.train(False)
        del again
        wait_until(lambda: rpc.rpc_sync("worker1", count_watched) == before, "the module is gone")
    finally:
        gc.enable()


def pass_back(remote: RemoteModule) -> RemoteModule:
    return remote

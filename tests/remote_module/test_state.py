"""What a RemoteModule has of a module besides forward."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.ranks import run_on
from tests.remote_module.modules import WIDTH, Net, make_rows, read, run_backward_there
from tests.rpc.workers import from_worker0
from weft import RemoteModule, rpc
from weft.rpc.remote_module_owner import change_module

pytestmark = [
    run_on(threads=3, timeout=90, collective_timeout=60),
    run_on(weft=3, timeout=90, collective_timeout=60, full=True),
]


def step_there(module_rref: Any, param_rrefs: list[Any], rows: torch.Tensor) -> None:
    module = module_rref.local_value()
    params = [rref.local_value() for rref in param_rrefs]
    assert all(param is own for param, own in zip(params, module.parameters(), strict=True))
    run_backward_there(module_rref, rows)
    torch.optim.SGD(params, lr=0.1).step()


@from_worker0
def test_parameters_are_rrefs() -> None:
    remote, local = RemoteModule("worker1", Net), Net()
    for found, expected in (
        (remote.named_parameters(), local.named_parameters()),
        (remote.named_parameters("net", recurse=False), local.named_parameters("net", recurse=False)),
        (remote.named_buffers(), local.named_buffers()),
        (remote.named_buffers("net"), local.named_buffers("net")),
    ):
        pairs = [(name, rref.owner_name(), rref.to_here().shape) for name, rref in found]
        assert pairs == [(name, "worker1", tensor.shape) for name, tensor in expected]
    assert len(remote.remote_parameters()) == len(list(remote.parameters())) == 4
    assert remote.remote_parameters(recurse=False) == list(remote.parameters(recurse=False)) == []
    assert len(list(remote.buffers())) == 3
    assert list(remote.buffers(recurse=False)) == []
    assert torch.equal(remote.get_parameter("linear.bias").to_here(), local.linear.bias)
    assert torch.equal(remote.get_buffer("norm.running_var").to_here(), torch.ones(WIDTH))
    with pytest.raises(AttributeError, match="nothing"):
        remote.get_parameter("linear.nothing")


@from_worker0
def test_a_local_optimizer_refuses_remote_parameters() -> None:
    remote = RemoteModule("worker1", Net)
    with pytest.raises(TypeError, match="RRef"):
        torch.optim.SGD(remote.parameters(), lr=0.1)


@from_worker0
def test_rrefs_train_the_module_itself() -> None:
    remote, local = RemoteModule("worker1", Net), Net()
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    for _ in range(2):
        remote.zero_grad()
        args = (remote.get_module_rref(), remote.remote_parameters(), make_rows())
        rpc.rpc_sync(remote.on, step_there, args=args)
        optimizer.zero_grad()
        local(make_rows()).square().sum().backward()
        optimizer.step()
    assert_same_state(remote, local)


def assert_same_state(remote: RemoteModule, local: nn.Module) -> None:
    found, expected = remote.state_dict(), local.state_dict()
    assert list(found) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)


@from_worker0
def test_gradients_can_be_read_and_forgotten() -> None:
    remote, local = RemoteModule("worker1", Net), Net()
    assert remote.remote_gradients() == dict.fromkeys(dict(local.named_parameters()))
    rpc.rpc_sync(remote.on, run_backward_there, args=(remote.get_module_rref(), make_rows()))
    local(make_rows()).square().sum().backward()
    gradients = remote.remote_gradients()
    for name, param in local.named_parameters():
        torch.testing.assert_close(gradients[name], param.grad)
    assert remote.remote_gradients(recurse=False) == {}
    remote.zero_grad(set_to_none=False)
    assert [
        gradient.abs().sum() for gradient in remote.remote_gradients().values() if gradient is not None
    ] == [0] * 4
    remote.zero_grad()
    assert set(remote.remote_gradients().values()) == {None}


@from_worker0
def test_state_goes_there_and_back() -> None:
    remote, local = RemoteModule("worker1", Net, kwargs={"scale": 3.0}), Net(scale=3.0)
    local(make_rows())
    remote(make_rows())
    assert_same_state(remote, local)
    state = remote.state_dict()
    assert state._metadata == local.state_dict()._metadata  # type: ignore[attr-defined]
    assert not any(value.requires_grad for value in state.values())
    # What came is a copy.
    state["linear.weight"].zero_()
    assert_same_state(remote, local)
    # As it goes through a file, and without the metadata.
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for loaded in (torch.load(file), dict(state)):
        other = RemoteModule("worker2", Net)
        keys = other.load_state_dict(loaded)
        assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
        assert str(keys) == "<All keys matched successfully>"
        assert other.state_dict()["linear.weight"].abs().sum() == 0


@from_worker0
def test_states_that_do_not_fit_are_refused() -> None:
    remote = RemoteModule("worker1", Net)
    state = remote.state_dict()
    bias = state.pop("linear.bias")
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "linear.bias"'):
        remote.load_state_dict(state)
    state["nonsense"] = bias
    keys = remote.load_state_dict(state, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["linear.bias"], ["nonsense"])
    state["linear.bias"] = torch.zeros(WIDTH + 1)
    with pytest.raises(RuntimeError, match=r"size mismatch for linear\.bias"):
        remote.load_state_dict(state, strict=False)
    # nn.Module asks for this key only of states that say they are new enough to have it.
    state = remote.state_dict()
    del state["norm.num_batches_tracked"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "norm.num_batches_tracked"'):
        remote.load_state_dict(state)
    remote.load_state_dict(dict(state))
    with pytest.raises(TypeError, match="Expected state_dict to be dict-like"):
        remote.load_state_dict(list(state))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"``state_dict\(keep_vars=True\)`` not supported for RemoteModule"):
        remote.state_dict(keep_vars=True)


@from_worker0
def test_a_state_can_be_assigned() -> None:
    remote = RemoteModule("worker1", Net)
    state = {key: value.double() for key, value in Net(scale=5.0).state_dict().items()}
    remote.load_state_dict(state)
    assert read(remote, "linear.weight.dtype") == torch.float32
    remote.load_state_dict(state, assign=True)
    assert read(remote, "linear.weight.dtype") == torch.float64
    assert read(remote, "linear.weight.requires_grad") is True
    assert torch.equal(remote.state_dict()["linear.weight"], state["linear.weight"])
    empty = RemoteModule("worker1/meta", Net)
    empty.load_state_dict(Net(scale=5.0).state_dict(), assign=True)
    torch.testing.assert_close(empty(make_rows()), Net(scale=5.0)(make_rows()))


class Hybrid(nn.Module):
    """Half of it is on another worker."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.near = nn.Linear(WIDTH, WIDTH)
        self.far = RemoteModule("worker1", Net, kwargs={"scale": scale})

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.far(self.near(rows))


@from_worker0
def test_a_module_that_holds_one_has_its_state() -> None:
    hybrid, other = Hybrid(2.0), Hybrid(4.0)
    expected = nn.ModuleDict({"near": nn.Linear(WIDTH, WIDTH), "far": Net()}).state_dict()
    state = hybrid.state_dict()
    assert list(state) == list(expected)
    assert state._metadata == expected._metadata  # type: ignore[attr-defined]
    keys = other.load_state_dict(state)
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    assert torch.equal(other.far.state_dict()["linear.weight"], torch.full((WIDTH, WIDTH), 1.0))
    assert torch.equal(other(make_rows()), hybrid(make_rows()))
    state["far.more"] = state.pop("far.linear.bias")
    with pytest.raises(RuntimeError, match=r'"far\.linear\.bias"') as caught:
        other.load_state_dict(state)
    assert 'Unexpected key(s) in state_dict: "far.more"' in str(caught.value)
    assert "(far): RemoteModule(on='worker1', device='cpu')" in str(hybrid)
    hybrid.eval()
    assert read(hybrid.far, "training") is False
    hybrid.train()
    assert read(hybrid.far, "norm.training") is True
    hybrid.apply(fill_with_sevens)
    assert hybrid.near.weight.unique().tolist() == [7]
    assert hybrid.far.state_dict()["linear.weight"].unique().tolist() == [7]


@from_worker0
def test_a_module_that_holds_one_passes_over_nothing() -> None:
    listing: tuple[Callable[[nn.Module], object], ...] = (
        lambda hybrid: list(hybrid.parameters()),
        lambda hybrid: list(hybrid.named_buffers()),
        lambda hybrid: hybrid.zero_grad(),
        lambda hybrid: hybrid.requires_grad_(False),
    )
    converting: tuple[Callable[[nn.Module], object], ...] = (
        lambda hybrid: hybrid.double(),
        lambda hybrid: hybrid.to("meta"),
        lambda hybrid: hybrid.share_memory(),
    )
    for uses, text in ((listing, "go through all of its parts"), (converting, "be moved or cast as one")):
        for use in uses:
            with pytest.raises(ValueError, match=f"not supported for RemoteModule.* can't {text}"):
                use(Hybrid(1.0))


def fill_with_sevens(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 7)


@from_worker0
def test_modes_and_flags_follow() -> None:
    remote = RemoteModule("worker1", Net)
    for mode in (False, True, False):
        assert remote.train(mode) is remote
        assert read(remote, "training") is read(remote, "norm.training") is remote.training is mode
    assert remote.train().training is True
    assert remote.eval() is remote
    assert read(remote, "norm.training") is remote.training is False
    with pytest.raises(ValueError, match="training mode is expected to be boolean"):
        remote.train("yes")  # type: ignore[arg-type]
    assert remote.requires_grad_(False) is remote
    assert read(remote, "linear.weight.requires_grad") is False
    remote.requires_grad_()
    assert read(remote, "linear.weight.requires_grad") is True


@from_worker0
def test_dtypes_and_devices_change() -> None:
    remote = RemoteModule("worker1", Net)
    for change, dtype in (
        (remote.double, torch.float64),
        (remote.half, torch.float16),
        (remote.float, torch.float32),
        (remote.bfloat16, torch.bfloat16),
    ):
        assert change() is remote
        assert read(remote, "norm.running_mean.dtype") == read(remote, "linear.weight.dtype") == dtype
        assert read(remote, "norm.num_batches_tracked.dtype") == torch.int64
    for args, kwargs, dtype in (
        ((torch.float64,), {}, torch.float64),
        (("cpu", torch.float32), {}, torch.float32),
        ((), {"dtype": torch.float64, "non_blocking": True}, torch.float64),
        ((torch.zeros(1),), {}, torch.float32),
    ):
        assert remote.to(*args, **kwargs) is remote
        assert read(remote, "linear.weight.dtype") == dtype
    with pytest.raises(TypeError, match="floating point or complex"):
        remote.to(torch.int32)
    assert remote.to("meta").device == "meta"
    assert read(remote, "linear.weight").is_meta
    assert remote.to_empty(device="cpu").device == "cpu"
    remote.load_state_dict(Net().state_dict())
    torch.testing.assert_close(remote(make_rows()), Net()(make_rows()))
    assert remote.cpu().device == "cpu"
    with pytest.raises(ValueError, match="cpu is no CUDA device"):
        remote.cuda("cpu")


@from_worker0
def test_a_caller_changes_only_what_it_may() -> None:
    rref = RemoteModule("worker1", Net).get_module_rref()
    for method in ("__init__", "__setstate__", "register_forward_hook", "forward"):
        with pytest.raises(weft.RefusedError, match=f"'{method}' is not among"):
            rpc.rpc_sync("worker1", change_module, (rref, method, (), {}))


@from_worker0
def test_functions_are_applied_there() -> None:
    remote = RemoteModule("worker1", Net)
    assert remote.apply(fill_with_sevens) is remote
    assert remote.state_dict()["linear.weight"].unique().tolist() == [7]
    with pytest.raises(TypeError, match="fn must be a function of a module"):
        remote.apply(torch.ones(1))  # type: ignore[arg-type]


@from_worker0
def test_a_submodule_is_a_remote_module() -> None:
    remote = RemoteModule("worker1", Net)
    linear = remote.get_submodule("linear")
    assert isinstance(linear, RemoteModule)
    assert str(linear) == str(remote)
    assert [name for name, _ in linear.named_parameters()] == ["weight", "bias"]
    linear.apply(fill_with_sevens)
    assert remote.state_dict()["linear.weight"].unique().tolist() == [7]
    torch.testing.assert_close(linear(torch.ones(1, WIDTH)), torch.full((1, WIDTH), 21.25))
    with pytest.raises(AttributeError, match="nothing"):
        remote.get_submodule("nothing")


@from_worker0
def test_it_can_be_compiled() -> None:
    remote = RemoteModule("worker1", nn.Identity)
    remote.compile(backend="eager")
    assert read(remote, "_compiled_call_impl.__name__")
    assert torch.equal(remote(make_rows()), make_rows())


REFUSED: dict[str, tuple[Any, ...]] = {
    "register_buffer": ("buffer", torch.ones(5)),
    "register_parameter": ("param", nn.Parameter(torch.ones(1))),
    "add_module": ("empty", None),
    "register_module": ("empty", None),
    "type": (torch.FloatTensor,),
    "ipu": (),
    "xpu": (),
    "mtia": (),
    "share_memory": (),
    "children": (),
    "named_children": (),
    "modules": (),
    "named_modules": (),
    **dict.fromkeys((name for name in dir(nn.Module) if re.fullmatch("_?register_.*_hook", name)), (print,)),
}


@from_worker0
def test_what_makes_no_sense_is_refused() -> None:
    remote = RemoteModule("worker1", Net)
    assert len(REFUSED) > 20
    for name, args in REFUSED.items():
        with pytest.raises(
            weft.UnsupportedError, match=f"Method ``{name}`` not supported for RemoteModule"
        ) as caught:
            getattr(remote, name)(*args)
        assert isinstance(caught.value, ValueError)
    for value in (nn.Parameter(torch.ones(1)), nn.Buffer(torch.ones(1)), nn.Linear(1, 1)):
        with pytest.raises(ValueError, match="not supported for RemoteModule"):
            remote.attribute = value
    remote.attribute = torch.ones(1)
    with pytest.raises(AttributeError, match="linear"):
        remote.linear  # noqa: B018  # the module's own attributes are not this object's

"""Which modules and parameters a call of fully_shard manages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from weft.errors import ConfigError
from weft.fsdp.api import (
    check_module,
    managed_buffers,
    managed_modules,
    managed_parameters,
    move_to_device,
    root_modules,
)


class Block(nn.Module):
    """Two layers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 3)
        self.act = nn.ReLU()
        self.down = nn.Linear(3, 2)
        self.register_buffer("scale", torch.ones(1))


class Chain(nn.ModuleList):
    """A container that can be called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = module(x)
        return x


def free(_: nn.Module) -> bool:
    return False


def names_of(model: nn.Module, ignored: set[nn.Parameter] | None = None) -> list[str]:
    return [name for name, _, _ in managed_parameters(managed_modules([model], ignored, free), ignored)]


def test_all_modules_children_first() -> None:
    model = nn.Sequential(Block(), Block())
    found = managed_modules([model], None, free)
    assert set(found) == set(model.modules())
    assert len(found) == len(set(found))
    assert found[-1] is model
    assert all(found.index(child) < found.index(module) for module in found for child in module.children())


def test_not_below_what_another_call_holds() -> None:
    model = nn.Sequential(Block(), Block(), Block())
    taken = {model[0], model[2].up}
    found = managed_modules([model], None, taken.__contains__)
    assert set(found) == {model, *model[1].modules(), model[2], model[2].act, model[2].down}
    assert [name for name, _, _ in managed_parameters(found, None)] == [
        "1.up.weight",
        "1.up.bias",
        "1.down.weight",
        "1.down.bias",
        "2.down.weight",
        "2.down.bias",
    ]


def test_a_root_is_never_asked() -> None:
    model = nn.Sequential(Block())
    assert managed_modules([model], None, lambda module: True) == [model]


def test_a_shared_module_comes_once() -> None:
    block = Block()
    assert len(managed_modules([nn.Sequential(block, block)], None, free)) == 1 + len(list(block.modules()))
    both = managed_modules([nn.Sequential(block), nn.Sequential(block)], None, free)
    assert len(both) == len(set(both)) == 2 + len(list(block.modules()))


def test_lists_are_reduced_to_their_topmost_modules() -> None:
    model = nn.Sequential(Block(), Block())
    assert root_modules([model[0].up, model[0], model[1].down, model[0]]) == [model[0], model[1].down]
    assert root_modules([model[1], model, model[0]]) == [model]
    found = managed_modules([model[0].up, model[0], model[1].down], None, free)
    assert set(found) == {*model[0].modules(), model[1].down}


def test_modules_with_only_ignored_parameters_are_left_out() -> None:
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), Block())
    ignored = set(model[0].parameters()) | {model[1].up.weight, model[1].down.weight, model[1].down.bias}
    found = managed_modules([model], ignored, free)
    assert set(found) == {model, model[1], model[1].up}
    assert names_of(model, ignored) == ["1.up.bias"]
    assert managed_buffers(found) == [model[1].scale]


def test_buffers_are_kept_where_all_parameters_are_ignored() -> None:
    model = nn.Sequential(Block(), nn.Linear(2, 2))
    found = managed_modules([model], set(model.parameters()), free)
    assert found == [model[0], model]
    assert managed_buffers(found) == [model[0].scale]


def test_ignoring_nothing_is_as_none() -> None:
    model = nn.Sequential(Block())
    assert managed_modules([model], set(), free) == managed_modules([model], None, free)


def test_tied_parameters_come_once_with_all_their_sites() -> None:
    model: Any = nn.Sequential(Block(), Block(), Block())
    model[0].up.weight = model[1].up.weight
    model[2].up.weight = model[1].up.weight
    model[2].extra = model[1].up.weight
    found = managed_parameters(managed_modules([model], None, free), None)
    assert {param for _, param, _ in found} == set(model.parameters())
    assert len(found) == len(list(model.parameters()))
    (sites,) = [sites for _, param, sites in found if param is model[1].up.weight]
    places = {(site.module, site.name) for site in sites}
    tied = {(model[0].up, "weight"), (model[1].up, "weight"), (model[2].up, "weight"), (model[2], "extra")}
    assert places == tied
    assert len(sites) == 4
    for _, param, sites in found:
        assert all(getattr(site.module, site.name) is param for site in sites)


def test_two_names_in_one_module() -> None:
    module = nn.Linear(2, 2)
    module.twin = module.weight
    ((name, _, sites), _) = managed_parameters([module], None)
    assert name == "weight"
    assert [site.name for site in sites] == ["weight", "twin"]


def test_names_are_paths_from_the_top() -> None:
    model = nn.Sequential(Block())
    assert names_of(model) == ["0.up.weight", "0.up.bias", "0.down.weight", "0.down.bias"]
    assert names_of(model[0].up) == ["weight", "bias"]


def test_scalar_parameters_are_refused() -> None:
    model = nn.Sequential(Block())
    model[0].scalar = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"Change 0\.scalar to a 1D tensor with numel equal to 1\.") as error:
        names_of(model)
    assert isinstance(error.value, ConfigError)
    assert "fully_shard doesn't support scalar parameters" in str(error.value)
    assert "0.scalar" not in names_of(model, {model[0].scalar})


def test_buffers_come_once() -> None:
    model = nn.Sequential(Block(), Block(), Block())
    model[1].scale = model[2].scale
    assert managed_buffers(managed_modules([model], None, free)) == [model[0].scale, model[1].scale]


@pytest.mark.parametrize(
    "container", [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})]
)
def test_containers_without_forward_are_refused(container: nn.Module) -> None:
    with pytest.raises(
        ValueError, match="fully_shard does not support containers that do not implement forward"
    ):
        check_module(container, "fully_shard")


def test_containers_with_forward_pass() -> None:
    check_module(Chain([nn.Linear(2, 2)]), "fully_shard")
    check_module(nn.Sequential(nn.Linear(2, 2)), "fully_shard")


def test_what_is_in_place_or_on_meta_stays() -> None:
    here = nn.Linear(2, 2)
    memory = here.weight.data_ptr()
    there = nn.Linear(2, 2, device="meta")
    move_to_device([*here.parameters(), *there.parameters()], [], torch.device("cpu"))
    assert here.weight.data_ptr() == memory
    assert there.weight.is_meta


@pytest.mark.gpu
def test_parameters_move_in_place() -> None:
    block = Block()
    params = list(block.parameters())
    device = torch.device("cuda", torch.cuda.current_device())
    move_to_device(params, [block.scale], device)
    assert all(now is before for now, before in zip(block.parameters(), params, strict=True))
    assert all(param.device == device and param.requires_grad for param in params)
    assert block.scale.device == device


def test_tensors_made_of_tensors_move_in_place() -> None:
    # The meta device stands in for an accelerator.
    param: Any = nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)), requires_grad=False)
    buffer = TwoTensor(torch.ones(3), torch.ones(3))
    move_to_device([param], [buffer], torch.device("meta"))
    assert param.a.is_meta
    assert isinstance(param, nn.Parameter)
    assert not param.requires_grad
    assert buffer.b.is_meta
    assert not isinstance(buffer, nn.Parameter)

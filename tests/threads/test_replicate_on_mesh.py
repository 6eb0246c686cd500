"""replicate along one axis of a mesh, over modules that are tensor parallel along another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import weft
from tests.data_parallel_bodies.mesh_twins import MLP, Branching, MeshTwin, make_rows, mesh_of
from tests.data_parallel_bodies.on_mesh import BODIES
from tests.data_parallel_bodies.twins import filled
from weft.errors import ConfigError
from weft.tensor_parallel import parallelize_module
from weft.testing import on_ranks


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@on_ranks(4)
def test_body(body: Callable[[str], None]) -> None:
    body("replicate")


@on_ranks(4)
def test_parameters_on_the_whole_mesh_are_refused_at_once_and_nothing_is_changed() -> None:
    model = filled(MLP())
    parallelize_module(model, mesh_of()["tp"], model.plan())
    with pytest.raises(ConfigError, match=r"'up\.weight' is a DTensor on ranks .*one rank in common"):
        weft.replicate(model)
    assert type(model) is MLP
    weft.replicate(model, device_mesh=mesh_of()["dp"])


@on_ranks(4)
def test_ignored_modules_may_lie_anywhere() -> None:
    mesh = mesh_of()
    model = filled(MLP())
    parallelize_module(model, mesh["tp"], model.plan())
    weft.replicate(model, ignored_modules=[model.up, model.down])  # over all four ranks
    model(make_rows(mesh["dp"].get_local_rank())[:2]).sum().backward()
    mean = model.head.bias.grad
    assert isinstance(model.up.weight.grad, DTensor)
    assert not isinstance(mean, DTensor)
    weft.comm.broadcast(right := mean.clone(), 0).wait()
    assert torch.equal(mean, right)


@on_ranks(4)
def test_children_are_replicated_before_their_parent() -> None:
    """Two reducers at work in one backward, both with addends to sum."""

    def wrap(model: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for child in (model.norm, model.down):
            weft.replicate(child, device_mesh=device_mesh)
        return weft.replicate(model, device_mesh=device_mesh)

    twin = MeshTwin(Branching(), wrap)
    for step in range(3):
        twin.step(step)

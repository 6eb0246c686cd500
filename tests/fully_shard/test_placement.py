"""How fully_shard places a parameter: plain, beside tensor parallelism, on a mesh that has both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.ranks import run_on
from weft.errors import ConfigError, RefusedError, UnsupportedError
from weft.fsdp.api import move_to_device
from weft.fsdp.mesh import DataParallelMesh, DataParallelMeshDims, resolve_mesh, resolve_post_forward_mesh
from weft.fsdp.placement import Placement, local_gradient, post_forward_spec, resolve_placement
from weft.tensors import make_dtensor, with_dtype

# torch 2.11 has no such meshes.
TorchDims: Any = getattr(torch_fsdp, "DataParallelMeshDims", None)


def make_mesh(*sizes: int, names: str | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=None if names is None else tuple(names.split()))


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def distributed(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(tensor, mesh, list(placements), src_data_rank=None))


def shard_of(placement: Placement, data: DataParallelMesh) -> DTensor:
    """The sharded parameter, its shard cut as torch.chunk cuts."""
    sizes = list(placement.local.shape)
    pieces = list(torch.chunk(placement.local, data.shard_size, dim=placement.dim))
    sizes[placement.dim] = 0
    empty = placement.local.new_empty(sizes)
    pieces += [empty] * (data.shard_size - len(pieces))
    return make_dtensor(pieces[data.shard_rank].contiguous(), placement.sharded_spec)


def torchs(param: nn.Parameter, mesh: DeviceMesh, dim: int, dims: Any = None) -> DTensor:
    """What torch's fully_shard makes of the parameter."""
    module = nn.Module()
    module.register_parameter("weight", param)
    options = {} if dims is None else {"dp_mesh_dims": dims}
    torch_fsdp.fully_shard(module, mesh=mesh, shard_placement_fn=lambda _: Shard(dim), **options)
    sharded = module.get_parameter("weight")
    assert isinstance(sharded, DTensor)
    return sharded


def assert_same(ours: DTensor, theirs: DTensor) -> None:
    assert ours.placements == theirs.placements
    assert ours.device_mesh == theirs.device_mesh
    assert ours.device_mesh.mesh_dim_names == theirs.device_mesh.mesh_dim_names
    assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    assert torch.equal(ours.to_local(), theirs.to_local())


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("names", [None, "replicate shard"])
@run_on(threads=4)
def test_plain_parameters_are_as_torchs(names: str | None, dim: int) -> None:
    mesh = make_mesh(4) if names is None else make_mesh(2, 2, names=names)
    data = resolve_mesh(mesh)
    param = nn.Parameter(numbered(6 if dim == 0 else 5, 8, 4))
    placement = resolve_placement("w", param, data, Shard(dim))
    assert placement.dim == dim % 3
    assert placement.local.data_ptr() == param.data_ptr()
    assert not placement.local.requires_grad
    assert (placement.unsharded_spec, placement.data_parallel_axes) == (None, frozenset())
    ours = shard_of(placement, data)
    assert_same(ours, torchs(param, mesh, dim))
    assert torch.equal(ours.full_tensor(), numbered(*param.shape))


@pytest.mark.parametrize("shape", [(5, 7), (1, 3), (9, 2)])
@pytest.mark.parametrize("dim", [0, 1])
@run_on(threads=4)
def test_uneven_on_every_dim(shape: tuple[int, int], dim: int) -> None:
    data = resolve_mesh(make_mesh(4))
    ours = shard_of(resolve_placement("w", nn.Parameter(numbered(*shape)), data, Shard(dim)), data)
    assert ours.shape == shape
    assert torch.equal(ours.full_tensor(), numbered(*shape))


@run_on(threads=2)
def test_replicate_only_splits_nothing() -> None:
    data = resolve_mesh(make_mesh(2), replicate_only=True)
    placement = resolve_placement("w", nn.Parameter(numbered(3, 4)), data, None)
    assert placement.sharded_spec.placements == (Replicate(),)
    assert torch.equal(shard_of(placement, data).to_local(), numbered(3, 4))


@run_on(threads=2)
def test_the_first_dim_unless_told() -> None:
    data = resolve_mesh(make_mesh(2))
    assert resolve_placement("w", nn.Parameter(numbered(4, 4)), data, None).dim == 0


@pytest.mark.parametrize("axis", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(9, 12), (27, 8), (8, 4)])
@run_on(threads=4)
def test_beside_tensor_parallelism_as_torchs(axis: Any, dim: int, shape: tuple[int, int]) -> None:
    mesh = make_mesh(2, 2, names="dp tp")
    data = resolve_mesh(mesh["dp"])
    param: Any = distributed(numbered(*shape), mesh["tp"], [axis])
    placement = resolve_placement("w", param, data, Shard(dim))
    expected = _StridedShard(dim, split_factor=2) if axis == Shard(dim) else Shard(dim)
    assert placement.sharded_spec.placements == (expected, axis)
    assert placement.sharded_spec.mesh == mesh
    assert placement.unsharded_spec is param._spec
    ours = shard_of(placement, data)
    assert torch.equal(ours.full_tensor(), numbered(*shape))
    if placement.local.shape[dim] % 2 == 0 or dim == 0:
        assert_same(ours, torchs(param, mesh["dp"], dim))


@run_on(threads=8)
def test_replicated_shards_beside_tensor_parallelism() -> None:
    mesh = make_mesh(2, 2, 2, names="replicate shard tp")
    data = resolve_mesh(mesh["replicate", "shard"])
    param = distributed(numbered(9, 4), mesh["tp"], [Shard(0)])
    placement = resolve_placement("w", param, data, None)
    assert placement.sharded_spec.placements == (Replicate(), _StridedShard(0, split_factor=2), Shard(0))
    ours = shard_of(placement, data)
    assert_same(ours, torchs(param, mesh["replicate", "shard"], 0))
    assert torch.equal(ours.full_tensor(), numbered(9, 4))


@run_on(threads=8)
def test_replicate_only_beside_tensor_parallelism() -> None:
    mesh = make_mesh(4, 2, names="dp tp")
    data = resolve_mesh(mesh["dp"], replicate_only=True)
    placement = resolve_placement("w", distributed(numbered(6, 4), mesh["tp"], [Shard(1)]), data, None)
    assert placement.sharded_spec.placements == (Replicate(), Shard(1))
    assert torch.equal(shard_of(placement, data).full_tensor(), numbered(6, 4))


SPMD: list[tuple[tuple[int, ...], str, dict[str, Any], tuple[Any, ...]]] = [
    ((8,), "fsdp", {"shard": "fsdp"}, (Replicate(),)),
    ((8,), "ddp", {"replicate": "ddp"}, (Replicate(),)),
    ((2, 4), "rep fsdp", {"shard": "fsdp", "replicate": "rep"}, (Replicate(), Replicate())),
    ((2, 4), "a b", {"shard": ("a", "b")}, (Replicate(), Replicate())),
    ((4, 2), "fsdp tp", {"shard": "fsdp"}, (Replicate(), Shard(0))),
    ((4, 2), "fsdp tp", {"shard": "fsdp"}, (Replicate(), Shard(1))),
    ((2, 4), "tp fsdp", {"shard": "fsdp"}, (Shard(0), Replicate())),
    ((2, 2, 2), "rep fsdp tp", {"shard": "fsdp", "replicate": "rep"}, (Replicate(), Replicate(), Shard(0))),
    ((2, 2, 2), "fsdp cp tp", {"shard": ("fsdp", "cp")}, (Replicate(), Replicate(), Shard(0))),
    ((2, 2, 2), "x y fsdp", {"shard": "fsdp", "replicate": ("x", "y")}, (Replicate(),) * 3),
    ((2, 2, 2), "r x y", {"shard": ("x", "y"), "replicate": "r"}, (Replicate(),) * 3),
]


@pytest.mark.parametrize(("sizes", "names", "dims", "placements"), SPMD)
@run_on(threads=8)
def test_a_mesh_with_all_axes_is_as_torchs(
    sizes: tuple[int, ...], names: str, dims: dict[str, Any], placements: tuple[Any, ...]
) -> None:
    mesh = make_mesh(*sizes, names=names)
    data = resolve_mesh(mesh, DataParallelMeshDims(**dims))
    param = distributed(numbered(16, 6), mesh, placements)
    placement = resolve_placement("w", param, data, None)
    own = {*data.dims.shard_names, *data.dims.replicate_names} if data.dims else set()
    assert placement.data_parallel_axes == {axis for axis, name in enumerate(names.split()) if name in own}
    ours = shard_of(placement, data)
    assert torch.equal(ours.full_tensor(), numbered(16, 6))
    if data.shard_group is None:
        assert ours.placements == placements
    elif TorchDims is not None:
        assert_same(ours, torchs(param, mesh, 0, TorchDims(**dims)))


@run_on(threads=8)
def test_axes_that_act_as_one_around_another() -> None:
    mesh = make_mesh(2, 2, 2, names="fsdp tp cp")
    data = resolve_mesh(mesh, DataParallelMeshDims(shard=("fsdp", "cp")))
    param = distributed(numbered(11, 3), mesh, [Replicate(), Shard(0), Replicate()])
    placement = resolve_placement("w", param, data, None)
    assert placement.sharded_spec.mesh.mesh_dim_names == ("fsdp_cp", "tp")
    assert placement.sharded_spec.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert torch.equal(shard_of(placement, data).full_tensor(), numbered(11, 3))
    again = resolve_placement(
        "v", distributed(numbered(4, 3), mesh, [Replicate(), Shard(0), Replicate()]), data, None
    )
    assert again.sharded_spec.mesh is placement.sharded_spec.mesh


@run_on(threads=2)
def test_parameters_that_are_refused() -> None:
    data = resolve_mesh(make_mesh(2))

    def refuse(error: type[Exception], text: str, param: nn.Parameter, wanted: Any = None) -> None:
        with pytest.raises(error, match=text):
            resolve_placement("some.weight", param, data, wanted)

    matrix = nn.Parameter(numbered(4, 4))
    refuse(ValueError, "Change some.weight to a 1D tensor with numel equal to 1", nn.Parameter(numbered()))
    turned = nn.Parameter(numbered(4, 3).t())
    refuse(NotImplementedError, "FSDP does not support non-contiguous parameters yet", turned)
    refuse(UnsupportedError, "Make 'some.weight' contiguous", turned)
    refuse(AssertionError, "Shard dim 1 is invalid for 1D tensor", nn.Parameter(numbered(4)), Shard(1))
    refuse(AssertionError, "Shard dim -3 is invalid for 2D tensor", matrix, Shard(-3))
    refuse(AssertionError, "Expected Shard, got", matrix, Replicate())
    refuse(ValueError, "Invalid shard_placement_fn result", matrix, _StridedShard(0, split_factor=2))


@run_on(threads=1)
def test_a_parameter_on_another_device() -> None:
    data = resolve_mesh(make_mesh(1))
    data.__dict__["device"] = torch.device("cuda", 0)
    with pytest.raises(
        RefusedError, match="Expects the parameter to already be moved to device cuda:0 but got cpu"
    ):
        resolve_placement("w", nn.Parameter(numbered(2)), data, None)
    meta = nn.Parameter(torch.empty(4, 2, device="meta"))
    assert resolve_placement("w", meta, data, None).local.is_meta


@run_on(threads=4)
def test_dtensors_that_are_refused_on_a_mesh_with_all_axes() -> None:
    mesh, twin = make_mesh(2, 2, names="r s"), make_mesh(2, 2, names="r s")
    data = resolve_mesh(mesh, DataParallelMeshDims(shard="s", replicate="r"))

    def refuse(text: str, param: nn.Parameter) -> None:
        with pytest.raises(ConfigError, match=text):
            resolve_placement("w", param, data, None)

    refuse("all parameters must be DTensors on the full SPMD mesh", nn.Parameter(numbered(4, 4)))
    refuse("to be the same mesh passed", distributed(numbered(4, 4), twin, [Replicate(), Replicate()]))
    wrong = distributed(numbered(4, 4), mesh, [Replicate(), Shard(0)])
    refuse(r"Expected Replicate\(\) on DP shard dim 's' \(index 1\) but got", wrong)
    wrong = distributed(numbered(4, 4), mesh, [Shard(1), Replicate()])
    refuse(r"Expected Replicate\(\) on DP replicate dim 'r' \(index 0\) but got", wrong)


@run_on(threads=2)
def test_dtensors_are_not_moved_to_another_device() -> None:
    param = distributed(numbered(4, 4), make_mesh(2), [Replicate()])
    plain = nn.Parameter(numbered(2))
    text = "the same type as the FSDP mesh but got cpu for DTensor and cuda for FSDP"
    with pytest.raises(ValueError, match=text):
        move_to_device([plain, param], [], torch.device("cuda", 0))
    assert plain.device.type == "cpu"


@run_on(threads=2)
def test_gradients_of_plain_parameters_pass() -> None:
    data = resolve_mesh(make_mesh(2))
    placement = resolve_placement("w", nn.Parameter(numbered(4, 4)), data, None)
    grad = numbered(4, 4)
    assert local_gradient(grad, placement) is grad
    coming = all_reduce(torch.ones(4, 4), "sum", dist.group.WORLD)
    arrived = local_gradient(coming, placement)
    assert type(arrived) is torch.Tensor
    assert torch.equal(arrived, torch.full((4, 4), 2.0))


@pytest.mark.parametrize("have", [Partial(), Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize("want", [Shard(0), Shard(1), Replicate()])
@run_on(threads=4)
def test_gradients_come_to_the_parameters_placements(have: Any, want: Any) -> None:
    mesh = make_mesh(2, 2, names="dp tp")
    data = resolve_mesh(mesh["dp"])
    placement = resolve_placement("w", distributed(numbered(6, 4), mesh["tp"], [want]), data, None)
    full = numbered(6, 4) * (1 + data.shard_rank)
    if have == Partial():
        part = full * (0.25 if mesh["tp"].get_local_rank() == 0 else 0.75)
        grad = DTensor.from_local(part, mesh["tp"], [have])
    else:
        grad = distribute_tensor(full, mesh["tp"], [have], src_data_rank=None)
    local = local_gradient(grad, placement)
    assert type(local) is torch.Tensor
    expected = distribute_tensor(full, mesh["tp"], [want], src_data_rank=None).to_local()
    assert torch.equal(local, expected)


@run_on(threads=4)
def test_sums_over_ranks_that_share_data_are_left_alone() -> None:
    mesh = make_mesh(2, 2, names="fsdp tp")
    data = resolve_mesh(mesh, DataParallelMeshDims(shard="fsdp"))
    placement = resolve_placement("w", distributed(numbered(4, 4), mesh, [Replicate(), Shard(1)]), data, None)
    mine = torch.full((4, 4), 1.0 + dist.get_rank())
    local = local_gradient(DTensor.from_local(mine, mesh, [Partial(), Partial()]), placement)
    first = dist.get_rank() // 2 * 2
    assert torch.equal(local, torch.full((4, 2), 1.0 + first + 2.0 + first))
    kept = local_gradient(DTensor.from_local(mine, mesh, [Replicate(), Replicate()]), placement)
    assert torch.equal(kept, mine[:, :2])
    with pytest.raises(RefusedError, match="along an axis that shares data"):
        local_gradient(DTensor.from_local(mine, mesh, [Shard(0), Shard(1)]), placement)


@run_on(threads=4)
def test_gradients_that_are_refused() -> None:
    mesh = make_mesh(2, 2, names="dp tp")
    data = resolve_mesh(mesh["dp"])
    placement = resolve_placement("w", distributed(numbered(4, 4), mesh["tp"], [Shard(0)]), data, None)
    with pytest.raises(AssertionError, match="Expected DTensor, got"):
        local_gradient(numbered(2, 4), placement)
    other = DTensor.from_local(numbered(4, 4), mesh, [Replicate(), Replicate()])
    with pytest.raises(AssertionError, match="Expected same placement length"):
        local_gradient(other, placement)


@pytest.mark.parametrize("dim", [0, 1])
@run_on(threads=4)
def test_what_is_seen_on_a_smaller_mesh(dim: int) -> None:
    data = resolve_mesh(make_mesh(4))
    smaller = resolve_post_forward_mesh(data, 2)
    assert smaller is not None
    placement = resolve_placement("w", nn.Parameter(numbered(4, 6)), data, Shard(dim))
    spec = post_forward_spec(placement, smaller)
    assert spec.placements == (Replicate(), Shard(dim))
    seen = make_dtensor(numbered(4, 6).chunk(2, dim)[smaller.shard_rank].contiguous(), spec)
    assert torch.equal(seen.full_tensor(), numbered(4, 6))


@run_on(threads=4)
def test_no_smaller_mesh_for_dtensors() -> None:
    mesh = make_mesh(2, 2, names="dp tp")
    data = resolve_mesh(mesh["dp"])
    placement = resolve_placement("w", distributed(numbered(4, 4), mesh["tp"], [Shard(0)]), data, None)
    with pytest.raises(NotImplementedError, match="Resharding to smaller mesh is not supported for DTensor"):
        post_forward_spec(placement, data)


@run_on(threads=4)
def test_the_same_placements_of_another_dtype() -> None:
    mesh = make_mesh(2, 2, names="dp tp")
    data = resolve_mesh(mesh["dp"])
    spec = resolve_placement(
        "w", distributed(numbered(4, 4), mesh["tp"], [Shard(0)]), data, None
    ).sharded_spec
    half = with_dtype(spec, torch.bfloat16)
    assert with_dtype(spec, torch.float32) is spec
    assert (half.placements, half.mesh) == (spec.placements, spec.mesh)
    assert half.tensor_meta is not None
    assert (half.tensor_meta.dtype, half.tensor_meta.shape) == (torch.bfloat16, (4, 4))
    assert spec.tensor_meta is not None
    assert spec.tensor_meta.dtype == torch.float32


@run_on(threads=2)
def test_a_dtensor_is_made_around_a_tensor() -> None:
    data = resolve_mesh(make_mesh(2))
    spec = resolve_placement("w", nn.Parameter(numbered(4, 2)), data, None).sharded_spec
    local = torch.ones(2, 2)
    made = make_dtensor(local, spec)
    assert type(made) is DTensor
    assert made._local_tensor is local
    assert not made.requires_grad
    param: Any = nn.Parameter(make_dtensor(torch.zeros(2, 2), spec))
    param.grad = made
    torch.optim.SGD([param], lr=1.0).step()
    assert torch.equal(param.detach().full_tensor(), -torch.ones(4, 2))


def test_the_private_names_are_there() -> None:
    assert {"_local_tensor", "_spec"} <= set(DTensor.__slots__), "fully_shard reads both"

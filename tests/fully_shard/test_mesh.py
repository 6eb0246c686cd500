"""Which ranks a mesh means for fully_shard: groups, sizes, named axes, smaller meshes, refusals."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import weft
from tests.ranks import run_on
from weft.errors import ConfigError, RefusedError, StateError, UnfitError
from weft.fsdp import mesh as meshes
from weft.fsdp.mesh import DataParallelMesh, DataParallelMeshDims, resolve_mesh, resolve_post_forward_mesh
from weft.fsdp.policy import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

DIMS = DataParallelMeshDims


def ranks_of(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


def make_mesh(*sizes: int, names: str | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=None if names is None else tuple(names.split()))


def assert_sizes_fit(data: DataParallelMesh) -> None:
    shard, replicate = data.shard_group, data.replicate_group
    assert (data.shard_size, data.shard_rank) == ((1, 0) if shard is None else (shard.size(), shard.rank()))
    assert (data.replicate_size, data.replicate_rank) == (
        (1, 0) if replicate is None else (replicate.size(), replicate.rank())
    )
    assert data.groups == [group for group in (shard, replicate) if group is not None]
    assert data.device == torch.device("cpu")


@run_on(threads=2)
def test_no_mesh_is_the_world() -> None:
    if torch.accelerator.is_available():
        pytest.skip("the default mesh is the accelerator's")
    data = resolve_mesh(None)
    assert data.shard_group is dist.group.WORLD
    assert (data.replicate_group, data.mesh.shape, data.mesh.mesh_dim_names) == (None, (2,), None)
    assert_sizes_fit(data)
    assert resolve_mesh(None).mesh is data.mesh
    replicated = resolve_mesh(None, replicate_only=True)
    assert replicated.shard_group is None
    assert replicated.replicate_group is dist.group.WORLD
    assert replicated.mesh.mesh_dim_names == ("replicate",)
    assert_sizes_fit(replicated)


def test_another_world_has_another_default_mesh() -> None:
    if torch.accelerator.is_available():
        pytest.skip("the default mesh is the accelerator's")
    seen: list[DeviceMesh] = []
    for _ in range(2):
        weft.init()
        try:
            data = resolve_mesh(None)
            assert data.shard_group is dist.group.WORLD
            assert all(data.mesh is not mesh for mesh in seen)
            seen.append(data.mesh)
        finally:
            dist.destroy_process_group()


def test_without_a_world_it_says_what_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(StateError, match=r"weft\.init\(\)"):
        resolve_mesh(None)


@run_on(threads=4)
def test_one_axis_shards_and_two_replicate_and_shard() -> None:
    rank = dist.get_rank()
    flat = resolve_mesh(make_mesh(4))
    assert ranks_of(flat.shard_group) == [0, 1, 2, 3]
    assert flat.replicate_group is None
    assert_sizes_fit(flat)
    grid = resolve_mesh(make_mesh(2, 2, names="replicate shard"))
    assert ranks_of(grid.shard_group) == [rank - rank % 2, rank - rank % 2 + 1]
    assert ranks_of(grid.replicate_group) == [rank % 2, rank % 2 + 2]
    assert_sizes_fit(grid)


@run_on(threads=4)
def test_an_axis_of_a_larger_mesh() -> None:
    whole = make_mesh(2, 2, names="dp tp")
    data = resolve_mesh(whole["dp"])
    assert ranks_of(data.shard_group) == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    replicated = resolve_mesh(whole["tp"], replicate_only=True)
    assert replicated.shard_group is None
    assert ranks_of(replicated.replicate_group) == ranks_of(whole["tp"].get_group())
    assert_sizes_fit(replicated)


@run_on(threads=4)
def test_meshes_that_are_refused() -> None:
    cube, grid, named = make_mesh(4, 1, 1), make_mesh(2, 2), make_mesh(2, 2, names="a b")
    with pytest.raises(ConfigError, match="fully_shard expects a 1D or 2D DeviceMesh but got DeviceMesh"):
        resolve_mesh(cube)
    text = "Please init the 2D mesh for HSDP with mesh_dim_names specified"
    with pytest.raises(AssertionError, match=text) as error:
        resolve_mesh(grid)
    assert isinstance(error.value, RefusedError)
    with pytest.raises(ValueError, match="replicate expects a 1D DeviceMesh but got"):
        resolve_mesh(named, replicate_only=True)


@run_on(threads=2)
def test_a_rank_outside_the_mesh_is_told() -> None:
    mesh = DeviceMesh("cpu", [0])
    if dist.get_rank() == 0:
        assert resolve_mesh(mesh).shard_size == 1
    else:
        with pytest.raises(ConfigError, match="rank 1 is not in"):
            resolve_mesh(mesh)


@pytest.mark.parametrize(
    ("dims", "names", "text"),
    [
        (DIMS(shard="x"), "a b", "Mesh dim name 'x' not found in mesh.mesh_dim_names"),
        (DIMS(replicate=("a", "x")), "a b", "Mesh dim name 'x' not found in mesh.mesh_dim_names"),
        (DIMS(shard="a"), None, "mesh must have mesh_dim_names when dp_mesh_dims is provided"),
        (DIMS(shard=(), replicate=()), "a b", "At least one of shard or replicate must be set"),
        (DIMS(shard=("b", "a")), "a b", "must stand in the mesh's order"),
        (DIMS(shard=("a", "a")), "a b", "each once"),
        (DIMS(shard="a", replicate=("a", "b")), "a b", "both as shard and as replicate"),
    ],
)
@run_on(threads=4)
def test_named_axes_that_are_refused(dims: DataParallelMeshDims, names: str | None, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve_mesh(make_mesh(2, 2, names=names), dims)


@run_on(threads=4)
def test_replicate_takes_no_shard_axes() -> None:
    mesh = make_mesh(2, 2, names="a b")
    with pytest.raises(ValueError, match=r"requires replicate-only dims \(no shard dims\)"):
        resolve_mesh(mesh, DIMS(shard="a", replicate="b"), replicate_only=True)
    data = resolve_mesh(mesh, DIMS(replicate=("a", "b")), replicate_only=True)
    assert (data.shard_group, ranks_of(data.replicate_group)) == (None, [0, 1, 2, 3])


@run_on(threads=8)
def test_named_axes_of_a_mesh_of_three() -> None:
    rank = dist.get_rank()
    mesh = make_mesh(2, 2, 2, names="a b tp")
    one = resolve_mesh(mesh, DIMS(shard="b"))
    assert ranks_of(one.shard_group) == ranks_of(mesh["b"].get_group())
    assert (one.dims, one.spmd_mesh) == (DIMS(shard="b"), mesh)
    two = resolve_mesh(mesh, DIMS(shard=("a", "b")))
    assert ranks_of(two.shard_group) == list(range(rank % 2, 8, 2))
    assert two.mesh.shape == (4,)
    assert_sizes_fit(two)
    assert resolve_mesh(mesh, DIMS(shard=("a", "b"))).shard_group is two.shard_group
    apart = resolve_mesh(mesh, DIMS(shard=("a", "tp"), replicate="b"))
    assert ranks_of(apart.shard_group) == sorted({rank & 2 | high | low for high in (0, 4) for low in (0, 1)})
    assert ranks_of(apart.replicate_group) == [rank & ~2, rank | 2]
    assert (apart.mesh.shape, apart.mesh.mesh_dim_names) == ((2, 4), ("b", "a_tp"))
    assert_sizes_fit(apart)


@run_on(threads=4)
def test_named_axes_of_a_mesh_of_one() -> None:
    mesh = make_mesh(4, names="fsdp")
    data = resolve_mesh(mesh, DIMS(shard="fsdp"))
    assert data.mesh is mesh
    assert ranks_of(data.shard_group) == [0, 1, 2, 3]


def test_mesh_dims_say_which() -> None:
    with pytest.raises(
        ValueError, match="At least one of shard or replicate must be set in DataParallelMesh"
    ):
        DIMS()
    assert DIMS(shard="a").shard_names == ("a",)
    assert DIMS(shard=("a", "b")).shard_names == ("a", "b")
    assert DIMS(shard="a").replicate_names == ()
    assert DIMS(replicate="r").replicate_names == ("r",)


def test_policies_are_torchs() -> None:
    policy = MixedPrecisionPolicy()
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (None, None, None)
    assert policy.cast_forward_inputs
    assert MixedPrecisionPolicy(torch.bfloat16, torch.float32) == MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    assert hash(policy) == hash(MixedPrecisionPolicy())
    assert isinstance(CPUOffloadPolicy(), OffloadPolicy)
    assert CPUOffloadPolicy().pin_memory
    assert OffloadPolicy() == OffloadPolicy()


@run_on(threads=4)
def test_a_smaller_mesh_has_groups_of_neighbours() -> None:
    rank = dist.get_rank()
    data = resolve_mesh(make_mesh(4))
    assert resolve_post_forward_mesh(data, True) is data
    assert resolve_post_forward_mesh(data, False) is None
    assert resolve_post_forward_mesh(data, 4) is data
    smaller = resolve_post_forward_mesh(data, 2)
    assert smaller is not None
    assert ranks_of(smaller.shard_group) == [rank - rank % 2, rank - rank % 2 + 1]
    assert ranks_of(smaller.replicate_group) == [rank % 2, rank % 2 + 2]
    assert_sizes_fit(smaller)
    assert resolve_post_forward_mesh(resolve_mesh(make_mesh(4)), 2) is smaller


@run_on(threads=8)
def test_a_smaller_mesh_of_two_axes() -> None:
    rank = dist.get_rank()
    smaller = resolve_post_forward_mesh(resolve_mesh(make_mesh(2, 4, names="replicate shard")), 2)
    assert smaller is not None
    assert ranks_of(smaller.shard_group) == [rank - rank % 2, rank - rank % 2 + 1]
    assert ranks_of(smaller.replicate_group) == list(range(rank % 2, 8, 2))


@run_on(threads=8)
def test_a_smaller_mesh_beside_tensor_parallelism() -> None:
    rank = dist.get_rank()
    data = resolve_mesh(make_mesh(4, 2, names="dp tp")["dp"])
    smaller = resolve_post_forward_mesh(data, 2)
    assert smaller is not None
    assert ranks_of(smaller.shard_group) == ([rank, rank + 2] if rank % 4 < 2 else [rank - 2, rank])
    assert ranks_of(smaller.replicate_group) == sorted([rank, (rank + 4) % 8])
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=smaller.shard_group)
    assert total.item() == sum(ranks_of(smaller.shard_group) or [])


@pytest.mark.parametrize("size", [0, -1, 3, 8])
@run_on(threads=4)
def test_sizes_that_are_no_factor(size: int) -> None:
    text = f"If passing reshard_after_forward as an int, it should be a factor of 4, not {size}"
    with pytest.raises(ValueError, match=text):
        resolve_post_forward_mesh(resolve_mesh(make_mesh(4)), size)


@run_on(threads=2)
def test_a_size_that_is_no_number() -> None:
    wrong: Any = "all"
    with pytest.raises(ValueError, match="should be a bool or an int representing the group size"):
        resolve_post_forward_mesh(resolve_mesh(make_mesh(2)), wrong)


def test_one_rank_means_unsharded_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    def ask() -> DataParallelMesh | None:
        data = resolve_mesh(make_mesh(2))
        return resolve_post_forward_mesh(data, 1) or resolve_post_forward_mesh(data, 1)

    meshes._warn_of_one.cache_clear()
    with caplog.at_level(logging.WARNING, logger="weft.fsdp.mesh"):
        assert weft.launch(ask, ranks=1 + 1, kind="thread", timeout=60) == [None, None]
    texts = [record.getMessage() for record in caplog.records if record.name == "weft.fsdp.mesh"]
    assert "reshard_after_forward=1 leaves parameters unsharded" in texts[0]
    assert len(texts) <= 2  # two threads may both be the first


@run_on(threads=4)
def test_meshes_of_different_origin_can_not_be_joined() -> None:
    data = resolve_mesh(make_mesh(2, 2, names="dp tp")["dp"])
    stranger = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("x", "y"))["y"]
    with pytest.raises(RuntimeError, match="Cannot concatenate DeviceMeshes derived from different") as error:
        data.joined_with(stranger)
    assert isinstance(error.value, UnfitError)
    with pytest.raises(UnfitError, match="have no names"):
        resolve_mesh(make_mesh(4)).joined_with(stranger)


@run_on(threads=4)
def test_axes_of_one_mesh_join_once() -> None:
    mesh = make_mesh(2, 2, names="dp tp")
    data = resolve_mesh(mesh["dp"])
    joined = data.joined_with(mesh["tp"])
    assert joined == mesh
    assert data.joined_with(mesh["tp"]) is joined


def test_the_private_names_are_there() -> None:
    for name in ("_flatten", "_concatenate"):
        assert hasattr(DeviceMesh, name), f"fully_shard over several named axes needs DeviceMesh.{name}"

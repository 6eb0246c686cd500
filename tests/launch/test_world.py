"""The private torch APIs of weft.launcher.world, each by name: what breaks when one moves."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, debug
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard

from weft.launcher import launch
from weft.launcher.world import RankWorld, is_rank_thread, isolated_worlds

pytestmark = pytest.mark.threads


def test_rank_world_has_every_attribute_of_torchs_world() -> None:
    """New state in distributed_c10d._World must get a place in RankWorld, or ranks will not find it."""
    properties = {
        name for name, value in vars(distributed_c10d._World).items() if isinstance(value, property)
    }
    assert properties
    names = {name for name in dir(RankWorld()) if not name.startswith("_")}
    only_in_some = {"pg_flight_recorder_hooks"}  # torch 2.15
    assert properties | only_in_some == names


def test_torch_looks_its_world_up_in_the_module() -> None:
    """distributed_c10d._world is the one place: replacing it changes what dist.get_rank() sees."""
    assert launch(dist.get_rank, ranks=3, kind="thread") == [0, 1, 2]
    assert launch(is_rank_thread, ranks=2, kind="thread") == [True, True]
    assert not is_rank_thread()


def test_thread_isolation_mode_gives_each_thread_its_own_names() -> None:
    """torch._C._distributed_c10d._set_thread_isolation_mode: one name, another group on each rank."""

    def body():
        return distributed_c10d._resolve_process_group(dist.group.WORLD.group_name).rank()

    assert launch(body, ranks=3, kind="thread") == [0, 1, 2]


def test_meshes_of_different_threads_differ() -> None:
    """device_mesh.get_backend() == "threaded" is how DeviceMesh learns that ranks are threads."""
    assert hasattr(device_mesh, "get_backend")
    first, second = launch(lambda: init_device_mesh("cpu", (2,)), ranks=2, kind="thread")
    assert first != second


def test_shape_inference_of_dtensor_has_a_lock_to_replace() -> None:
    """ShardingPropagator._fake_mode_lock, where this torch has it, is a real lock during a launch."""
    if not hasattr(ShardingPropagator, "_fake_mode_lock"):
        pytest.skip("this torch has no such lock")
    before = ShardingPropagator._fake_mode_lock
    with isolated_worlds():
        assert isinstance(ShardingPropagator._fake_mode_lock, type(threading.RLock()))
    assert ShardingPropagator._fake_mode_lock is before


def test_findings_of_dtensor_can_be_forgotten() -> None:
    """tensor.debug._clear_sharding_prop_cache empties the cache that holds meshes of ended worlds."""
    debug._clear_sharding_prop_cache()
    assert debug._get_python_sharding_prop_cache_info().currsize == 0


def full_weights(expected: torch.Tensor) -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    place = mesh["tp"].get_local_rank()
    piece = expected.chunk(2)[place].chunk(2)[mesh["dp"].get_local_rank()]
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    spread = DTensor.from_local(piece, mesh, placements, shape=expected.shape, stride=expected.stride())
    return torch.equal(spread.full_tensor(), expected)


def test_plans_of_redistribution_are_not_taken_from_an_earlier_launch() -> None:
    """tensor._redistribute's caches: uneven pieces on a 2x2 mesh, whose threads' numbers come again."""
    for launched in range(6):
        expected = torch.arange(5.0 * 4).view(5, 4) + launched
        assert all(launch(full_weights, ranks=4, kind="thread", args=(expected,)))


def test_profiler_can_describe_a_ranks_groups() -> None:
    """_World.pg_config_info is torch's own, applied to a RankWorld."""

    def body():
        dist.new_group([0, 1])
        return [entry["group_size"] for entry in distributed_c10d._world.pg_config_info]

    assert launch(body, ranks=3, kind="thread") == [[3, 2], [3, 2], [3]]


def test_autograd_runs_in_the_ranks_thread() -> None:
    """set_multithreading_enabled(False) is per thread, so ranks set it for themselves alone."""
    flag = torch._C._is_multithreading_enabled
    assert launch(flag, ranks=2, kind="thread") == [False, False]
    assert flag()

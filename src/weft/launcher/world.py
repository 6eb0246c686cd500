"""c10d's idea of "the world this process is in", made one a rank.

All private torch APIs of the launcher are here; tests/launch/test_world.py names each.

- `distributed_c10d._world` and `_World`: WorldSwitch takes the place of the first. When they move,
  thread-ranks share one world and fail at init.
- `_distributed_c10d._set_thread_isolation_mode`: C++ keeps a map of group names a thread. When it moves,
  functional collectives find another rank's group.
- `device_mesh.get_backend`, and what DeviceMesh makes of "threaded": a mesh equals only meshes of its
  own thread. When it moves, DTensor's caches mix up ranks.
- `ShardingPropagator._fake_mode_lock`: one thread at a time infers shapes. When it moves, DTensor
  operations of several threads race on FakeTensorMode.
- `tensor.debug._clear_sharding_prop_cache`, `_clear_fast_path_sharding_prop_cache`, and of
  `tensor._redistribute` `_gen_transform_infos` and `clear_redistribute_planner_cache`: worlds that end
  leave no findings of DTensor's behind. When they move, DTensors of a later world are made from those of
  this one.

A world belongs to the thread that entered it. Threads which a rank starts itself see the process's own world,
as all other threads do. While thread-ranks run, the process's own groups can't be found *by name* from C++
(functional collectives on them fail), since that map is switched for all threads at once.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from weft.launcher.stores import Store

_lock = threading.Lock()


class RankWorld:
    """One rank's groups: the attributes that torch's own `_World` has, for itself alone."""

    def __init__(self) -> None:
        self.default_pg: dist.ProcessGroup | None = None
        self.pg_map: dict[dist.ProcessGroup, tuple[str, Store]] = {}
        self.pg_names: dict[dist.ProcessGroup, str] = {}
        self.pg_group_ranks: dict[dist.ProcessGroup, dict[int, int]] = {}
        self.pg_backend_config: dict[dist.ProcessGroup, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[dist.ProcessGroup]] = {}
        self.pg_to_tag: dict[dist.ProcessGroup, str] = {}
        self.pg_coalesce_state: dict[dist.ProcessGroup, list[Any]] = {}
        self.pg_flight_recorder_hooks: dict[dist.ProcessGroup, Any] = {}  # torch 2.15
        self.comms: list[Any] = []

    @property
    def pg_config_info(self) -> list[dict[str, Any]]:
        """What the profiler records of the groups; computed by torch from the attributes above."""
        describe: Any = distributed_c10d._World.pg_config_info
        return describe.fget(self)


class WorldSwitch:
    """Stands in c10d's `_world` and hands each rank-thread its own world, all other threads the original.

    It is there from the first live thread launch to the end of the last rank-thread: a thread that
    its launch gave up on must not fall back on the process's own groups.
    """

    def __init__(self, original: Any) -> None:
        # Through __dict__, since only names that are there are set on the switch itself.
        self.__dict__.update(
            original=original,
            entered=threading.local(),
            num_launches=0,
            num_rank_threads=0,
            undo_patches=ExitStack(),
        )

    def current(self) -> Any:
        """The calling thread's world."""
        return getattr(self.entered, "world", self.original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self.current(), name, value)


def is_rank_thread() -> bool:
    """Whether the calling thread is a rank, with a world of its own."""
    return isinstance(_world(), WorldSwitch) and hasattr(_world().entered, "world")


@contextmanager
def isolated_worlds() -> Generator[None]:
    """Make room for worlds of threads, as long as the context lasts. Launches may nest and overlap."""
    _forget_plans()
    with _lock:
        switch = _world() if isinstance(_world(), WorldSwitch) else WorldSwitch(_world())
        distributed_c10d._world = switch
        switch.num_launches += 1
        if switch.num_launches == 1:
            _patch(switch.undo_patches)
    try:
        yield
    finally:
        with _lock:
            switch.num_launches -= 1
            if switch.num_launches == 0:
                switch.undo_patches.close()
            _remove_if_unused(switch)


@contextmanager
def entered_world(world: RankWorld) -> Generator[None]:
    """Give the calling thread this world. Begins inside isolated_worlds(), and may outlast it."""
    with _lock:
        switch: WorldSwitch = _world()
        switch.num_rank_threads += 1
    switch.entered.world = world
    try:
        yield
    finally:
        del switch.entered.world
        with _lock:
            switch.num_rank_threads -= 1
            _remove_if_unused(switch)


def init_default_group(backend: str, store: Store, rank: int, num_ranks: int, timeout: timedelta) -> None:
    """Make the calling rank's default group."""
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)


def abort_groups(reason: str, world: RankWorld | None = None) -> None:
    """Make the peers' calls on a rank's groups raise, now and later: the calling rank's, or those of `world`.

    Groups written in Python offer `abort(reason)`. The others tell their peers by being destroyed.
    """
    groups: list[Any] = list((world or _world()).pg_map)
    for group in groups:
        if type(group) is not dist.ProcessGroup:
            with suppress(Exception):  # the failure being reported matters more than this one
                group.abort(reason)


def destroy_groups() -> None:
    """Destroy the calling rank's groups, if the user's function has not."""
    _forget_meshes()
    if not dist.is_initialized():
        return
    if is_rank_thread() and _world().num_launches == 0:
        # Its launch gave up on this thread, and C++ is back to the process's own map of names, which
        # destroy_process_group would empty.
        for group in list(_world().pg_map):
            group.shutdown()
        return
    dist.destroy_process_group()


def _forget_meshes() -> None:
    """Let DTensor forget what it found out by meshes of a world that is gone: the next world's are equal.

    What C++ keeps for each thread goes in any case: torch 2.11 may lock up when two threads end that have
    some.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    debug: Any = importlib.import_module("torch.distributed.tensor.debug")
    if is_rank_thread():
        debug._clear_fast_path_sharding_prop_cache()
    else:
        debug._clear_sharding_prop_cache()
        _forget_plans()


def _forget_plans() -> None:
    """The same for plans of redistribution, which the ranks of a process share.

    Meshes of thread-ranks differ by their threads' numbers, and a later rank may get an earlier one's.
    """
    redistribution: Any = sys.modules.get("torch.distributed.tensor._redistribute")
    if redistribution is not None:
        redistribution._gen_transform_infos.cache_clear()
        redistribution.clear_redistribute_planner_cache()


def _world() -> Any:
    return distributed_c10d._world


def _remove_if_unused(switch: WorldSwitch) -> None:
    if switch.num_launches == 0 and switch.num_rank_threads == 0 and _world() is switch:
        distributed_c10d._world = switch.original


def _patch(undo: ExitStack) -> None:
    """Make the rest of torch's process-wide state fit for ranks that are threads."""
    c10d_extension: Any = importlib.import_module("torch._C._distributed_c10d")
    set_isolation: Callable[[bool], None] = c10d_extension._set_thread_isolation_mode
    set_isolation(True)
    undo.callback(set_isolation, False)

    real_get_backend = device_mesh.get_backend  # pyright: ignore[reportPrivateImportUsage]

    def get_backend(group: dist.ProcessGroup | None = None) -> str:
        return "threaded" if group is None and is_rank_thread() else real_get_backend(group)

    undo.enter_context(_attribute(device_mesh, "get_backend", get_backend))
    # Imported while no rank's world is entered: functions in it have `group=group.WORLD` as a default, which
    # would hold the group of the rank that imported it first. That group was then never destroyed: on gloo
    # its peers' threads waited until the process exited, and aborted it.
    importlib.import_module("torch.distributed.tensor.debug")
    # Imported now, since it takes a second, which process-ranks should not pay when they start.
    sharding: Any = importlib.import_module("torch.distributed.tensor._sharding_prop")
    if hasattr(sharding.ShardingPropagator, "_fake_mode_lock"):
        undo.enter_context(_attribute(sharding.ShardingPropagator, "_fake_mode_lock", threading.RLock()))
    # init_process_group wraps it, once a rank, and nothing ever unwraps it.
    undo.enter_context(_attribute(sys, "excepthook", sys.excepthook))


@contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Generator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)

"""The mesh that is meant where none was given: the whole world, on the accelerator if there is one."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.comm.group import resolve_group
from weft.errors import StateError


# The world's mesh, by name of its axis: making it twice may make a group twice. A mesh holds its groups, so
# that a dictionary by group would keep worlds alive; this keeps one a thread, until that thread has another.
class _LastDefault(threading.local):
    group: weakref.ref[dist.ProcessGroup] | None = None
    meshes: dict[str | None, DeviceMesh]


_last_default = _LastDefault()


def default_mesh(name: str | None) -> DeviceMesh:
    """A mesh of one axis, called `name`, that has all ranks; the same one until the world is another.

    Under torchrun it makes the world if nobody has. Raises StateError where there is none to make.
    """
    group = _world_group()
    if _last_default.group is None or _last_default.group() is not group:
        _last_default.group, _last_default.meshes = weakref.ref(group), {}
    mesh = _last_default.meshes.get(name)
    if mesh is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = "cpu" if accelerator is None else accelerator.type
        _select_device(kind)
        names = None if name is None else (name,)
        mesh = _last_default.meshes[name] = init_device_mesh(kind, (group.size(),), mesh_dim_names=names)
    return mesh


def _world_group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
            raise StateError(
                "fully_shard: no process group is there, and no mesh was given. Call weft.init() first, or "
                "run the function with weft.launch() or torchrun."
            )
        dist.init_process_group()  # under torchrun the first use makes the world
    return resolve_group(None)


def _select_device(kind: str) -> None:
    """Choose this rank's device where nobody has, before DeviceMesh does: ranks may share one."""
    if kind == "cpu":
        return
    module: Any = torch.get_device_module(kind)
    if hasattr(module, "is_initialized") and not module.is_initialized() and module.device_count():
        local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        module.set_device(local_rank % module.device_count())
        module.init()

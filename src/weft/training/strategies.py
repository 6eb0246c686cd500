"""Spread a model over the ranks, by a strategy's name.

First inside (tensor parallel), then around (data parallel): the order in which weft's features are put
together by hand, too. Nothing here is out of a user's reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate

from weft import tensor_parallel as tp
from weft.data_parallel import DistributedDataParallel, replicate
from weft.errors import ConfigError
from weft.fsdp import fully_shard
from weft.training.layout import Layout

TpPlan = Mapping[str, tp.ParallelStyle]


@dataclass(frozen=True)
class Placed:
    """A model on its ranks.

    `module` is what is called in a step. `data_group` are the ranks that have other data and the same
    parameters or shards of them; None where there are none.
    """

    module: nn.Module
    mesh: DeviceMesh
    data_group: dist.ProcessGroup | None

    @property
    def bare(self) -> nn.Module:
        """The module whose names are the user's."""
        return self.module.module if isinstance(self.module, DistributedDataParallel) else self.module


def place(model: nn.Module, layout: Layout, device: torch.device, tp_plan: TpPlan | None = None) -> Placed:
    """Spread the model over all ranks of the world, which all call this with equal models.

    `tp_plan` says how layers are split, for strategies that split them, as in parallelize_module.
    fully_shard makes a group of each child of each ModuleList, and one of what is left.
    Raises ConfigError when a plan is needed and not given, or can't be.
    """
    if layout.kind.has_tp and tp_plan is None:
        raise ConfigError(
            f"Trainer: strategy {layout.strategy} splits layers and needs a plan of how: give `tp_plan`, as "
            "for weft.tensor_parallel.parallelize_module."
        )
    if device.type == "cuda":
        # Before the mesh is made, which takes LOCAL_RANK for the number of a device: ranks may share one.
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, layout.shape, mesh_dim_names=layout.names)
    model.to(device)
    if tp_plan is not None and layout.kind.has_tp:
        tp.parallelize_module(model, mesh["tp"], dict(tp_plan))
    data_mesh = _data_mesh(mesh, layout)
    return Placed(_share_data(model, layout, data_mesh), mesh, _group_of(data_mesh, layout))


def transformer_plan() -> dict[str, tp.ParallelStyle]:
    """How the layers of model.py's transformer are split: heads, features, and the table of bytes."""
    read_whole = tp.PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    return {
        "embed": tp.RowwiseParallel(input_layouts=Replicate()),
        # Made whole once for the layers that read it, which then share one sum of gradients in backward.
        "blocks.*.attention": read_whole,
        "blocks.*.attention.query": tp.ColwiseParallel(),
        "blocks.*.attention.key": tp.ColwiseParallel(),
        "blocks.*.attention.value": tp.ColwiseParallel(),
        "blocks.*.attention.out": tp.RowwiseParallel(),
        "blocks.*.mlp": read_whole,
        "blocks.*.mlp.gate": tp.ColwiseParallel(),
        "blocks.*.mlp.up": tp.ColwiseParallel(),
        "blocks.*.mlp.down": tp.RowwiseParallel(),
        "head": tp.ColwiseParallel(output_layouts=Replicate()),
    }


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    """What fully_shard makes a group of its own: the children of module lists."""
    return [
        child
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        for child in module.children()
        if any(True for _ in child.parameters())
    ]


def _share_data(model: nn.Module, layout: Layout, mesh: DeviceMesh | None) -> nn.Module:
    on_axis: dict[str, Any] = {"device_mesh": mesh} if layout.kind.has_tp else {}
    match layout.kind.data:
        case "ddp" | "remote":
            return DistributedDataParallel(model, **on_axis)
        case "replicate":
            return replicate(model, **on_axis)
        case "fsdp":
            for module in (*blocks_of(model), model):
                fully_shard(module, mesh=mesh)
            return model
        case None:
            return model


def _data_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh | None:
    names = layout.data_names
    if not names:
        return None
    return mesh if names == layout.names else mesh[names]


def _group_of(mesh: DeviceMesh | None, layout: Layout) -> dist.ProcessGroup | None:
    if mesh is None:
        return None
    return mesh.get_group() if layout.kind.has_tp else dist.group.WORLD

"""Turn a module's parameters into DTensors: every rank keeps its part of the values of one of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from weft import comm
from weft.comm.layouts import pad
from weft.errors import ConfigError
from weft.tensor_parallel.axis import FEATURE, Axis
from weft.tensors import make_parameter, shaped_spec


def param_at(module: nn.Module, name: str) -> Any:
    """The parameter of this qualified name."""
    owner, _, own_name = name.rpartition(".")
    return module.get_submodule(owner)._parameters[own_name]


def check_param(name: str, param: Any, layout: Placement, axis: Axis, where: str) -> None:
    """Raise for a parameter that can't be laid out so."""
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise ConfigError(
            f"{where}: '{name}' is uninitialized. Run a forward of the module once before it is parallelized."
        )
    if isinstance(param, DTensor):
        if param.device_mesh != axis.mesh or tuple(param.placements) != (layout,):
            raise ConfigError(
                f"{where}: '{name}' is a DTensor already, placed {tuple(param.placements)} on "
                f"{param.device_mesh}, and the style needs ({layout},) on {axis.mesh}. Parallelize a module "
                "once, before replicate, DistributedDataParallel or fully_shard; tied parameters need styles "
                "that place them alike."
            )
    elif param._backward_hooks or param._post_accumulate_grad_hooks:
        raise ConfigError(
            f"{where}: '{name}' has hooks, which a DTensor in its place would not have: the user's, or those "
            "of DistributedDataParallel or replicate. Parallelize first, and register hooks afterwards."
        )
    elif isinstance(layout, Shard) and not -param.ndim <= layout.dim < param.ndim:
        raise ConfigError(f"{where}: '{name}' has shape {tuple(param.shape)}, which has no dim {layout.dim}.")


def distribute_param(
    param: nn.Parameter, layout: Placement, axis: Axis, src_data_rank: int | None
) -> nn.Parameter:
    """The parameter as a DTensor on the mesh's kind of device, with the values of the group's rank
    `src_data_rank`.

    None takes each rank's own. On the meta device there are no values, and it stays there.
    """
    if isinstance(param, DTensor):
        return param
    data = _on_mesh_device(param.detach(), axis)
    if src_data_rank is not None and axis.size > 1 and data.device.type != "meta":
        local = _receive(data, layout, axis, src_data_rank)
    elif isinstance(layout, Shard):
        # A copy, so that the whole can be freed.
        local = comm.cut(data, layout.dim, axis.size, axis.rank).clone(memory_format=torch.contiguous_format)
    else:
        local = data.contiguous()
    spec = shaped_spec(axis.mesh, (layout,), data.shape, local)
    return make_parameter(local, spec, requires_grad=param.requires_grad)


def move_buffers(module: nn.Module, axis: Axis) -> None:
    """Let the module's buffers be where its parameters are now."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = _on_mesh_device(buffer, axis)


def _on_mesh_device(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The tensor in memory that the mesh's ranks compute in; without values it stays where it is."""
    if tensor.device.type in ("meta", axis.mesh.device_type):
        return tensor
    return tensor.to(axis.mesh.device_type)


def _receive(data: torch.Tensor, layout: Placement, axis: Axis, source: int) -> torch.Tensor:
    """This rank's part of the source's values."""
    root = dist.get_global_rank(axis.group, source)
    if isinstance(layout, Replicate):
        local = data.clone(memory_format=torch.contiguous_format)
        comm.broadcast(local, root, axis.group, feature=FEATURE).wait()
        return local
    assert isinstance(layout, Shard)
    sizes = comm.chunk_sizes(data.shape[layout.dim], axis.size)
    shape = list(data.shape)
    shape[layout.dim] = sizes[0]
    received = data.new_empty(shape)
    parts = None
    if axis.rank == source:  # chunks of one size: the last ones are filled up, and cut again
        chunks = [comm.cut(data, layout.dim, axis.size, rank) for rank in range(axis.size)]
        parts = [
            pad(chunk, layout.dim, sizes[0] - size).contiguous()
            for chunk, size in zip(chunks, sizes, strict=True)
        ]
    comm.scatter(received, parts, root, axis.group, feature=FEATURE).wait()
    own = received.narrow(layout.dim, 0, sizes[axis.rank])
    return own if own.shape == received.shape else own.clone(memory_format=torch.contiguous_format)

"""Full state dicts of sharded models, one tensor at a time.

A sharded model's own `state_dict()` needs nothing of this: it has the names it always had, and DTensors that
torch.distributed.checkpoint saves and loads on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from weft import comm
from weft.errors import ConfigError
from weft.tensors import make_dtensor

_FEATURE = "fsdp"


def make_copyable(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
    """Let copies be made of what a state dict holds of this module: after `state_dict`, as a hook.

    Shards lie in one buffer, and torch doesn't copy a DTensor whose memory begins somewhere in the middle.
    """
    for name, param in module._parameters.items():
        value = state_dict.get(prefix + name)
        is_own = value is not param  # with keep_vars=True it is the parameter itself
        if is_own and type(value) is DTensor and value._local_tensor.storage_offset() > 0:
            state_dict[prefix + name] = make_dtensor(value._local_tensor, value._spec)


@torch.no_grad()
def full_state_dict(model: nn.Module, *, rank0_only: bool = True, cpu_offload: bool = True) -> dict[str, Any]:
    """The state dict with whole plain tensors. Every rank must call it.

    With `rank0_only` the others get an empty one, and no rank ever has more than one whole tensor besides
    what rank 0 collects: on the CPU, with `cpu_offload`.
    """
    is_kept = not rank0_only or dist.get_rank() == 0
    collected: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if is_kept:
            collected[name] = _own_copy(whole, value, cpu_offload=cpu_offload)
        del whole
    return collected


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Any] | None) -> None:
    """Spread rank 0's state dict of whole tensors over a sharded model. Every rank must call it; others give
    None.

    Raises ConfigError on every rank, before anything is loaded, if names or shapes don't fit.
    """
    targets = model.state_dict()
    _check(targets, state_dict)
    for name, target in targets.items():
        if not isinstance(target, torch.Tensor):
            continue
        given = None if state_dict is None else state_dict[name]
        is_sharded = isinstance(target, DTensor)
        work_device = torch.device(target.device_mesh.device_type) if is_sharded else target.device
        whole = torch.empty(target.shape, dtype=target.dtype, device=work_device)
        if dist.get_rank() == 0:
            whole.copy_(given)  # type: ignore[arg-type]
        comm.broadcast(whole, 0, feature=_FEATURE).wait()
        if isinstance(target, DTensor):
            mesh = target.device_mesh
            everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
            piece = everywhere.redistribute(placements=target.placements)._local_tensor
            target._local_tensor.copy_(piece)
        else:
            target.copy_(whole)
    extra = {name: value for name, value in targets.items() if not isinstance(value, torch.Tensor)}
    if extra:
        told: list[Any] = [None if state_dict is None else {name: state_dict[name] for name in extra}]
        comm.broadcast_object_list(told, 0, feature=_FEATURE)
        model.load_state_dict(told[0], strict=False)


def _check(targets: Mapping[str, Any], state_dict: Mapping[str, Any] | None) -> None:
    """Rank 0 looks; all hear of it."""
    problem: list[str | None] = [None]
    if dist.get_rank() == 0:
        problem[0] = _find_problem(targets, state_dict)
    comm.broadcast_object_list(problem, 0, feature=_FEATURE)
    if problem[0] is not None:
        raise ConfigError(f"load_full_state_dict: {problem[0]} Nothing was loaded.")


def _find_problem(targets: Mapping[str, Any], state_dict: Mapping[str, Any] | None) -> str | None:
    if state_dict is None:
        return "rank 0 must give a state dict, it gave None."
    missing, unexpected = (
        sorted(targets.keys() - state_dict.keys()),
        sorted(state_dict.keys() - targets.keys()),
    )
    if missing or unexpected:
        return f"the names don't fit: missing {missing}, unexpected {unexpected}."
    for name, target in targets.items():
        given = state_dict[name]
        if not isinstance(target, torch.Tensor):
            continue
        if not isinstance(given, torch.Tensor):
            return f"{name} is a {type(given).__name__}, and the model's is a tensor."
        if tuple(given.shape) != tuple(target.shape):
            return f"{name} has shape {tuple(given.shape)}, and the model's is {tuple(target.shape)}."
    return None


def _own_copy(whole: Any, value: Any, *, cpu_offload: bool) -> Any:
    """Not the model's own memory."""
    if not isinstance(whole, torch.Tensor):
        return whole
    moved = whole.cpu() if cpu_offload else whole
    is_shared = moved is whole and (not isinstance(value, DTensor) or _is_view_of(moved, value))
    return moved.clone() if is_shared else moved


def _is_view_of(tensor: torch.Tensor, value: DTensor) -> bool:
    return tensor.untyped_storage().data_ptr() == value._local_tensor.untyped_storage().data_ptr()

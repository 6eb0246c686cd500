"""Checkpoints of sharded models: full state dicts, buffers without values, and `save_pretrained`.

A sharded model's own `state_dict()` needs little of this: it has the names it always had, and DTensors that
torch.distributed.checkpoint saves and loads on any number of ranks.

Invariant: a rank never holds more than one full tensor besides what it collects.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from weft import comm
from weft.errors import ConfigError, StateError
from weft.fsdp.mesh import FEATURE
from weft.tensors import make_dtensor


def make_copyable(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
    """Let a state dict's values of this module be copied: a post-hook of `state_dict`.

    Shards lie in one buffer, and torch doesn't copy a DTensor whose memory begins somewhere in the middle.
    """
    for name, param in module._parameters.items():
        value = state_dict.get(prefix + name)
        is_own = value is not param  # with keep_vars=True it is the parameter itself
        if is_own and type(value) is DTensor and value._local_tensor.storage_offset() > 0:
            state_dict[prefix + name] = make_dtensor(value._local_tensor, value._spec)


@torch.no_grad()
def full_state_dict(model: nn.Module, *, rank0_only: bool = True, cpu_offload: bool = True) -> dict[str, Any]:
    """The state dict with full plain tensors. Every rank must call it.

    With `rank0_only` the others get an empty one, and no rank ever has more than one full tensor besides
    what rank 0 collects: on the CPU, with `cpu_offload`.
    """
    is_kept = not rank0_only or dist.get_rank() == 0
    collected: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if is_kept:
            collected[name] = _own_copy(full, value, cpu_offload=cpu_offload)
        del full
    return collected


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Any] | None) -> None:
    """Load rank 0's state dict of full tensors into a sharded model. Every rank must call it; others give
    None.

    Raises ConfigError on every rank, before anything is loaded, if names or shapes don't fit.
    """
    targets = model.state_dict()
    _check_fits(targets, state_dict)
    for name, target in targets.items():
        if not isinstance(target, torch.Tensor):
            continue
        given = None if state_dict is None else state_dict[name]
        is_sharded = isinstance(target, DTensor)
        work_device = torch.device(target.device_mesh.device_type) if is_sharded else target.device
        full = torch.empty(target.shape, dtype=target.dtype, device=work_device)
        if dist.get_rank() == 0:
            full.copy_(given)  # type: ignore[arg-type]
        comm.broadcast(full, 0, feature=FEATURE).wait()
        if isinstance(target, DTensor):
            mesh = target.device_mesh
            everywhere = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
            shard = everywhere.redistribute(placements=target.placements)._local_tensor
            target._local_tensor.copy_(shard)
        else:
            target.copy_(full)
    extra = {name: value for name, value in targets.items() if not isinstance(value, torch.Tensor)}
    if extra:
        from_rank0: list[Any] = [None if state_dict is None else {name: state_dict[name] for name in extra}]
        comm.broadcast_object_list(from_rank0, 0, feature=FEATURE)
        model.load_state_dict(from_rank0[0], strict=False)


def _check_fits(targets: Mapping[str, Any], state_dict: Mapping[str, Any] | None) -> None:
    """Raise on every rank what rank 0 finds."""
    problem: list[str | None] = [None]
    if dist.get_rank() == 0:
        problem[0] = _find_problem(targets, state_dict)
    comm.broadcast_object_list(problem, 0, feature=FEATURE)
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


def _own_copy(full: Any, value: Any, *, cpu_offload: bool) -> Any:
    """The tensor in memory that is not the model's own."""
    if not isinstance(full, torch.Tensor):
        return full
    moved = full.cpu() if cpu_offload else full
    is_shared = moved is full and (not isinstance(value, DTensor) or _is_view_of(moved, value))
    return moved.clone() if is_shared else moved


def _is_view_of(tensor: torch.Tensor, value: DTensor) -> bool:
    return tensor.untyped_storage().data_ptr() == value._local_tensor.untyped_storage().data_ptr()


# Buffers that no checkpoint sets. A model made on the meta device gets its parameters from one; buffers with
# persistent=False are not in it, and after `to_empty` hold whatever the memory held. They are filled with
# what no model computes with, and a model that has them still at its first forward is refused.


@dataclass(frozen=True, slots=True)
class UnsetBuffer:
    """A buffer as `to_empty` left it."""

    fqn: str
    owner: nn.Module
    name: str
    tensor: torch.Tensor
    version: int

    def is_unset(self) -> bool:
        """Whether nobody has written to it, or registered another in its place."""
        tensor = self.tensor
        if self.owner._buffers.get(self.name) is not tensor or tensor.numel() == 0:
            return False
        filling = _filling(tensor.dtype)
        if filling is None:
            return tensor._version == self.version
        return bool((tensor.isnan() if filling != filling else tensor == filling).all())


def find_meta_buffers(module: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """The buffers on the meta device that no state dict has, with their paths."""
    return list(_meta_buffers(module))


@torch.no_grad()
def fill_unset(places: Sequence[tuple[str, nn.Module, str]]) -> list[UnsetBuffer]:
    """Mark what lies in these places now as without values."""
    unset: list[UnsetBuffer] = []
    for fqn, owner, name in places:
        tensor = owner._buffers.get(name)
        if tensor is None or tensor.is_meta:
            continue
        filling = _filling(tensor.dtype)
        if filling is not None:
            tensor.fill_(filling)
        unset.append(UnsetBuffer(fqn, owner, name, tensor, tensor._version))
    return unset


def check_buffers_set(buffers: Sequence[UnsetBuffer]) -> None:
    """Raise if one of them still has no values."""
    names = [buffer.fqn for buffer in buffers if buffer.is_unset()]
    if names:
        raise StateError(
            f"buffers {names} have no values: to_empty made room for them, and they are in no state dict "
            "(persistent=False). Compute them on every rank as their modules' constructors do, with "
            "reset_parameters or the model's own initialization, before the first forward; or take them from "
            "a model that was made on the CPU. zero_() will do for one that is only written to."
        )


def _meta_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for path, owner in module.named_modules():
        for name in sorted(owner._non_persistent_buffers_set):
            buffer = owner._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                yield (f"{path}.{name}" if path else name), owner, name


def _filling(dtype: torch.dtype) -> float | int | None:
    """A value that no model computes with; None where the dtype has none."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return None if dtype in (torch.bool, torch.uint8) else torch.iinfo(dtype).min


# `save_pretrained` of transformers and peft would write what this rank holds; what it makes of shards is an
# error about shared tensors, for they lie in one buffer. To all-gather them all ranks must take part, and
# programs call it on one.

_STATE_DICT_PLACE = 2  # of `state_dict` among its positional arguments, behind `self`


def with_save_pretrained(own: type, methods: type) -> type:
    """A sharded module's methods, and a `save_pretrained` that refuses shards where its own class has one."""
    return _refusing(methods) if hasattr(own, "save_pretrained") else methods


@functools.cache
def _refusing(methods: type) -> type:
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[_STATE_DICT_PLACE] if len(args) > _STATE_DICT_PLACE else kwargs.get("state_dict")
        if given is None:
            raise StateError(
                f"save_pretrained: {type(self).__name__} is sharded, and this rank holds a part of each "
                "parameter. Gather first, on every rank: state = weft.fsdp.full_state_dict(model). Then save "
                "on rank 0: model.save_pretrained(folder, state_dict=state)."
            )
        own: Any = super(cls, self)
        return own.save_pretrained(*args, **kwargs)

    members = {"__module__": methods.__module__, "save_pretrained": save_pretrained}
    cls = type(methods.__name__, (methods,), members)
    return cls

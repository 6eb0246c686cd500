"""Clip gradients by their norm, whether they are plain tensors or DTensors, on any meshes.

The norm is that of all gradients as whole tensors, in one vector. Each rank takes the norms of what it holds
and sums them, to the power p, over the axes that shard (norms.py says which): one small all-reduce an axis,
and none for an axis that holds copies. No gradient goes through DTensor's dispatcher.

Every rank of the meshes calls, with the same parameters in the same order. A gradient may be None on some
ranks only: the parameters say what is summed. But one that lies otherwise than its parameter, as those of
Partial placement do, must lie so on every rank of its mesh. A plain gradient counts once, as if all ranks
held the same.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import GeneratorType

import torch
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor

from weft import comm
from weft.errors import StateError
from weft.optimizers.norms import plan_norm
from weft.optimizers.partials import MeshAxis, RoleReader, settle_partials, sum_partials
from weft.tensors import local_of

TensorOrTensors = torch.Tensor | Iterable[torch.Tensor]
HALVES = (torch.float16, torch.bfloat16)


@torch.no_grad()
def clip_grad_norm_(
    parameters: TensorOrTensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale the gradients in place so that their norm is at most `max_norm`, and return what it was.

    The same as torch.nn.utils.clip_grad_norm_, except that parameters on several meshes and plain ones go
    together, and that the norm is always a plain tensor, the same on all ranks, where torch may return a
    DTensor. A gradient of Partial placement becomes the sum, a DTensor with Replicate placement.

    Raises RuntimeError on every rank for a norm that is not finite, if asked to, and scales nothing.
    """
    params = _list_tensors(parameters)
    reader = RoleReader()
    found = _find_gradients(params, reader)
    if found.partial_owners:
        settle_partials(found.partial_owners, reader)
    present = [local for local in found.held if local is not None]
    if not present and not any(found.sharded):
        return torch.tensor(0.0)
    norm = _take_norm(found.held, found.sharded, float(norm_type), foreach)
    if error_if_nonfinite:
        _check_finite(norm, norm_type)
    _scale(present, max_norm, norm, foreach)
    return norm.to(_norm_dtype(present or params))


@torch.no_grad()
def get_total_norm(
    tensors: TensorOrTensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """The norm of all the tensors in one vector: a plain tensor, the same on all ranks.

    The same as torch.nn.utils.get_total_norm, for tensors of any placements on any meshes. They stay as they
    are: sums of those of Partial placement are made aside. Every rank must give the same ones.
    """
    given = _list_tensors(tensors)
    if not given:
        return torch.tensor(0.0)
    reader = RoleReader()
    summed = sum_partials(given, reader)
    held = [summed.get(index, local_of(tensor)) for index, tensor in enumerate(given)]
    norm = _take_norm(held, [reader.of(tensor).sharded for tensor in given], float(norm_type), foreach)
    if error_if_nonfinite:
        _check_finite(norm, norm_type)
    return norm.to(_norm_dtype(held))


@torch.no_grad()
def clip_grads_with_norm_(
    parameters: TensorOrTensors, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
) -> None:
    """Scale the gradients in place by `max_norm / (total_norm + 1e-6)`, or not at all where that is above 1.

    The same as torch.nn.utils.clip_grads_with_norm_, for gradients of any placements. Nothing is sent,
    unless the norm itself is a DTensor.
    """
    norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
    grads = [param.grad for param in _list_tensors(parameters)]
    _scale([local_of(grad) for grad in grads if grad is not None], max_norm, norm, foreach)


def _list_tensors(given: TensorOrTensors) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return [given]
    tensors = list(given)
    if not tensors and isinstance(given, GeneratorType):
        warnings.warn(
            "`parameters` is an empty generator, no gradient clipping will occur. Was it used before?",
            stacklevel=4,
        )
    return tensors


@dataclass(frozen=True)
class _Gradients:
    held: list[torch.Tensor | None]  # what this rank holds of each
    sharded: list[tuple[MeshAxis, ...]]  # the axes that each is sharded over
    partial_owners: list[torch.Tensor]  # parameters whose gradients are to be summed, where they lie, first


def _find_gradients(params: Sequence[torch.Tensor], reader: RoleReader) -> _Gradients:
    found = _Gradients([], [], [])
    for param in params:
        grad = param.grad
        if grad is None and not param.requires_grad:
            continue
        # Where it is None another rank may have it: the parameter says how it would lie.
        roles = reader.of(param if grad is None else grad)
        found.sharded.append(roles.sharded)
        found.held.append(None if grad is None else local_of(grad))
        if grad is not None and roles.partial:
            found.partial_owners.append(param)
    return found


# -- the norm ------------------------------------------------------------------------


def _take_norm(
    held: Sequence[torch.Tensor | None],
    sharded: Sequence[tuple[MeshAxis, ...]],
    p: float,
    foreach: bool | None,
) -> torch.Tensor:
    """The norm of the whole tensors, in float64, where the first of them is."""
    # torch's "norm" of order 0 counts the tensors that are not all zero, so it needs to know each.
    plan = plan_norm(sharded, is_each_apart=p == 0)
    device = next((local.device for local in held if local is not None), torch.device("cpu"))
    batches: dict[tuple[int, torch.device, torch.dtype], list[torch.Tensor]] = {}
    for slot, local in zip(plan.slots, held, strict=True):
        if local is not None and local.numel() > 0:
            batches.setdefault((slot, local.device, local.dtype), []).append(local)
    norms: list[list[torch.Tensor]] = [[] for _ in range(plan.num_slots)]
    for (slot, _, dtype), batch in batches.items():
        norms[slot].append(torch.stack(_local_norms(batch, p, dtype, foreach)).to(device, torch.float64))
    powers = [_fold(parts, p, device) for parts in norms]
    for step in plan.sums:
        vector = torch.stack([powers[slot] for slot in step.indices]).to(step.axis.device_type)
        _reduce(vector, p, step.axis)
        for slot, power in zip(step.indices, vector.to(device).unbind(), strict=True):
            powers[slot] = power
    return _finish(torch.stack(powers), p)


def _local_norms(
    batch: list[torch.Tensor], p: float, dtype: torch.dtype, foreach: bool | None
) -> list[torch.Tensor] | tuple[torch.Tensor, ...]:
    # 16 bits would lose what thousands of elements add up to.
    wide = torch.float32 if dtype in HALVES else None
    if foreach is False:
        return [torch.linalg.vector_norm(local, p, dtype=wide) for local in batch]
    return torch._foreach_norm(batch, p, dtype=wide)  # type: ignore[reportPrivateImportUsage]


def _fold(norms: Sequence[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """One number for the norms of a slot: the sum of powers, or the largest (the smallest, negated)."""
    if not norms:
        return torch.tensor(-math.inf if p == -math.inf else 0.0, dtype=torch.float64, device=device)
    each = torch.cat(list(norms))
    if math.isinf(p):
        return each.max() if p > 0 else -each.min()
    return each.sum() if p == 0 else each.pow(p).sum()


def _reduce(vector: torch.Tensor, p: float, axis: MeshAxis) -> None:
    """Make a rank's powers those of all ranks of the axis, in place."""
    if not math.isinf(p):
        comm.all_reduce(vector, group=axis.group, feature="clip").wait()
        return
    # A backend's maximum may pass over NaN, so NaN travels beside it.
    is_nan = vector.isnan()
    both = torch.stack([vector.masked_fill(is_nan, -math.inf), is_nan.to(vector.dtype)])
    comm.all_reduce(both, ReduceOp.MAX, axis.group, feature="clip").wait()
    vector.copy_(both[0].masked_fill_(both[1] > 0, math.nan))


def _finish(powers: torch.Tensor, p: float) -> torch.Tensor:
    if math.isinf(p):
        return powers.max() if p > 0 else -powers.max()
    if p == 0:
        return powers.count_nonzero().to(torch.float64)
    return powers.sum().pow(1.0 / p)


def _check_finite(norm: torch.Tensor, norm_type: float) -> None:
    if not torch.isfinite(norm):
        raise StateError(
            f"The total norm of order {float(norm_type)} for gradients from `parameters` is non-finite, so "
            "it cannot be clipped. To disable this error and scale the gradients by the non-finite norm "
            "anyway, set `error_if_nonfinite=False`"
        )


def _norm_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """The dtype of torch's norm: the real one that all of theirs fit in."""
    dtypes = dict.fromkeys(tensor.dtype.to_real() for tensor in tensors)
    return functools.reduce(torch.promote_types, dtypes)


# -- the scale -----------------------------------------------------------------------


def _scale(
    locals_: Iterable[torch.Tensor], max_norm: float, norm: torch.Tensor, foreach: bool | None
) -> None:
    """Multiply by the same factor, batched. It is not looked at: on a GPU nobody waits for it."""
    factor = (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)
    batches: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for local in locals_:
        batches.setdefault((local.device, local.dtype), []).append(local)
    for (device, dtype), batch in batches.items():
        own = factor.to(device, torch.float32 if dtype in HALVES else dtype.to_real())
        if foreach is False:
            for local in batch:
                local.mul_(own)
        else:
            torch._foreach_mul_(batch, own)  # type: ignore[reportPrivateImportUsage]

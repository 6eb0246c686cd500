"""Clip gradients by their norm, whether they are plain tensors or DTensors, on any meshes.

The norm is that of all gradients as whole tensors, in one vector. Each rank takes the norms of what it holds
and sums them, to the power p, over the axes that shard (norms.py says which): one small all-reduce an axis,
and none for an axis that holds copies. No gradient goes through DTensor's dispatcher.

Every rank of the meshes calls, with the same parameters in the same order. A gradient may be None on some
ranks only: the parameters say what is summed. But one that lies otherwise than its parameter, as those of
Partial placement do, must lie so on every rank of its mesh. A plain gradient counts once, as if all ranks
held the same.

Private names of torch, used here and nowhere else: `_utils._flatten_dense_tensors`, `_foreach_norm`.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Sequence
from types import GeneratorType

import torch
from torch._utils import _flatten_dense_tensors
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor

from weft import comm
from weft.errors import StateError
from weft.optimizers.norms import AxisRoles, Slots
from weft.optimizers.partials import WHOLE, MeshAxis, RoleReader, settle_partials, sum_partials
from weft.tensors import local_of

TensorOrTensors = torch.Tensor | Iterable[torch.Tensor]
HALVES = (torch.float16, torch.bfloat16)
# Up to here, on average, CPU tensors are strung together for one norm; larger ones are read where they lie.
SMALL_NUMEL = 2048


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
    p = float(norm_type)
    reader = RoleReader()
    found = _Batches(is_each_apart=p == 0)
    partial_owners: list[torch.Tensor] = []
    for param in params:
        grad = param.grad
        if grad is None:
            if param.requires_grad:  # another rank may have it: the parameter says how it would lie
                found.add(None, reader.of(param))
            continue
        roles = reader.of(grad)
        found.add(grad._local_tensor if type(grad) is DTensor else grad, roles)
        if roles.partial:
            partial_owners.append(param)
    if partial_owners:
        settle_partials(partial_owners, reader)  # in the memory that was found
    if not found.tensors and not any(found.slots.axes):
        return torch.tensor(0.0)
    norm = _take_norm(found, p, foreach)
    if error_if_nonfinite:
        _check_finite(norm, norm_type)
    _scale(found, max_norm, norm, foreach)
    return norm.to(found.norm_dtype() or _norm_dtype(param.dtype for param in params))


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
    found = _Batches(is_each_apart=norm_type == 0)
    for index, tensor in enumerate(given):
        found.add(summed.get(index, local_of(tensor)), reader.of(tensor))
    norm = _take_norm(found, float(norm_type), foreach)
    if error_if_nonfinite:
        _check_finite(norm, norm_type)
    return norm.to(found.norm_dtype() or torch.float32)


@torch.no_grad()
def clip_grads_with_norm_(
    parameters: TensorOrTensors, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
) -> None:
    """Scale the gradients in place by `max_norm / (total_norm + 1e-6)`, or not at all where that is above 1.

    The same as torch.nn.utils.clip_grads_with_norm_, for gradients of any placements. Nothing is sent,
    unless the norm itself is a DTensor.
    """
    norm = total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm
    found = _Batches(is_each_apart=False)
    for param in _list_tensors(parameters):
        if param.grad is not None:
            found.add(local_of(param.grad), WHOLE)
    _scale(found, max_norm, norm, foreach)


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


class _Batches:
    """What this rank holds of tensors, by how they lie. Tensors are few or many: each costs little."""

    def __init__(self, *, is_each_apart: bool) -> None:
        # torch's "norm" of order 0 counts the tensors that are not all zero, so it needs to know each.
        self.slots: Slots[MeshAxis] = Slots(is_each_apart=is_each_apart)
        self.tensors: dict[tuple[int, torch.dtype, int], list[torch.Tensor]] = {}  # by slot, dtype, device

    def add(self, local: torch.Tensor | None, roles: AxisRoles[MeshAxis]) -> None:
        """Take in a tensor, or the place of one that this rank doesn't have."""
        slot = self.slots.take(roles.sharded)
        if local is None:
            return
        key = (slot, local.dtype, local.get_device())
        batch = self.tensors.get(key)
        if batch is None:
            batch = self.tensors[key] = []
        batch.append(local)

    def norm_dtype(self) -> torch.dtype | None:
        """The dtype of their norm; None without any."""
        return _norm_dtype(dtype for _, dtype, _ in self.tensors) if self.tensors else None


# -- the norm ------------------------------------------------------------------------


def _take_norm(found: _Batches, p: float, foreach: bool | None) -> torch.Tensor:
    """The norm of the whole tensors, in float64, where the first of them is."""
    first = next(iter(found.tensors.values()), None)
    device = torch.device("cpu") if first is None else first[0].device
    norms: list[list[torch.Tensor]] = [[] for _ in found.slots.axes]
    for (slot, dtype, _), batch in found.tensors.items():
        each = _local_norms(batch, p, dtype, foreach)
        if each is not None:
            norms[slot].append(each.to(device, torch.float64))
    powers = [_fold(parts, p, device) for parts in norms]
    for step in found.slots.sums():
        vector = torch.stack([powers[slot] for slot in step.indices]).to(step.axis.device_type)
        _reduce(vector, p, step.axis)
        for slot, power in zip(step.indices, vector.to(device).unbind(), strict=True):
            powers[slot] = power
    return _finish(torch.stack(powers), p)


def _local_norms(
    batch: list[torch.Tensor], p: float, dtype: torch.dtype, foreach: bool | None
) -> torch.Tensor | None:
    """Norms of all that is in the batch, each of some of it; None if nothing is."""
    numels = [*map(torch.Tensor.numel, batch)]
    if not all(numels):
        batch = [local for local in batch if local.numel() > 0]
    if not batch:
        return None
    # 16 bits would lose what thousands of elements add up to.
    wide = torch.float32 if dtype in HALVES else None
    if foreach is False:
        return torch.stack([torch.linalg.vector_norm(local, p, dtype=wide) for local in batch])
    if batch[0].is_cpu and p != 0 and sum(numels) <= SMALL_NUMEL * len(batch):
        flat = _flatten_dense_tensors(batch)
        return torch.linalg.vector_norm(flat, p, dtype=wide).unsqueeze(0)
    return torch.stack(torch._foreach_norm(batch, p, dtype=wide))  # type: ignore[reportPrivateImportUsage]


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


def _norm_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype of torch's norm: the real one that all of theirs fit in."""
    return functools.reduce(torch.promote_types, (dtype.to_real() for dtype in dict.fromkeys(dtypes)))


# -- the scale -----------------------------------------------------------------------


def _scale(found: _Batches, max_norm: float, norm: torch.Tensor, foreach: bool | None) -> None:
    """Multiply by the same factor, batched. It is not looked at: on a GPU nobody waits for it."""
    factor = (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)
    for (_, dtype, _), batch in found.tensors.items():
        own = factor.to(batch[0].device, torch.float32 if dtype in HALVES else dtype.to_real())
        if foreach is False:
            for local in batch:
                local.mul_(own)
        else:
            torch._foreach_mul_(batch, own)  # type: ignore[reportPrivateImportUsage]

"""PowerSGD: gradients carried as low-rank factors (Vogels et al., arXiv 1905.13727).

For each matrix M of a bucket every rank computes P = M Q with the same Q; the sum of P
over ranks, made orthonormal, is the basis in which Q = Mᵀ P is averaged, and the mean is
P Qᵀ. Two all-reduces a bucket: the first carries all Ps and the gradients that are
not worth factoring, the second all Qs. What the factors leave out is added to the
next step's gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup
from torch.futures import Future

from weft import comm
from weft.comm.group import resolve_group
from weft.comm_hooks.bucket import GradBucket
from weft.comm_hooks.in_order import completed, run_in_order
from weft.comm_hooks.low_rank import (
    Factor,
    LowRankPlan,
    keep_directions,
    multiply,
    orthonormalize,
    plan_low_rank,
)
from weft.comm_hooks.mean import average, feature_of, is_lossy_safe, launch_bucket_mean
from weft.comm_hooks.powerSGD_state import PowerSGDState

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the bucket as low-rank factors, one pair a gradient.

    The first `state.start_powerSGD_iter` steps are plain means, and so are always sparse, complex and
    integer buckets, vectors, and matrices that factoring would not make smaller.
    """
    return _start(state, bucket, _average)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the bucket as one pair of factors of all its gradients, laid out as one square matrix.

    Faster than `powerSGD_hook` and much less exact: the square's rows are not those of any gradient.
    """
    return _start(state, bucket, _average_as_square)


Body = Callable[[PowerSGDState, GradBucket, ProcessGroup], torch.Tensor]


def _start(state: PowerSGDState, bucket: GradBucket, body: Body) -> Future[torch.Tensor]:
    group = resolve_group(state.process_group)
    buffer = bucket.buffer()
    is_warming_up = state.iter < state.start_powerSGD_iter
    state.maybe_increase_iter(bucket)
    if group.size() == 1:
        return completed(buffer, buffer)
    if is_warming_up:
        return average(bucket, group)
    if not is_lossy_safe(buffer) or buffer.numel() == 0:
        return run_in_order(group, buffer, lambda: launch_bucket_mean(bucket, group).wait())
    return run_in_order(group, buffer, lambda: body(state, bucket, group))


def _average(state: PowerSGDState, bucket: GradBucket, group: ProcessGroup) -> torch.Tensor:
    buffer = bucket.buffer()
    plan = plan_low_rank(
        [gradient.shape for gradient in bucket.pieces()],
        state.matrix_approximation_rank,
        state.min_compression_rate,
        batches_shapes=state.batch_tensors_with_same_shape,
    )
    state.count(bucket, plan.numel_before, plan.numel_after)
    corrected = state.with_error(bucket, buffer.numel())
    sources = bucket.with_buffer(corrected).pieces()
    results = bucket.pieces()

    means = _reduce_factors(state, bucket, group, plan, sources)
    for place, mean in zip(plan.plain, means, strict=True):
        results[place].copy_(mean)
        if state.use_error_feedback:
            sources[place].copy_(mean)  # nothing was left out of these
    if state.use_error_feedback:
        _keep_error(corrected, buffer)
    return buffer


def _reduce_factors(
    state: PowerSGDState,
    bucket: GradBucket,
    group: ProcessGroup,
    plan: LowRankPlan,
    sources: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Write P Qᵀ into the gradients that are factored; the means of the others, in plan order."""
    p_memory, qs = _memory(state, bucket, plan)
    ps = [_view(p_memory, factor.p_start, factor.p_shape) for factor in plan.factors]
    matrices = [_matrices(factor, sources) for factor in plan.factors]
    plain = p_memory[plan.p_numel :].split([sources[place].numel() for place in plan.plain])
    for part, place in zip(plain, plan.plain, strict=True):
        part.copy_(sources[place].reshape(-1)).div_(group.size())
    for q, matrix, p in zip(qs, matrices, ps, strict=True):
        orthonormalize(q, state.orthogonalization_epsilon)
        multiply(matrix, q, p)
    feature, label = feature_of(bucket), bucket.label
    comm.all_reduce(p_memory, group=group, feature=feature, label=label).wait()

    # Q of the step before stays until the new one is known to point somewhere.
    old_qs = [q.clone() for q in qs]
    for p, matrix, q in zip(ps, matrices, qs, strict=True):
        orthonormalize(p, state.orthogonalization_epsilon)
        multiply(matrix.transpose(1, 2), p, q)
    q_memory = state.q_memory_dict[bucket.index()]
    if plan.factors:
        comm.all_reduce(q_memory, group=group, feature=feature, label=label).wait().div_(group.size())

    gradients = bucket.pieces()
    for factor, p, q, old_q in zip(plan.factors, ps, qs, old_qs, strict=True):
        for at, place in enumerate(factor.members):
            out = gradients[place].view(1, factor.num_rows, factor.num_columns)
            multiply(p[at : at + 1], q[at : at + 1].transpose(1, 2), out)
        q.copy_(keep_directions(q, old_q))
    if not state.warm_start:
        state.p_memory_dict.pop(bucket.index())
        state.q_memory_dict.pop(bucket.index())
    return [part.view(sources[place].shape) for part, place in zip(plain, plan.plain, strict=True)]


def _memory(
    state: PowerSGDState, bucket: GradBucket, plan: LowRankPlan
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The memory of the first all-reduce, and the Qs: the last step's, or random ones alike on all ranks."""
    buffer, index = bucket.buffer(), bucket.index()
    p_memory = state.p_memory_dict.get(index)
    if p_memory is None or not _fits(p_memory, buffer, plan.p_numel + plan.plain_numel):
        p_memory = buffer.new_empty(plan.p_numel + plan.plain_numel)
    state.p_memory_dict[index] = p_memory
    q_memory = state.q_memory_dict.get(index)
    is_new = not state.warm_start or q_memory is None or not _fits(q_memory, buffer, plan.q_numel)
    q_memory = buffer.new_empty(plan.q_numel) if is_new or q_memory is None else q_memory.to(buffer.device)
    state.q_memory_dict[index] = q_memory
    qs = [_view(q_memory, factor.q_start, factor.q_shape) for factor in plan.factors]
    if is_new:
        _randomize(state, qs)
    return p_memory, qs


def _randomize(state: PowerSGDState, qs: list[torch.Tensor]) -> None:
    # A generator of its own: other threads draw from torch's while this runs. It draws on the CPU,
    # so that ranks with different devices agree.
    generator = torch.Generator().manual_seed(int(state.rng.randint(1_000_000_000)))
    for q in qs:
        q.copy_(torch.randn(q.shape, generator=generator, dtype=q.dtype))


def _matrices(factor: Factor, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The gradients of a Factor as matrices (3D); a view if it is one."""
    shape = (factor.num_rows, factor.num_columns)
    members = [tensors[place].view(shape) for place in factor.members]
    return members[0].unsqueeze(0) if len(members) == 1 else torch.stack(members)


def _view(memory: torch.Tensor, start: int, shape: tuple[int, int, int]) -> torch.Tensor:
    return memory.narrow(0, start, math.prod(shape)).view(shape)


def _fits(memory: torch.Tensor, buffer: torch.Tensor, numel: int) -> bool:
    return memory.numel() == numel and memory.dtype == buffer.dtype


def _keep_error(corrected: torch.Tensor, mean: torch.Tensor) -> None:
    # A gradient that is not finite is for the step's optimizer to skip; its error would never go away.
    torch.nan_to_num_(corrected[: mean.numel()].sub_(mean), 0.0, 0.0, 0.0)


def _average_as_square(state: PowerSGDState, bucket: GradBucket, group: ProcessGroup) -> torch.Tensor:
    buffer = bucket.buffer()
    side = math.ceil(math.sqrt(buffer.numel()))
    rank = min(state.matrix_approximation_rank, side)
    state.count(bucket, buffer.numel(), 2 * side * rank)
    corrected = state.with_error(bucket, side * side)
    square = Factor((0,), side, side, rank, 0, 0)
    plan = LowRankPlan((square,), (), 0, side * rank, side * rank, buffer.numel())
    mean = torch.empty_like(corrected)
    whole = GradBucket(
        bucket.index(), mean, [mean.view(side, side)], is_last=bucket.is_last(), sharers=bucket.sharers()
    )
    whole.label = bucket.label
    _reduce_factors(state, whole, group, plan, [corrected.view(side, side)])
    buffer.copy_(mean[: buffer.numel()])
    if state.use_error_feedback:
        _keep_error(corrected, buffer)
    return buffer

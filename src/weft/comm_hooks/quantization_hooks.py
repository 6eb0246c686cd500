"""The mean of gradients in a byte a number: about a quarter of float32's traffic.

Each rank adds up one chunk of the bucket. Ranks quantize the other chunks and send each
to its adder (one all-to-all), the adder sums in float32, quantizes the mean and
everyone gets it (one all-gather; between two ranks an all-to-all). Everyone restores the
same bytes, so all ranks end with the same bits, and a number is rounded twice however
many ranks there are: once by its sender, once by its adder.

`quantization_pertensor_hook` has a scale for each gradient, `quantization_perchannel_hook`
one for each 512 numbers. Both take a process group, None, or a QuantizationState.
Sparse, complex and integer buckets travel as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.futures import Future

from weft import comm
from weft.comm.group import resolve_group, state_of
from weft.comm_hooks import quantize_cpu
from weft.comm_hooks.bucket import GradBucket
from weft.comm_hooks.in_order import completed, queue_of, run_in_order
from weft.comm_hooks.mean import FEATURE, is_lossy_safe, launch_mean
from weft.comm_hooks.quantize import LIMITS, Codec, Own, TorchCodec
from weft.comm_hooks.quantize_plan import QuantizePlan, plan_blocks, plan_gradients
from weft.comm_hooks.saved import GroupFreePickle
from weft.errors import ConfigError

__all__ = ["QuantizationState", "quantization_perchannel_hook", "quantization_pertensor_hook"]


class QuantizationState(GroupFreePickle):
    """Options of the quantizing hooks, and the error that they carry over to the next step.

    `dtype` is torch.int8 or torch.float8_e4m3fn. With `error_feedback` each rank adds what
    rounding took from its gradients in one step to its gradients of the next; that costs a float32
    buffer as large as the gradients. `block_size` is how many numbers share a scale in
    `quantization_perchannel_hook`.
    """

    def __init__(
        self,
        process_group: ProcessGroup | None = None,
        *,
        dtype: torch.dtype = torch.int8,
        error_feedback: bool = False,
        block_size: int = 512,
    ) -> None:
        if dtype not in LIMITS:
            raise ConfigError(
                f"QuantizationState: dtype must be one of {[str(known) for known in LIMITS]}; got {dtype}."
            )
        if block_size < 1:
            raise ConfigError(f"QuantizationState: block_size must be at least 1; got {block_size}.")
        self.process_group = process_group
        self.dtype = dtype
        self.error_feedback = error_feedback
        self.block_size = block_size
        self.errors: dict[int, torch.Tensor] = {}  # 1D, float32, by the bucket's index

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to go on as if nothing had happened. Each rank has its own."""
        return {"errors": dict(self.errors)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what was saved."""
        self.errors = {index: error.clone() for index, error in state_dict["errors"].items()}

    def with_error(self, bucket: GradBucket) -> torch.Tensor:
        """The gradients and the error of the step before, in the memory where the new error will be."""
        buffer = bucket.buffer()
        error = self.errors.get(bucket.index())
        if error is None or error.numel() != buffer.numel():  # none yet, or the buckets were planned anew
            error = torch.zeros_like(buffer, dtype=torch.float32)
        error = self.errors[bucket.index()] = error.to(buffer.device)
        return error.add_(buffer)


State = QuantizationState | ProcessGroup | None


def quantization_pertensor_hook(process_group: State, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the bucket in bytes, with a scale for each gradient (for each rank's part of it)."""
    state = _state_of(process_group)
    return _average(
        state,
        bucket,
        lambda size: plan_gradients(
            bucket.buffer().numel(), size, bucket.starts(), is_cpu=bucket.buffer().device.type == "cpu"
        ),
    )


def quantization_perchannel_hook(
    process_group: State, bucket: GradBucket, bucket_size: int = 512
) -> Future[torch.Tensor]:
    """Average the bucket in bytes, with a scale for every `bucket_size` numbers (a state's block_size)."""
    state = _state_of(process_group)
    block_numel = state.block_size if state is process_group else bucket_size
    numel, starts = bucket.buffer().numel(), bucket.starts()
    return _average(state, bucket, lambda size: plan_blocks(numel, size, block_numel, starts))


def _state_of(given: State) -> QuantizationState:
    return given if isinstance(given, QuantizationState) else QuantizationState(given)


def _average(
    state: QuantizationState, bucket: GradBucket, plan_for: Callable[[int], QuantizePlan]
) -> Future[torch.Tensor]:
    group = resolve_group(state.process_group)
    buffer = bucket.buffer()
    if group.size() == 1:
        return completed(buffer, buffer)
    if not is_lossy_safe(buffer) or buffer.numel() == 0:
        return run_in_order(group, buffer, lambda: launch_mean(buffer, group).wait())
    plan = plan_for(group.size())
    return run_in_order(group, buffer, lambda: _exchange(state, bucket, plan, group))


def _exchange(
    state: QuantizationState, bucket: GradBucket, plan: QuantizePlan, group: ProcessGroup
) -> torch.Tensor:
    buffer = bucket.buffer()
    rank, size = state_of(group).rank, group.size()
    scratch = queue_of(group).scratch
    num_bytes = plan.message_bytes
    # A rank sends itself nothing: its own chunk goes into the sum as it is.
    peers = [peer for peer in range(size) if peer != rank]
    splits = [0 if peer == rank else num_bytes for peer in range(size)]
    sent = scratch.take("sent", num_bytes * (size - 1), buffer.device, group)
    received = scratch.take("received", num_bytes * (size - 1), buffer.device, group)
    mean = scratch.take("mean", num_bytes, buffer.device, group)
    means = scratch.take("means", num_bytes * size, buffer.device, group)
    codec = choose_codec(plan, state.dtype, buffer)
    keeps_error = state.error_feedback
    values = state.with_error(bucket) if keeps_error else buffer

    codec.quantize(values, sent, peers, keeps_error=keeps_error)
    comm.all_to_all_single(received, sent, splits, splits, group, feature=FEATURE).wait()
    codec.fold(values, received, Own(rank, mean, buffer), keeps_error=keeps_error)
    if size == 2:
        # The means are exchanged. On gloo this takes half as long as an all-gather.
        theirs = means.narrow(0, peers[0] * num_bytes, num_bytes)
        comm.all_to_all_single(theirs, mean, splits, splits, group, feature=FEATURE).wait()
    else:
        comm.all_gather_into_tensor(means, mean, group, feature=FEATURE).wait()
    codec.restore(means, buffer, peers)
    return buffer


def choose_codec(plan: QuantizePlan, dtype: torch.dtype, buffer: torch.Tensor) -> Codec:
    """Triton's kernels on a GPU that has them, torch's operations elsewhere: for long rows row by row."""
    if buffer.is_cuda and find_spec("triton") is not None:
        # Not imported before it is needed: not every torch comes with Triton.
        from weft.comm_hooks import quantize_triton

        if quantize_triton.is_usable(plan, buffer, dtype):
            return quantize_triton.TritonCodec(plan, dtype)
    if quantize_cpu.is_usable(buffer, plan):
        return quantize_cpu.RowCodec(plan, dtype)
    return TorchCodec(plan, dtype)

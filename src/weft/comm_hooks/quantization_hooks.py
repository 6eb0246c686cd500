"""The mean of gradients in a byte a number: about a quarter of float32's traffic.

Each rank adds up one chunk of the bucket. Ranks quantize the other chunks and send each
to its adder (one all-to-all), the adder sums in float32, quantizes the mean and
everyone gets it (one all-gather; between two ranks an all-to-all). Everyone restores the
same bytes, so all ranks end with the same bits, and a number is rounded twice however
many ranks there are: once by its sender, once by its adder.

The bucket of a module that is sharded over the same ranks is cut into its parts, and a rank's
part of the mean stays where it was added up: one all-to-all, half of the bytes, one rounding.

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
from weft.comm_hooks.mean import feature_of, is_lossy_safe, is_scattered, launch_bucket_mean
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
    numel, starts = bucket.buffer().numel(), bucket.starts()
    is_cpu = bucket.buffer().device.type == "cpu"
    return _average(
        state,
        bucket,
        lambda size, in_parts: plan_gradients(numel, size, starts, is_cpu=is_cpu, in_parts=in_parts),
    )


def quantization_perchannel_hook(
    process_group: State, bucket: GradBucket, bucket_size: int = 512
) -> Future[torch.Tensor]:
    """Average the bucket in bytes, with a scale for every `bucket_size` numbers (a state's block_size)."""
    state = _state_of(process_group)
    block_numel = state.block_size if state is process_group else bucket_size
    numel, starts = bucket.buffer().numel(), bucket.starts()
    return _average(
        state,
        bucket,
        lambda size, in_parts: plan_blocks(numel, size, block_numel, starts, in_parts=in_parts),
    )


def _state_of(given: State) -> QuantizationState:
    return given if isinstance(given, QuantizationState) else QuantizationState(given)


def _average(
    state: QuantizationState, bucket: GradBucket, plan_for: Callable[[int, bool], QuantizePlan]
) -> Future[torch.Tensor]:
    group = resolve_group(state.process_group)
    buffer = bucket.buffer()
    if group.size() == 1:
        return completed(buffer, buffer)
    if not is_lossy_safe(buffer) or buffer.numel() == 0:
        return run_in_order(group, buffer, lambda: launch_bucket_mean(bucket, group).wait())
    in_parts = is_scattered(bucket, group)
    exchange = _Exchange(state, bucket, plan_for(group.size(), in_parts), group)
    return run_in_order(group, buffer, exchange.average_part if in_parts else exchange.average)


class _Exchange:
    """One bucket's way through the bytes. Its steps run in the group's queue."""

    def __init__(
        self, state: QuantizationState, bucket: GradBucket, plan: QuantizePlan, group: ProcessGroup
    ) -> None:
        self._state = state
        self._bucket = bucket
        self._plan = plan
        self._group = group
        self._feature = feature_of(bucket)
        self._rank = rank = state_of(group).rank
        self._keeps_error = state.error_feedback
        # A rank sends itself nothing: its own chunk goes into the sum as it is.
        self._peers = [peer for peer in range(group.size()) if peer != rank]
        self._splits = [0 if peer == rank else plan.message_bytes for peer in range(group.size())]

    def average(self) -> torch.Tensor:
        """Leave the whole mean in the buffer, the same on all ranks."""
        buffer, num_bytes = self._bucket.buffer(), self._plan.message_bytes
        codec = choose_codec(self._plan, self._state.dtype, buffer)
        values, received = self._send(codec)
        mean, means = self._take("mean", 1), self._take("means", self._group.size())
        codec.fold(values, received, Own(self._rank, mean, buffer), keeps_error=self._keeps_error)
        if len(self._peers) == 1:
            # The means are exchanged. On gloo this takes half as long as an all-gather.
            self._all_to_all(means.narrow(0, self._peers[0] * num_bytes, num_bytes), mean)
        else:
            comm.all_gather_into_tensor(
                means, mean, self._group, feature=self._feature, label=self._bucket.label
            ).wait()
        codec.restore(means, buffer, self._peers)
        return buffer

    def average_part(self) -> torch.Tensor:
        """Leave this rank's part of the mean in its part of the buffer, which is its chunk."""
        buffer, chunk = self._bucket.buffer(), self._plan.chunks[self._rank]
        codec = choose_codec(self._plan, self._state.dtype, buffer)
        values, received = self._send(codec)
        codec.add_up(values, received, self._rank, buffer)
        if self._keeps_error:
            values.narrow(0, chunk.start, chunk.numel).zero_()  # nothing was taken from it
        return buffer

    def _send(self, codec: Codec) -> tuple[torch.Tensor, torch.Tensor]:
        """Give each rank its chunk: the numbers, whose own chunk is untouched, and what came for that."""
        sent, received = self._take("sent", len(self._peers)), self._take("received", len(self._peers))
        values = self._state.with_error(self._bucket) if self._keeps_error else self._bucket.buffer()
        codec.quantize(values, sent, self._peers, keeps_error=self._keeps_error)
        self._all_to_all(received, sent)
        return values, received

    def _all_to_all(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        comm.all_to_all_single(
            out,
            tensor,
            self._splits,
            self._splits,
            self._group,
            feature=self._feature,
            label=self._bucket.label,
        ).wait()

    def _take(self, name: str, num_messages: int) -> torch.Tensor:
        num_bytes = num_messages * self._plan.message_bytes
        return queue_of(self._group).scratch.take(name, num_bytes, self._bucket.buffer().device, self._group)


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

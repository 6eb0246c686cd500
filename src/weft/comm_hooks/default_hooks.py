"""The plain hooks: the mean, in the gradients' own dtype or in 16 bits.

`state` of these hooks is a process group, or None for the whole world. Each is one
collective, in place in the bucket's buffer: an all-reduce, or a reduce-scatter where the
bucket is of a module that is sharded over that group. A 16-bit hook leaves alone what it would
destroy (complex numbers, integers, sparse gradients) and what it can't make smaller
(gradients of 16 bits already): those travel as they are. It works on any device and
backend that sums that dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.futures import Future

from weft import comm
from weft.comm.group import resolve_group
from weft.comm_hooks.bucket import GradBucket, GradHook
from weft.comm_hooks.in_order import completed, finish_in_order, launch_in_order
from weft.comm_hooks.mean import (
    average,
    feature_of,
    is_lossy_safe,
    is_scattered,
    launch_mean,
    only_tensor,
)
from weft.comm_hooks.narrowing import narrow_quotients, widen

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]


def allreduce_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the bucket over the group: what happens without any hook."""
    group = resolve_group(process_group)
    tensor = bucket.buffer()
    if group.size() == 1:
        return completed(tensor, tensor)
    if torch.compiler.is_compiling():
        return launch_mean(tensor, group).wait()  # type: ignore[return-value]  (a graph has no futures)
    return average(bucket, group)


def fp16_compress_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the bucket in float16: half the bytes of float32. Numbers beyond 65504 become infinite."""
    return _average_as(torch.float16, process_group, bucket)


def bf16_compress_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """Average the bucket in bfloat16: half the bytes of float32, its range, eight bits of precision."""
    return _average_as(torch.bfloat16, process_group, bucket)


def fp16_compress_wrapper(hook: GradHook) -> GradHook:
    """A hook that gives `hook` the bucket in float16 and puts its result back in the bucket's dtype."""
    return _compress_around(torch.float16, hook, "fp16_compress_wrapper")


def bf16_compress_wrapper(hook: GradHook) -> GradHook:
    """A hook that gives `hook` the bucket in bfloat16 and puts its result back in the bucket's dtype."""
    return _compress_around(torch.bfloat16, hook, "bf16_compress_wrapper")


def _average_as(
    dtype: torch.dtype, process_group: ProcessGroup | None, bucket: GradBucket
) -> Future[torch.Tensor]:
    buffer = bucket.buffer()
    group = resolve_group(process_group)
    if group.size() == 1 or not _is_smaller_as(dtype, buffer):
        return allreduce_hook(group, bucket)
    compressed, feature = narrow_quotients(buffer, group.size(), dtype), feature_of(bucket)

    def launch() -> comm.Handle[torch.Tensor]:
        return comm.all_reduce(compressed, group=group, feature=feature, label=bucket.label)

    if torch.compiler.is_compiling():
        return buffer.copy_(launch().wait())  # type: ignore[return-value]  (a graph has no futures)
    if not is_scattered(bucket, group):
        return launch_in_order(group, buffer, launch).then(lambda done: widen(done.value(), buffer))

    def launch_part() -> comm.Handle[torch.Tensor]:
        part = bucket.wanted_part(compressed)
        return comm.reduce_scatter_tensor(part, compressed, group=group, feature=feature, label=bucket.label)

    def widen_part(done: Future[torch.Tensor]) -> torch.Tensor:
        # Narrow numbers in the buffer's own memory: only the first part lies where its narrow one does.
        widen(done.value(), bucket.wanted_part(buffer))
        return buffer

    return finish_in_order(group, buffer, launch_part).then(widen_part)


def _compress_around(dtype: torch.dtype, hook: GradHook, name: str) -> GradHook:
    def wrapped(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        buffer = bucket.buffer()
        if not _is_smaller_as(dtype, buffer):
            return hook(state, bucket)

        def widen_wanted(done: Future[Any]) -> torch.Tensor:
            bucket.wanted_part(buffer).copy_(bucket.wanted_part(only_tensor(done.value())))
            return buffer

        return hook(state, bucket.with_buffer(buffer.to(dtype))).then(widen_wanted)

    wrapped.__name__ = wrapped.__qualname__ = f"{name}({getattr(hook, '__qualname__', hook)})"
    return wrapped


def _is_smaller_as(dtype: torch.dtype, buffer: torch.Tensor) -> bool:
    return is_lossy_safe(buffer) and buffer.dtype.itemsize > dtype.itemsize

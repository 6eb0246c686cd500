"""fully_shard on CUDA: ranks that share one GPU on the local group, and one rank on nccl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
from tests.fsdp_bodies import (
    accumulation,
    checkpointing,
    clip,
    divergence,
    hooks,
    lifetime,
    methods,
    mixing,
    odd,
    on_gpu,
    on_gpu_streams,
    sharing,
)
from weft.testing.pool import shared_pool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

Case = tuple[Callable[..., None], tuple[Any, ...]]

TRAINING: list[Case] = [
    (on_gpu.ten_steps_of_adam, (None,)),
    (on_gpu.ten_steps_of_adam, (True,)),
    (on_gpu.ten_steps_of_adam, (False,)),
    (on_gpu.plain_steps, ()),
    (on_gpu.mixed_precision, ()),
    (on_gpu.accumulation, ()),
    (on_gpu.other_experts, ()),
    (on_gpu.recurrent, ()),
    (on_gpu.normed_weights, ()),
    (on_gpu.offloaded, (True,)),
    (on_gpu.offloaded, (False,)),
    (on_gpu.offloaded_accumulation, (True,)),
    (on_gpu.offloaded_accumulation, (False,)),
    (on_gpu.offloaded_updates_in_backward, (True,)),
    (on_gpu.offloaded_updates_in_backward, (False,)),
    (on_gpu.offloaded_adam, ()),
    (on_gpu.bf16_hook, ()),
    (on_gpu.deep_copies, ()),
    (on_gpu.states, (False,)),
    (on_gpu.states, (True,)),
    (on_gpu.scaled_losses, ()),
]
STREAMS: list[Case] = [
    (on_gpu_streams.overlap, ()),
    (on_gpu_streams.inputs_of_another_stream, ()),
    (on_gpu_streams.memory_of_a_step, ()),
    (on_gpu_streams.memory_of_gradients, ()),
    (on_gpu_streams.memory_of_unshard, ()),
    (on_gpu_streams.memory_of_an_offloaded_model, ()),
]
LATE: list[Case] = [
    (on_gpu_streams.late, ()),
    (on_gpu_streams.on_a_side_stream, ()),
    (on_gpu_streams.branches_on_two_streams, ()),
]


# The bodies of the CPU's tests: a mesh that nobody gave is the GPU's here, and modules and inputs are moved.
# These compare with tensors of the CPU themselves.
ON_CPU_ONLY = (
    divergence.each_rank_evaluates_its_own,
    hooks.reduction_hooks,
    hooks.quantizing_hooks,
    hooks.hooks_in_a_chain,
    methods.without_gradients,
    methods.unshard_and_reshard,
    mixing.recurrent,
    mixing.attention,
    mixing.parametrized_weights,
    mixing.autocast,
    odd.buffers,
    odd.ignored_parameters,
)
PLAIN = (hooks, methods, mixing, odd, clip, lifetime)
BORROWED: list[Case] = [
    *((body, (reshard,)) for body in divergence.BODIES for reshard in (True, False)),
    *((body, (True,)) for body in (*accumulation.BODIES, *sharing.BODIES)),
    *((body, (True, is_reentrant)) for body in checkpointing.BODIES for is_reentrant in (False, True)),
    *((body, ()) for bodies in PLAIN for body in bodies.BODIES),
]
BORROWED = [case for case in BORROWED if case[0] not in ON_CPU_ONLY]


def each(cases: list[Case]) -> Any:
    names = [f"{body.__module__.split('.')[-1]}.{body.__name__}{list(args) or ''}" for body, args in cases]
    return pytest.mark.parametrize(("body", "args"), cases, ids=names)


@each([*TRAINING, *STREAMS])
def test_one_rank_on_nccl(body: Callable[..., None], args: tuple[Any, ...]) -> None:
    shared_pool(1).run(body, args=args, backend="nccl", timeout=60, collective_timeout=20)


@each([*TRAINING, *STREAMS, *LATE])
def test_two_ranks_on_one_gpu(body: Callable[..., None], args: tuple[Any, ...]) -> None:
    shared_pool(2).run(body, args=args, backend="weft", timeout=60, collective_timeout=20)


@each(BORROWED)
def test_what_holds_on_the_cpu(body: Callable[..., None], args: tuple[Any, ...]) -> None:
    shared_pool(2).run(body, args=args, backend="weft", timeout=30, collective_timeout=10)


@each([(on_gpu.ten_steps_of_adam, (True,)), (on_gpu.plain_steps, ()), (on_gpu.mixed_precision, ())])
def test_two_ranks_on_gloo(body: Callable[..., None], args: tuple[Any, ...]) -> None:
    shared_pool(2).run(body, args=args, backend="gloo", timeout=60, collective_timeout=20)


@each(
    [
        (on_gpu.ten_steps_of_adam, (2,)),
        (on_gpu.ten_steps_of_adam, (True,)),
        (on_gpu.hybrid, ()),
        (on_gpu.other_experts, ()),
        (on_gpu.mixed_precision, ()),
        (on_gpu.offloaded, (True,)),
        (divergence.other_experts, (2,)),
        (divergence.two_layers_of_experts, (2,)),
        (checkpointing.around_sharded_modules, (2, False)),
    ]
)
def test_four_ranks_on_one_gpu(body: Callable[..., None], args: tuple[Any, ...]) -> None:
    shared_pool(4).run(body, args=args, backend="weft", timeout=60, collective_timeout=20)


@each(
    [
        (on_gpu.ten_steps_of_adam, (True,)),
        (on_gpu.plain_steps, ()),
        (on_gpu.mixed_precision, ()),
        (on_gpu.other_experts, ()),
        (on_gpu.offloaded, (True,)),
        (on_gpu.deep_copies, ()),
        (on_gpu_streams.overlap, ()),
    ]
)
def test_two_threads_on_one_gpu(body: Callable[..., None], args: tuple[Any, ...]) -> None:
    weft.launch(body, args=args, ranks=2, kind="thread", backend="weft", timeout=60, collective_timeout=20)

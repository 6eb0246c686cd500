"""Tensor parallelism on CUDA: ranks that share one GPU on the local group, and one rank on nccl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import weft
import weft.tensor_parallel as tp
from tests.local_bodies.deaths import run_to_the_end
from tests.tp_bodies import (
    graphs,
    modules,
    moves,
    on_gpu,
    on_gpu_randomness,
    on_gpu_streams,
    prepare,
    state,
    styles,
    training,
    uneven,
)
from tests.tp_bodies.training import Setting
from weft.testing.pool import shared_pool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

Body = Callable[..., None]

# These make tensors of the CPU themselves, or need no device.
ON_CPU_ONLY = (
    styles.rowwise_embedding_of_one_row,
    styles.other_modules_are_refused,
    styles.reprs,
    prepare.wrong_lengths,
    prepare.reprs,
    graphs.autocast,
    graphs.autocast_norms,
)
MODULES: list[Body] = [
    modules.subclasses_of_linear,
    modules.subclasses_of_embedding,
    modules.a_users_module_on_cut_sequences,
    modules.a_users_style,
    modules.changed_afterwards,
    modules.hooks_of_modules,
    modules.in_containers,
    modules.nested_modules_on_cut_sequences,
    modules.more_arguments,
    modules.tied_weights,
    modules.tied_biases,
    modules.what_is_held,
]
BORROWED: list[Body] = [
    *styles.BODIES,
    *prepare.BODIES,
    *prepare.WEFT_ONLY,
    *MODULES,
    *moves.BODIES,
    moves.lookups_without_columns,
    *graphs.BODIES,
    *graphs.WEFT_ONLY,
    *state.BODIES,
    *state.WEFT_ONLY,
    state.pickled,
]
BORROWED = [body for body in BORROWED if body not in ON_CPU_ONLY]
ON_THREADS: list[Body] = [
    styles.colwise_linear,
    styles.rowwise_linear,
    styles.rowwise_embedding,
    styles.sequence_parallel,
    styles.accumulated_gradients,
    graphs.checkpointed,
    graphs.copies,
]
SETTINGS = [
    Setting("none", has_cut_sequence=True, vocabulary=11, max_norm=0.01),
    Setting("replicate"),
    Setting("replicate", has_cut_sequence=True, max_norm=0.01),
    Setting("replicate", micro_batches=2, is_tied=True),
    Setting("ddp"),
    Setting("ddp in small buckets", has_cut_sequence=True),
    Setting("ddp", is_checkpointed=False, vocabulary=11, max_norm=0.01),
    Setting("fully_shard", has_cut_sequence=True, max_norm=0.01),
    Setting("fully_shard", is_checkpointed=True, vocabulary=11),
    Setting("fully_shard", micro_batches=2),
]


def name_of(case: object) -> str:
    if not callable(case):
        return str(case)
    return f"{case.__module__.split('.')[-1]}.{case.__name__}"  # type: ignore[attr-defined]


def each(cases: Sequence[object], name: str = "body") -> Any:
    return pytest.mark.parametrize(name, cases, ids=name_of)


def run(ranks: int, body: Body, *args: Any, backend: str = "weft") -> None:
    shared_pool(ranks).run(body, args=args, backend=backend, timeout=90, collective_timeout=20)


@each(BORROWED)
def test_what_holds_on_the_cpu(body: Body) -> None:
    run(2, on_gpu.run_there, "cuda", body)


@each(uneven.BODIES)
def test_uneven_sizes(body: Body) -> None:
    run(4, on_gpu.run_there, "cuda", body)


@each(SETTINGS, "setting")
def test_training_under_data_parallelism(setting: Setting) -> None:
    run(4, on_gpu.run_there, "cuda", training.train, (setting, 5))


@each(training.ON_FOUR)
def test_two_axes(body: Body) -> None:
    run(4, on_gpu.run_there, "cuda", body)


@each([styles.colwise_linear, styles.rowwise_linear, styles.rowwise_embedding, styles.sequence_parallel])
def test_styles_on_one_rank_of_nccl(body: Body) -> None:
    run(1, on_gpu.run_there, "cuda", body, backend="nccl")


@each([*on_gpu_randomness.BODIES, *on_gpu.BODIES])
def test_one_rank_on_nccl(body: Body) -> None:
    run(1, body, "cuda", backend="nccl")


@pytest.mark.parametrize("ranks", [2, 4])
@each([*on_gpu_randomness.BODIES, *on_gpu.BODIES])
def test_ranks_on_one_gpu(body: Body, ranks: int) -> None:
    run(ranks, body, "cuda")


@each(on_gpu_streams.BODIES)
def test_streams_on_one_rank_of_nccl(body: Body) -> None:
    run(1, body, backend="nccl")


@each([*on_gpu_streams.BODIES, on_gpu_streams.late])
def test_streams(body: Body) -> None:
    run(2, body)


@pytest.mark.parametrize("ranks", [2, 4])
@each(ON_THREADS)
def test_threads_on_one_gpu(body: Body, ranks: int) -> None:
    with on_gpu.moved("cuda"):
        weft.launch(
            body, args=(tp,), ranks=ranks, kind="thread", backend="weft", timeout=60, collective_timeout=20
        )


@each(on_gpu.BODIES)
def test_two_threads_on_one_gpu(body: Body) -> None:
    weft.launch(
        body, args=("cuda",), ranks=2, kind="thread", backend="weft", timeout=60, collective_timeout=20
    )


@pytest.mark.parametrize("style", ["row", "column"])
def test_a_word_outside_of_the_vocabulary(style: str) -> None:
    """The device asserts; the ranks can't use the GPU any more, and are nobody else's."""
    error = run_to_the_end(on_gpu.a_word_outside, (style,), ranks=2, backend="weft", collective_timeout=20)
    assert "device-side assert" in str(error)

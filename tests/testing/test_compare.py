"""compare: what is right passes, and each way to be wrong is found by the check meant for it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from tests.ranks import run_on
from weft import comm
from weft.errors import ConfigError, LaunchError, PeerError
from weft.testing import Fault, Trace, Tracer, assert_same, bare, compare, inject, train
from weft.testing.models import (
    MLP,
    BranchingMLP,
    KitModel,
    NormedMLP,
    SparseBag,
    TiedMLP,
    TinyTransformer,
    make_batches,
)


def body_of(model: type[KitModel], **arguments: Any) -> Callable[[Any], Trace]:
    def body(library: Any) -> Trace:
        bare_model = model()
        wrapped = library.DistributedDataParallel(bare_model, **arguments)
        return train(wrapped, [batch.shard() for batch in make_batches(bare_model, 3)])

    return body


def library(wrap: Callable[..., nn.Module]) -> Any:
    return SimpleNamespace(DistributedDataParallel=wrap)


def by_hand(model: nn.Module, *, divide: bool = True, skip: str = "", rank_only: int = -1) -> nn.Module:
    """Data parallelism in its simplest form, with ways to get it wrong."""
    num_ranks = dist.get_world_size()

    def sync(name: str, grad: torch.Tensor) -> torch.Tensor:
        if name == skip:
            return grad
        total = comm.all_reduce(grad.clone(), feature="by_hand").wait()
        return total / num_ranks if divide and dist.get_rank() != rank_only else total

    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: sync(name, grad))
    return model


torch_library = library(DistributedDataParallel)


@pytest.mark.threads
@pytest.mark.parametrize(
    ("model", "arguments", "backend"),
    [
        (MLP, {}, "weft"),
        (TiedMLP, {}, "weft"),
        (BranchingMLP, {"find_unused_parameters": True}, "weft"),
        (SparseBag, {}, "gloo"),
        (TinyTransformer, {}, "weft"),
    ],
)
def test_torch_ddp_equals_a_single_process(
    model: type[KitModel], arguments: dict[str, Any], backend: str
) -> None:
    traces = compare(body_of(model, **arguments), None, torch_library, ranks=2, backend=backend)
    assert len(traces) == 2
    assert traces[0].losses != traces[1].losses


@pytest.mark.threads
def test_buffers_are_compared_with_the_references() -> None:
    compare(body_of(NormedMLP), torch_library, torch_library, single=None)
    with pytest.raises(AssertionError, match=r"step 1, buffer of 'norm\.running_mean', rank 1"):
        compare(body_of(NormedMLP), torch_library, library(by_hand), single=None)


@pytest.mark.threads
def test_another_library_that_is_right_passes() -> None:
    traces = compare(body_of(MLP), torch_library, library(by_hand), ranks=4)
    assert [trace.rank for trace in traces] == [0, 1, 2, 3]


@pytest.mark.threads
def test_one_that_never_syncs_is_found_although_it_equals_itself() -> None:
    never = library(lambda model: model)
    with pytest.raises(AssertionError, match="rank 0 and rank 1 differ at step 0, gradient"):
        compare(body_of(MLP), never, never)
    with pytest.raises(AssertionError, match="single process and candidate differ at step 0, gradient"):
        compare(body_of(MLP), never, never, ranks_agree=False)
    compare(body_of(MLP), never, never, ranks_agree=False, single=None)  # which is why there are the others


@pytest.mark.threads
def test_a_sum_in_place_of_a_mean_is_found_by_the_single_process() -> None:
    summing = library(lambda model: by_hand(model, divide=False))
    with pytest.raises(AssertionError, match="reference and candidate differ at step 0, gradient"):
        compare(body_of(MLP), torch_library, summing)
    with pytest.raises(AssertionError, match="single process and candidate differ at step 0, gradient"):
        compare(body_of(MLP), summing, summing)


@pytest.mark.threads
def test_one_parameter_that_is_left_out_is_named() -> None:
    forgetful = library(lambda model: by_hand(model, skip="layers.1.bias"))
    with pytest.raises(AssertionError, match=r"step 0, gradient of 'layers\.1\.bias', rank 1"):
        compare(body_of(MLP), torch_library, forgetful)


@pytest.mark.threads
def test_one_rank_that_is_off_is_named() -> None:
    off = library(lambda model: by_hand(model, rank_only=2))
    with pytest.raises(AssertionError, match="rank 0 and rank 2 differ at step 0, gradient"):
        compare(body_of(MLP), None, off, ranks=4)


@pytest.mark.threads
def test_ranks_that_start_apart_are_found() -> None:
    def body(library: Any) -> Trace:
        model = MLP(seed=dist.get_rank())
        return train(library.DistributedDataParallel(model), make_batches(model, 1))

    compare(body, None, torch_library)
    with pytest.raises(AssertionError, match="rank 0 and rank 1 differ at the start, initial parameter"):
        compare(body, None, library(by_hand))


@pytest.mark.threads
def test_a_failure_in_the_body_is_the_launchs_error() -> None:
    def body(library: Any) -> Trace:
        raise KeyError("body")

    with pytest.raises(LaunchError, match="KeyError: 'body'"):
        compare(body, bare, bare)


@pytest.mark.threads
def test_a_body_must_return_a_trace_with_steps() -> None:
    with pytest.raises(ConfigError, match="on rank 0 it returned None"):
        compare(lambda library: None, bare, bare)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="a Trace without steps"):
        compare(lambda library: train(MLP(), []), bare, bare)


def sharded_body(library: Any) -> Trace:
    model = TinyTransformer()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        library.fully_shard(block, mesh=mesh)
    library.fully_shard(model, mesh=mesh)
    batches = [batch.shard() for batch in make_batches(model, 3)]
    return train(model, batches, optimizer=lambda parameters: Adam(parameters, lr=0.01))


@pytest.mark.threads
def test_shards_are_compared_as_full_tensors() -> None:
    traces = compare(sharded_body, None, SimpleNamespace(fully_shard=fully_shard), ranks=2)
    assert traces[0].parameters["head.weight"].shape == (16, 8)


@run_on(threads=2, timeout=60)
def test_a_tracer_records_a_loop_of_ones_own() -> None:
    def run(num_parts: int) -> Trace:
        model = DistributedDataParallel(MLP())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tracer = Tracer(model)
        for batch in make_batches(MLP(), 2):
            optimizer.zero_grad()
            total = torch.zeros(())
            for part in range(num_parts):
                rows = batch.shard().shard(part, num_parts)
                loss = (model(rows.inputs) - rows.targets).square().mean() / num_parts
                loss.backward()
                total += loss.detach()
            tracer.note_backward(total)
            optimizer.step()
            tracer.note_update()
        return tracer.trace()

    assert_same(run(1), run(2))


@run_on(threads=2, timeout=60)
def test_train_tells_faults_of_its_steps() -> None:
    model = by_hand(MLP())
    expected = OSError if dist.get_rank() == 0 else PeerError
    with inject(Fault(0, "raise", step=1, feature="by_hand", error=OSError("injected"))) as faults:
        with pytest.raises(expected):
            train(model, make_batches(MLP(), 3), before_step=faults.next_step)
        assert faults.next_step() == 2
        dist.destroy_process_group()  # what a rank that failed does; the peer waits for it


def ddp_body(library: Any) -> Trace:
    return train(library.DistributedDataParallel(MLP()), [batch.shard() for batch in make_batches(MLP(), 2)])


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["weft", "gloo"])
def test_parity_over_processes(backend: str) -> None:
    never = SimpleNamespace(DistributedDataParallel=lambda model: model)
    torch_library = SimpleNamespace(DistributedDataParallel=DistributedDataParallel)
    compare(ddp_body, torch_library, torch_library, kind="process", backend=backend)
    with pytest.raises(AssertionError, match="rank 0 and rank 1 differ"):
        compare(ddp_body, torch_library, never, kind="process", backend=backend)

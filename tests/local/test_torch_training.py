"""torch's own DDP, FSDP2 and DTensor on the local group give what they give on gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.testing import EXACT, Trace, assert_ranks_agree, assert_same, train
from weft.testing.models import MLP, NormedMLP, SparseBag, TiedMLP, make_batches
from weft.testing.pool import shared_pool

pytestmark = pytest.mark.processes

STEPS = 3


def ddp(model: nn.Module) -> Trace:
    batches = [batch.shard() for batch in make_batches(model, STEPS)]
    return train(DistributedDataParallel(model, bucket_cap_mb=0.001), batches)


def ddp_mlp() -> Trace:
    return ddp(MLP())


def ddp_of_buffers() -> Trace:
    return ddp(NormedMLP())


def ddp_of_tied_weights() -> Trace:
    return ddp(TiedMLP())


def ddp_of_sparse_gradients() -> Trace:
    return ddp(SparseBag())


def fsdp() -> Trace:
    model = MLP()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, [batch.shard() for batch in make_batches(MLP(), STEPS)])


def dtensors() -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    left = torch.randint(-3, 4, (6, 8), generator=generator).float()
    right = torch.randint(-3, 4, (8, 4), generator=generator).float()
    columns: Any = distribute_tensor(left, mesh, [Shard(1)]).requires_grad_()
    rows: Any = distribute_tensor(right, mesh, [Shard(0)]).requires_grad_()
    product: Any = columns @ rows  # a partial sum
    whole = product.full_tensor()
    torch.testing.assert_close(whole.detach(), left @ right, rtol=0, atol=0)
    product.redistribute(placements=[Shard(0)]).sum().redistribute(placements=[Replicate()]).backward()
    moved = distribute_tensor(left, mesh, [Shard(0)]).redistribute(placements=[Shard(1)])
    torch.testing.assert_close(moved.full_tensor(), left, rtol=0, atol=0)
    return [whole.detach(), columns.grad.full_tensor(), rows.grad.full_tensor(), moved.to_local()]


TRAINED = [ddp_mlp, ddp_of_buffers, ddp_of_tied_weights, ddp_of_sparse_gradients, fsdp]


@pytest.mark.parametrize("body", TRAINED)
def test_as_on_gloo(body: Callable[[], Trace]) -> None:
    """Two terms have one sum, whatever the order: every bit is the same."""
    on_gloo = shared_pool(2).run(body, backend="gloo", timeout=60)
    on_weft = shared_pool(2).run(body, backend="weft", timeout=60)
    assert len(on_weft[0].steps) == STEPS
    assert_ranks_agree(on_weft)
    for reference, candidate in zip(on_gloo, on_weft, strict=True):
        assert_same(reference, candidate, tolerance=EXACT)


@pytest.mark.threads
@pytest.mark.parametrize("body", [ddp_mlp, fsdp])
def test_thread_ranks_as_process_ranks(body: Callable[[], Trace]) -> None:
    as_processes = shared_pool(2).run(body, backend="weft", timeout=60)
    as_threads = weft.launch(body, ranks=2, kind="thread", backend="weft", timeout=60)
    for reference, candidate in zip(as_processes, as_threads, strict=True):
        assert_same(reference, candidate)


def test_dtensor_as_on_gloo() -> None:
    on_gloo = shared_pool(2).run(dtensors, backend="gloo", timeout=60)
    on_weft = shared_pool(2).run(dtensors, backend="weft", timeout=60)
    for reference, candidate in zip(on_gloo, on_weft, strict=True):
        for want, got in zip(reference, candidate, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def autograd_and_collectives() -> list[str]:
    """What torch says of collectives on tensors that autograd knows, on any backend."""
    said = []

    def note(call: Callable[[], object]) -> None:
        try:
            said.append(str(call()))
        except RuntimeError as error:
            said.append(f"RuntimeError: {str(error)[:60]}")

    weight = torch.full((3,), 2.0, requires_grad=True)
    saved = torch.ones(3)
    loss = (weight * saved).sum()
    before = saved._version
    dist.all_reduce(saved)  # in place, on what the backward needs
    said.append(f"version {before} -> {saved._version}")
    note(lambda: (loss.backward(), weight.grad.tolist()))

    for call in (
        lambda t: dist.all_reduce(t),
        lambda t: dist.broadcast(t, 0),
        lambda t: dist.all_gather([torch.zeros(3) for _ in range(2)], t),
    ):
        leaf = torch.ones(3, requires_grad=True)
        note(lambda call=call, leaf=leaf: (call(leaf), leaf.tolist(), leaf._version, leaf.requires_grad)[1:])
        result = torch.ones(3, requires_grad=True) * 2
        note(lambda call=call, t=result: (call(t), t.tolist(), t._version, t.requires_grad)[1:])
        with torch.no_grad():
            parameter = nn.Parameter(torch.ones(3))
            note(lambda call=call, p=parameter: (call(p), p.tolist(), p._version, p.requires_grad)[1:])
    with torch.inference_mode():
        tensor = torch.ones(3)
        note(lambda: (dist.all_reduce(tensor), tensor.tolist())[1])
        dist.broadcast(tensor, 0)
        outs = [torch.zeros(3) for _ in range(2)]
        dist.all_gather(outs, tensor)
        said.append(str([out.tolist() for out in outs]))
    note(lambda: (dist.all_reduce(tensor), tensor.tolist())[1])  # an inference tensor, outside of the mode
    return said


@pytest.mark.threads
def test_autograd_as_on_gloo() -> None:
    on_gloo = shared_pool(2).run(autograd_and_collectives, backend="gloo", timeout=60)
    on_weft = shared_pool(2).run(autograd_and_collectives, backend="weft", timeout=60)
    assert on_weft == on_gloo
    on_threads = weft.launch(autograd_and_collectives, ranks=2, kind="thread", backend="weft", timeout=60)
    assert on_threads == on_gloo

"""Distributed autograd with tensors on a GPU: gradients go back the way the tensors came."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from tests.ranks import run_on
from tests.rpc.workers import WEFT, Worker, from_worker0, joined, with_options
from weft import RemoteModule, dist_autograd, rpc

LIMITS: dict[str, Any] = {"timeout": 90, "collective_timeout": 60}
WITH_MAPS = with_options(device_maps={f"worker{rank}": {0: 0} for rank in range(3)})

pytestmark = run_on(gpu=3, gpu_threads=3, **LIMITS)

_weights: dict[str, nn.Parameter] = {}


def make_weight(seed: int, device: str) -> Tensor:
    weight = torch.rand(4, 4, generator=torch.Generator().manual_seed(seed))
    return weight.to(device)


def multiply(rows: Tensor, device: str) -> Tensor:
    name = f"{rpc.get_worker_info().name}/{device}"
    if name not in _weights:
        _weights[name] = nn.Parameter(make_weight(5, device))
    return rows.to(device) @ _weights[name]


def multiply_there_and_back(rows: Tensor, device: str) -> Tensor:
    """Called on worker1: what worker0 makes of the rows, times the rows."""
    return rpc.rpc_sync("worker0", multiply, (rows * 3, device)) * rows


def gradient_of_weight(context_id: int, device: str) -> Tensor:
    weight = _weights[f"{rpc.get_worker_info().name}/{device}"]
    assert weight.grad is None
    return dist_autograd.get_gradients(context_id)[weight].cpu()


def assert_close(found: Tensor, expected: Tensor | None) -> None:
    assert expected is not None
    torch.testing.assert_close(found.cpu(), expected.cpu())


@WITH_MAPS
@from_worker0
def test_one_call() -> None:
    rows = make_weight(1, "cuda").requires_grad_()
    for exact in (False, True):
        with dist_autograd.context() as context_id:
            out = rpc.rpc_sync("worker1", multiply, (rows * 2, "cuda"))
            assert out.device == rows.device
            dist_autograd.backward(context_id, [(out * rows).sum()], exact=exact)
            found = dist_autograd.get_gradients(context_id)[rows]
            found_there = rpc.rpc_sync("worker1", gradient_of_weight, (context_id, "cuda"))
        local, weight = make_weight(1, "cpu").requires_grad_(), make_weight(5, "cpu").requires_grad_()
        (((local * 2) @ weight) * local).sum().backward()
        assert found.device == rows.device
        assert rows.grad is None
        assert_close(found, local.grad)
        assert_close(found_there, weight.grad)


@WITH_MAPS
@from_worker0
def test_there_and_back() -> None:
    rows = make_weight(2, "cuda").requires_grad_()
    for exact in (False, True):
        with dist_autograd.context() as context_id:
            out = rpc.rpc_sync("worker1", multiply_there_and_back, (rows, "cuda"))
            dist_autograd.backward(context_id, [out.sum()], exact=exact)
            found = dist_autograd.get_gradients(context_id)[rows]
            found_weight = gradient_of_weight(context_id, "cuda")
        local, weight = make_weight(2, "cpu").requires_grad_(), make_weight(5, "cpu").requires_grad_()
        (((local * 3) @ weight) * local).sum().backward()
        assert_close(found, local.grad)
        assert_close(found_weight, weight.grad)


@run_on(gpu=3, **LIMITS)
@from_worker0
def test_over_the_host() -> None:
    """A module on a GPU whose inputs and outputs travel as the CPU's."""
    remote, local = RemoteModule("worker1/cuda:0", nn.Linear, (4, 3)), nn.Linear(4, 3)
    local.load_state_dict({key: value.cpu() for key, value in remote.state_dict().items()})
    rows, own_rows = make_weight(3, "cpu").requires_grad_(), make_weight(3, "cpu").requires_grad_()
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [remote(rows).square().sum()])
        found = dist_autograd.get_gradients(context_id)[rows]
    local(own_rows).square().sum().backward()
    torch.testing.assert_close(found, own_rows.grad, rtol=1e-4, atol=1e-4)


@WITH_MAPS
@from_worker0
def test_hooks() -> None:
    seen: list[Any] = []
    param = nn.Parameter(make_weight(4, "cuda"))
    param.register_hook(lambda grad: grad * 2)
    param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
    with dist_autograd.context() as context_id:
        out = rpc.rpc_sync("worker1", multiply, (param, "cuda"))
        dist_autograd.backward(context_id, [out.sum() + param.sum()])
        found = dist_autograd.get_gradients(context_id)[param]
    assert len(seen) == 1
    assert param.grad is None
    weight = make_weight(5, "cpu")
    assert_close(found, 2 * (torch.ones(4, 4) @ weight.T + 1))


@run_on(gpu=3, **LIMITS)
@WITH_MAPS
def test_data_parallel_under_it(worker: Worker) -> None:
    torch.cuda.set_device(0)
    for wrap in (lambda module: weft.DistributedDataParallel(module, device_ids=[0]), weft.fully_shard):
        torch.manual_seed(7)
        module = nn.Linear(4, 4, device="cuda")
        torch.manual_seed(7)
        same = nn.Linear(4, 4, device="cuda")
        wrapped, expected = wrap(module), wrap(same)
        rows = make_weight(worker.rank, "cuda")
        with dist_autograd.context() as context_id:
            remote = rpc.rpc_sync(worker.next, multiply, (rows, "cuda"))
            dist_autograd.backward(context_id, [wrapped(remote).square().sum()])
            grads = dist_autograd.get_gradients(context_id)
        inputs = (rows @ make_weight(5, "cuda")).detach()
        expected(inputs).square().sum().backward()
        for param, other in zip(wrapped.parameters(), expected.parameters(), strict=True):
            assert param.grad is None
            grad, wanted = grads[param], other.grad
            assert wanted is not None
            grad, wanted = (getattr(tensor, "_local_tensor", tensor) for tensor in (grad, wanted))
            torch.testing.assert_close(grad, wanted)


@run_on(nccl=(2, 4))
def test_beside_nccl() -> None:
    """With device maps, and data parallel on nccl under it."""
    maps = {f"worker{rank}": {0: 0} for rank in range(dist.get_world_size())}
    with joined(WEFT, device_maps=maps) as worker:
        test_data_parallel_under_it(worker)
        dist.barrier()

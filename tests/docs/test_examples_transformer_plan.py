"""The transformer plan trains as a single process does, and communicates as little as it says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import weft
from examples import transformer_plan as example
from tests.ranks import run_on
from weft import tensor_parallel as tp

NUM_STEPS = 4
# float64: what is left is rounding, and a forgotten term is a million times that.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def full(tensor: torch.Tensor) -> torch.Tensor:
    whole: Any = tensor.detach()
    return whole.full_tensor() if isinstance(tensor, DTensor) else whole


@pytest.mark.parametrize("data_parallel", ["replicate", "fully_shard"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@run_on(threads=4, timeout=60)
def test_four_ranks_train_as_one_process(sequence_parallel: bool, data_parallel: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batches = example.make_batches(NUM_STEPS)
    alone = example.Transformer().double()
    wanted = torch.tensor(example.train(alone, batches), dtype=torch.float64)

    model = example.Transformer().double()
    example.parallelize(model, mesh["tp"], sequence_parallel=sequence_parallel)
    example.share_data(model, mesh["dp"], by=data_parallel)
    rows = [batch.chunk(2)[mesh.get_local_rank("dp")] for batch in batches]
    losses = torch.tensor(example.train(model, rows), dtype=torch.float64)
    weft.comm.all_reduce(losses, dist.ReduceOp.AVG).wait()

    torch.testing.assert_close(losses, wanted, **CLOSE)
    assert wanted[-1] < wanted[0] - 0.1
    right = dict(alone.named_parameters())
    seen = {name: full(param) for name, param in model.named_parameters()}
    assert list(seen) == list(right)
    for name in right:
        torch.testing.assert_close(
            seen[name], right[name].detach(), **CLOSE, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("sequence_parallel", [False, True])
@run_on(threads=2, timeout=60)
def test_a_block_communicates_no_more_than_its_plan_says(sequence_parallel: bool) -> None:
    mesh = init_device_mesh("cpu", (2,))
    block = example.Block()
    tp.parallelize_module(block, mesh, example.block_plan(sequence_parallel=sequence_parallel))
    x = torch.randn(2, 4 if sequence_parallel else 8, example.WIDTH, requires_grad=True)
    with weft.record() as forward:
        out = block(x)
    with weft.record() as backward:
        out.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == out.shape == x.shape
    for events in (forward, backward):
        # Parts that come as plain tensors tell each other their sizes.
        ops = Counter(event.op for event in events if event.feature == "tp" and event.op != "exchange_rows")
        if sequence_parallel:  # in halves: gathered before attention and MLP, summed and cut after them
            assert ops == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
        else:
            assert ops == {"all_reduce": 2}


def test_the_same_model_everywhere() -> None:
    torch.manual_seed(1)
    first = example.Transformer().state_dict()
    torch.manual_seed(2)
    second = example.Transformer().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)

"""Buckets in the graph of a traced backward, asked for by torch's own switches, compiled by Inductor."""

from __future__ import annotations

from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters

import weft
from tests.compile_bodies.pairs import fresh

DIM = 2000


def compile_by_inductor(graph: Any) -> Any:
    def inner_compiler(inner: Any, inputs: Any) -> Any:
        return torch._inductor.compile(inner, inputs)

    return torch.compile(graph, fullgraph=True, backend=inner_compiler)


def count_buckets(fusing_pass: str) -> list[int]:
    """The buckets of each of two steps; ranks must agree about every gradient."""
    fresh()
    torch.manual_seed(0)
    options: Any = {
        "_fuse_ddp_communication_passes": [fusing_pass, "schedule_comm_wait"],
        "reorder_for_locality": False,
    }
    numbers: list[int] = []
    with torch._inductor.config.patch(options), torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        replica = weft.replicate(nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4))))
        compiled = torch.compile(replica, fullgraph=False)
        for step in range(2):
            replica.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            loss = compiled(torch.randn(1, DIM, generator=generator)).sum()
            with compiled_autograd._enable(compile_by_inductor):
                loss.backward()
            numbers.append(counters["inductor"]["ddp_buckets"])
            for name, param in replica.named_parameters():
                assert param.grad is not None
                first = param.grad.clone()
                dist.broadcast(first, 0)
                assert torch.equal(first, param.grad), f"ranks differ in {name}, step {step}"
    return numbers

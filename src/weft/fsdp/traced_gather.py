"""Whole parameters as a step of a compiled graph, and their gradients' way back.

Forward gathers, backward reduces and scatters: `_c10d_functional` ops, which compilers know and move. The
sharded parameters are inputs of the graph: autograd itself gives them their gradients and runs their hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm.traced import gather_flat, scatter_flat
from weft.compiler import made_again_in_backward, opened_piece
from weft.fsdp.cargo import Cargo


def gather_in_graph(cargo: str, frees: bool, sharded: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The whole parameters. `frees`: backward gathers them again, so that they are not kept until then.

    A step of the graph: compilers look into it only when autograd has been through.
    """
    pieces = [opened_piece(param) for param in sharded]
    gathered: Any = _Gathered.apply(cargo, frees, *pieces)  # type: ignore[no-untyped-call]
    return gathered


class _Gathered(torch.autograd.Function):
    """`apply(cargo, frees, *pieces)`: the whole parameters of this rank's pieces."""

    @staticmethod
    def forward(ctx: Any, text: str, frees: bool, *pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.text = text
        ctx.set_materialize_grads(False)
        cargo = Cargo.decode(text)
        with made_again_in_backward(frees):
            table = gather_flat(cargo.pack_shard(pieces), cargo.num_ranks, cargo.group)
            return tuple(cargo.unpack_table(table))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        cargo = Cargo.decode(ctx.text).only(needed)
        given = [grad for grad, is_needed in zip(grads, needed, strict=True) if is_needed]
        like = next((grad for grad in given if grad is not None), None)
        if like is None:
            return (None,) * len(ctx.needs_input_grad)
        shard = scatter_flat(cargo.pack_table(given, like), cargo.op, cargo.num_ranks, cargo.group)
        means = iter(cargo.unpack_shard(shard))
        # Nobody has used what has no gradient here: ranks run the same graph.
        results = [next(means) if is_needed else None for is_needed in needed]
        used = [mean if grad is not None else None for mean, grad in zip(results, grads, strict=True)]
        return (None, None, *used)

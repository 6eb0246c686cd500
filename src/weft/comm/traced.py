"""The door under torch.compile: collectives become functional ops of the graph.

Only what functional collectives can say is here. The rest of the door's calls
(messages, objects, gathers to one rank) break the graph and run eagerly.

This is the one place that uses `torch.distributed._functional_collectives`. `ProcessGroup._get_backend`, a
private name of torch too, is used here and in rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional


class TracedHandle:
    """A handle in a graph: `wait` puts the result into the tensor that the caller gave."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish = finish

    def wait(self, timeout: float | None = None) -> Any:
        """The result, waited for at this place of the graph."""
        return self._finish()

    def then(self, step: Callable[[Any], Any]) -> TracedHandle:
        """A handle of step(result)."""
        return TracedHandle(lambda: step(self._finish()))

    def is_done(self) -> bool:
        """Nothing is under way while a graph is traced."""
        return True


def all_reduce(tensor: torch.Tensor, op: str, group: dist.ProcessGroup) -> TracedHandle:
    """all_reduce in the graph."""
    reduced = functional.all_reduce(tensor, op, group)
    return TracedHandle(lambda: tensor.copy_(functional.wait_tensor(reduced)))


def all_reduce_coalesced(tensors: Sequence[torch.Tensor], op: str, group: dist.ProcessGroup) -> TracedHandle:
    """all_reduce of several tensors as one op of the graph."""
    reduced = functional.all_reduce_coalesced(list(tensors), op, group)
    return TracedHandle(lambda: _fill(tensors, reduced))


def broadcast(tensor: torch.Tensor, root: int, group: dist.ProcessGroup) -> TracedHandle:
    """Broadcast in the graph; `root` is a rank of the group."""
    sent = functional.broadcast(tensor, root, group)
    return TracedHandle(lambda: tensor.copy_(functional.wait_tensor(sent)))


def all_gather_into_tensor(out: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup) -> TracedHandle:
    """all_gather_into_tensor in the graph."""
    gathered = functional.all_gather_tensor(tensor, 0, group)
    return TracedHandle(lambda: out.copy_(functional.wait_tensor(gathered).view(out.shape)))


def reduce_scatter_tensor(
    out: torch.Tensor, tensor: torch.Tensor, op: str, group: dist.ProcessGroup
) -> TracedHandle:
    """reduce_scatter_tensor in the graph."""
    part = functional.reduce_scatter_tensor(tensor, op, 0, group)
    return TracedHandle(lambda: out.copy_(functional.wait_tensor(part).view(out.shape)))


def all_gather_into_tensor_coalesced(
    outs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> TracedHandle:
    """Several all_gather_into_tensor as one op of the graph."""
    gathered = functional.all_gather_into_tensor_coalesced(list(tensors), group)
    return TracedHandle(lambda: _fill(outs, gathered))


def reduce_scatter_tensor_coalesced(
    outs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], op: str, group: dist.ProcessGroup
) -> TracedHandle:
    """Several reduce_scatter_tensor as one op of the graph."""
    parts = functional.reduce_scatter_tensor_coalesced(list(tensors), op, [0] * len(tensors), group)
    return TracedHandle(lambda: _fill(outs, parts))


def _fill(outs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [
        out.copy_(functional.wait_tensor(result).view(out.shape))
        for out, result in zip(outs, results, strict=True)
    ]


def all_to_all_single(
    out: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    group: dist.ProcessGroup,
) -> TracedHandle:
    """all_to_all_single in the graph."""
    received = functional.all_to_all_single(
        tensor,
        None if output_splits is None else list(output_splits),
        None if input_splits is None else list(input_splits),
        group,
    )
    return TracedHandle(lambda: out.copy_(functional.wait_tensor(received).view(out.shape)))


def reduced(tensor: torch.Tensor, op: str, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensor reduced over all ranks, as a new one."""
    return functional.wait_tensor(functional.all_reduce(tensor, op, group))


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's tensor along dim 0, as a new one."""
    # torch 2.13 renamed both; the old names warn there.
    gather: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    return functional.wait_tensor(gather(tensor, 0, group))


def scattered(tensor: torch.Tensor, op: str, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of the reduced tensor, as a new one."""
    scatter: Any = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
    return functional.wait_tensor(scatter(tensor, op, 0, group))


def exchanged(
    tensor: torch.Tensor, output_splits: list[int], input_splits: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """What every rank gives this one, as a new tensor."""
    return functional.wait_tensor(functional.all_to_all_single(tensor, output_splits, input_splits, group))


def can_gather(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether graphs can gather tensors of this device: gloo's op for it kills the process on a GPU."""
    if device.type == "cpu" or not dist.is_gloo_available():
        return True
    backend = group._get_backend(device)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL there is one around it.
    return not isinstance(getattr(backend, "wrapped_pg", backend), dist.ProcessGroupGloo)


def gather_flat(flat: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
    """Every rank's tensor, one behind the other, as a new one; the group by its name."""
    ops: Any = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(flat, num_ranks, group))


def scatter_flat(table: torch.Tensor, op: str, num_ranks: int, group: str) -> torch.Tensor:
    """This rank's part of the reduced tensor, as a new one; the group by its name."""
    ops: Any = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(table, op, num_ranks, group))

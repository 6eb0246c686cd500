"""Hand a gradient over to its parameter.

autograd adds a DTensor's gradient through DTensor's dispatcher, which takes longer than a small layer's
matrix products. Where nobody could tell the difference the local gradient is put into `.grad`, or added
to the local one there, and autograd gets nothing to add.

A hook in front of the node that adds (`node.register_prehook`) can't be seen: it gets None.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from weft.autograd import will_run
from weft.tensors import make_dtensor


def hand_over(local: torch.Tensor, spec: DTensorSpec, node: Any, *, is_ours: bool) -> DTensor | None:
    """Add to a parameter's gradient, in a backward that isn't differentiated itself; or return it as a
    DTensor, for autograd to add.

    `node` is where autograd would add it: where the parameter came into the graph. With `is_ours` the memory
    of `local` may become the gradient's. What autograd gave may be another's as well: sums hand one tensor to
    all their addends, and hooks may have kept it.
    """
    # What a graph has saved of a parameter may be a copy (checkpointing); the node knows the parameter.
    param = getattr(node, "variable", None)
    # On a GPU the node may be on another stream than this one, and autograd orders them.
    if param is not None and local.is_cpu and _is_free(param, node):
        grad = param.grad
        if grad is None:
            param.grad = make_dtensor(_own(local, is_ours=is_ours), spec)
            return None
        if isinstance(grad, DTensor) and grad.placements == spec.placements and not grad.requires_grad:
            grad._local_tensor.add_(local)
            return None
    return make_dtensor(_own(local, is_ours=is_ours), spec)


def _own(local: torch.Tensor, *, is_ours: bool) -> torch.Tensor:
    return local if is_ours else local.clone(memory_format=torch.contiguous_format)


def _is_free(param: Any, node: Any) -> bool:
    """Whether autograd would add to the parameter now, and no hook would hear of it."""
    return (
        param.requires_grad
        and not param._backward_hooks
        and not param._post_accumulate_grad_hooks
        and not torch.compiler.is_compiling()
        and will_run(node)
    )

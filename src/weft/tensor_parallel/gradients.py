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
from weft.tensors import is_sole_owner, make_dtensor


def is_own(grad: torch.Tensor) -> bool:
    """Whether nobody else has a gradient that autograd gave, so that it may become a parameter's.

    Sums hand one tensor to all their addends, or an expanded one.
    """
    return grad.is_contiguous() and is_sole_owner(grad)


def hand_over(local: torch.Tensor, spec: DTensorSpec, node: Any) -> DTensor | None:
    """Add to a parameter's gradient; or return it as a DTensor, for autograd to do so.

    `local` becomes the gradient's memory. `node` is where autograd would add it: where the parameter came
    into the graph.
    """
    # What a graph has saved of a parameter may be a copy (checkpointing); the node knows the parameter.
    param = getattr(node, "variable", None)
    if param is None or not _is_free(param, node):
        return make_dtensor(local, spec)
    grad = param.grad
    if grad is None:
        param.grad = make_dtensor(local, spec)
        return None
    if not isinstance(grad, DTensor) or grad.placements != spec.placements or grad.requires_grad:
        return make_dtensor(local, spec)
    grad._local_tensor.add_(local)
    return None


def _is_free(param: Any, node: Any) -> bool:
    """Whether autograd would add to the parameter now, and no hook would hear of it."""
    return (
        param.requires_grad
        and not param._backward_hooks
        and not param._post_accumulate_grad_hooks
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and will_run(node)
    )

"""One sharded parameter: the DTensor that users and optimizers see, and the whole one that modules compute
with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft.errors import StateError
from weft.fsdp.choose import Site
from weft.fsdp.mesh import DataMesh
from weft.fsdp.placement import Placement, local_gradient
from weft.fsdp.policy import MixedPrecisionPolicy
from weft.fsdp.split import Split
from weft.tensors import make_dtensor, make_traceable, with_dtype


class ShardedParam:
    """A parameter of a sharded module."""

    def __init__(
        self, name: str, sites: Sequence[Site], placement: Placement, data: DataMesh, sharded: nn.Parameter
    ) -> None:
        self.name = name  # from the module that was sharded; from the root once that is known
        self.sites = list(sites)
        self.slots = [_slot(site) for site in sites]  # where modules keep it: a dictionary and a name
        self.placement = placement
        self.split = Split(tuple(placement.local.shape), placement.dim, data.shard_size)
        self.local_shape = self.split.piece_shape(data.shard_rank)
        self.sharded = sharded
        self.whole: nn.Parameter | None = None
        self.accumulated: torch.Tensor | None = (
            None  # gradients of backwards that did not reduce, in the reduce dtype
        )
        self.origin: object = self  # which parameter it was, for those that are shared
        self.bit = 0  # this parameter's, among those of its mesh
        self.grad_wrapper: DTensor | None = None

    @property
    def local(self) -> torch.Tensor:
        """This rank's piece."""
        return self.sharded._local_tensor  # type: ignore[attr-defined]

    @local.setter
    def local(self, tensor: torch.Tensor) -> None:
        self.sharded._local_tensor = tensor  # type: ignore[attr-defined]

    @property
    def dtype(self) -> torch.dtype:
        """As it is stored and optimized."""
        return self.sharded.dtype

    def compute_dtype(self, policy: MixedPrecisionPolicy) -> torch.dtype:
        """In which modules compute with it."""
        is_cast = policy.param_dtype is not None and self.dtype.is_floating_point
        return cast("torch.dtype", policy.param_dtype) if is_cast else self.dtype

    def reduce_dtype(self, policy: MixedPrecisionPolicy) -> torch.dtype:
        """In which its gradients are reduced."""
        is_cast = policy.reduce_dtype is not None and self.dtype.is_floating_point
        return cast("torch.dtype", policy.reduce_dtype) if is_cast else self.compute_dtype(policy)

    @property
    def is_extended(self) -> bool:
        """Whether its tensor says itself what is gathered."""
        return hasattr(self.local, "fsdp_pre_all_gather") or hasattr(self.local, "fsdp_post_all_gather")

    @property
    def may_move(self) -> bool:
        """Whether a module may give the whole parameter other memory: torch's RNNs do, for cuDNN."""
        return self.placement.whole_spec is None and any(type(slot) is _Setter for slot, _ in self.slots)

    # Which of the two the modules have

    def register(self, param: nn.Parameter) -> None:
        """Let every module that has this parameter have `param` for it."""
        for slot, name in self.slots:
            slot[name] = param

    def show_sharded(self) -> None:
        """Let modules have the sharded parameter."""
        self.register(self.sharded)

    def take_replaced(self) -> bool:
        """Take over a parameter that somebody has put in place of the sharded one:
        load_state_dict(assign=True).
        """
        site = self.sites[0]
        registered = site.module._parameters.get(site.name)
        if registered is self.sharded or registered is self.whole:
            return False
        if not isinstance(registered, DTensor) or tuple(registered._local_tensor.shape) != self.local_shape:
            raise StateError(
                f"fully_shard: parameter {self.name} was replaced by {_describe(registered)}; a DTensor with "
                f"a local shape of {self.local_shape} is needed. Load values into it (load_state_dict, "
                "copy_), or replace it before fully_shard."
            )
        self.sharded = registered
        self.grad_wrapper = None
        self.show_sharded()
        return True

    def set_whole(self, tensor: torch.Tensor) -> None:
        """Make the whole parameter, of memory that will hold it."""
        spec = self.placement.whole_spec
        needs_gradient = self.sharded.requires_grad
        if spec is None:
            self.whole = nn.Parameter(tensor, requires_grad=needs_gradient)
        else:
            self.whole = make_traceable(tensor, with_dtype(spec, tensor.dtype), requires_grad=needs_gradient)
        self.whole._weft_is_whole = True  # type: ignore[attr-defined]

    def point_whole(self, tensor: torch.Tensor) -> None:
        """Let the whole parameter be this tensor. The parameter itself stays: autograd knows it."""
        if self.whole is None:
            self.set_whole(tensor)
        elif isinstance(self.whole, DTensor):
            self.whole._local_tensor = tensor
        else:
            self.whole.data = tensor

    # Gradients

    def take_gradient(self) -> torch.Tensor | None:
        """This rank's gradient of the whole parameter, as a plain dense tensor; it is no longer here then."""
        total, self.accumulated = self.accumulated, None
        if self.whole is None or self.whole.grad is None:
            return total
        grad = _plain(self.whole.grad, self.placement)
        self.whole.grad = None
        return grad if total is None else total.add_(grad)

    def accumulate(self, dtype: torch.dtype) -> None:
        """Keep the gradient of a backward that doesn't reduce, in the reduce dtype."""
        if self.whole is None or self.whole.grad is None:
            return
        if self.accumulated is None and self.whole.grad.dtype == dtype:
            return  # autograd adds the next one to it
        total = self.take_gradient()
        self.accumulated = None if total is None else total.to(dtype)

    def exchange_unsynced(self, kept: tuple[Any, Any]) -> tuple[Any, Any]:
        """Keep other gradients that wait to be reduced; those so far."""
        before = (self.accumulated, None if self.whole is None else self.whole.grad)
        self.accumulated, grad = kept
        if self.whole is not None:
            self.whole.grad = grad
        return before

    def drop_gradients(self) -> None:
        """Forget what waits to be reduced."""
        self.accumulated = None
        if self.whole is not None:
            self.whole.grad = None

    def wrap_gradient(self, local: torch.Tensor) -> DTensor:
        """The sharded gradient as users see it."""
        spec = cast("DTensor", self.sharded)._spec
        return make_dtensor(local.view(self.local_shape), with_dtype(spec, local.dtype))


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether it is what modules compute with in place of a sharded parameter."""
    return hasattr(tensor, "_weft_is_whole")


def arranged_by_rank(grad: torch.Tensor, split: Split) -> torch.Tensor:
    """The same elements with each rank's piece in one run, padded, where they don't lie so."""
    out = grad.new_zeros(split.num_ranks * split.piece_numel)
    for rank in range(split.num_ranks):
        start, length = split.span(rank)
        if length:
            piece = grad.narrow(split.dim, start, length)
            out[rank * split.piece_numel :][: piece.numel()].view(piece.shape).copy_(piece)
    return out


def restored_from_ranks(by_rank: torch.Tensor, split: Split, out: torch.Tensor) -> None:
    """The way back: pieces by rank into the tensor."""
    for rank in range(split.num_ranks):
        start, length = split.span(rank)
        if length:
            shape = split.piece_shape(rank)
            begin = rank * split.piece_numel
            numel = out.narrow(split.dim, start, length).numel()
            out.narrow(split.dim, start, length).copy_(by_rank[begin : begin + numel].view(shape))


def _plain(grad: torch.Tensor, placement: Placement) -> torch.Tensor:
    if type(grad) is not torch.Tensor:
        grad = local_gradient(grad, placement)
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    return grad if grad.is_contiguous() else grad.contiguous()


class _Setter:
    """A module that watches its attributes, as if it were the dictionary of its parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __setitem__(self, name: str, param: nn.Parameter) -> None:
        setattr(self._module, name, param)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        return self._module._parameters[name]


def _slot(site: Site) -> tuple[Any, str]:
    # nn.Module's checks cost more than all else in a step of many small parameters.
    is_plain = type(site.module).__setattr__ is nn.Module.__setattr__
    return (site.module._parameters if is_plain else _Setter(site.module)), site.name


def _describe(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__} of shape {tuple(value.shape)}"

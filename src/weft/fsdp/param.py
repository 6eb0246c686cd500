"""One sharded parameter: the DTensor that users and optimizers see, and the unsharded one of modules.

Invariant: modules have either of the two in all places where the parameter is registered; both objects stay
the same from step to step, since optimizers and autograd know them. When to change is param_group.py's work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from weft.errors import StateError
from weft.fsdp.mesh import DataParallelMesh
from weft.fsdp.placement import Placement, ShardLayout, local_gradient, resolve_placement
from weft.fsdp.policy import MixedPrecisionPolicy
from weft.tensors import make_dtensor, make_parameter, make_traceable, with_dtype


@dataclass(frozen=True, eq=False)
class Site:
    """A place where a parameter is registered: `module._parameters[name]`."""

    module: nn.Module
    name: str


class ShardedParam:
    """A parameter of a sharded module."""

    def __init__(
        self,
        fqn: str,
        sites: Sequence[Site],
        placement: Placement,
        dp_mesh: DataParallelMesh,
        sharded: nn.Parameter,
    ) -> None:
        self.fqn = fqn  # from the module that was sharded; from the root once that is known
        self.sites = list(sites)
        self.slots = [_slot_of(site) for site in sites]  # of each site: a dictionary and a name
        self.placement = placement
        self.layout = ShardLayout(tuple(placement.local.shape), placement.dim, dp_mesh.shard_size)
        self.local_shape = self.layout.shard_shape(dp_mesh.shard_rank)
        self.sharded = sharded
        self.unsharded: nn.Parameter | None = None
        # Sum of the unsharded gradients of backwards that did not reduce, in the reduce dtype.
        self.accumulated_grad: torch.Tensor | None = None
        self.last_grad: DTensor | None = None  # of a single rank: reused where nobody holds it
        self.origin: object = self  # the parameter it was, equal for tied ones
        self.bit = 0  # its index among the parameters of its mesh

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard."""
        return self.sharded._local_tensor  # type: ignore[attr-defined]

    @local.setter
    def local(self, tensor: torch.Tensor) -> None:
        self.sharded._local_tensor = tensor  # type: ignore[attr-defined]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its shards, in which the optimizer steps."""
        return self.sharded.dtype

    def compute_dtype(self, policy: MixedPrecisionPolicy) -> torch.dtype:
        """The dtype of the unsharded parameter."""
        is_cast = policy.param_dtype is not None and self.dtype.is_floating_point
        return cast("torch.dtype", policy.param_dtype) if is_cast else self.dtype

    def reduce_dtype(self, policy: MixedPrecisionPolicy) -> torch.dtype:
        """The dtype in which its gradients are reduced."""
        is_cast = policy.reduce_dtype is not None and self.dtype.is_floating_point
        return cast("torch.dtype", policy.reduce_dtype) if is_cast else self.compute_dtype(policy)

    @property
    def has_extension(self) -> bool:
        """Whether its local tensor defines what is all-gathered."""
        return hasattr(self.local, "fsdp_pre_all_gather") or hasattr(self.local, "fsdp_post_all_gather")

    @property
    def may_be_moved(self) -> bool:
        """Whether a module may give the unsharded parameter other memory: torch's RNNs do, for cuDNN."""
        is_watched = any(type(slot) is _AttributeSlot for slot, _ in self.slots)
        return self.placement.unsharded_spec is None and is_watched

    @property
    def has_post_accumulate_hooks(self) -> bool:
        """Whether hooks run once its gradient is complete: an optimizer in backward, probably."""
        return bool(self.sharded._post_accumulate_grad_hooks)  # type: ignore[attr-defined]

    # Registration

    def register(self, param: nn.Parameter) -> None:
        """Register `param` in all places of this parameter."""
        for slot, name in self.slots:
            slot[name] = param

    def adopt_replacement(self) -> bool:
        """Take a parameter that the user has registered in place of the sharded one for that; whether there
        was one. load_state_dict(assign=True) does it.
        """
        site = self.sites[0]
        registered = site.module._parameters.get(site.name)
        if registered is self.sharded or registered is self.unsharded:
            return False
        if not isinstance(registered, DTensor) or tuple(registered._local_tensor.shape) != self.local_shape:
            raise StateError(
                f"fully_shard: parameter {self.fqn} was replaced by {_describe(registered)}; a DTensor with "
                f"a local shape of {self.local_shape} is needed. Load values into it (load_state_dict, "
                "copy_), or replace it before fully_shard."
            )
        self.sharded = registered
        self.last_grad = None
        self.register(registered)
        return True

    # The unsharded parameter

    def init_unsharded(self, tensor: torch.Tensor) -> None:
        """Make the unsharded parameter of a tensor whose memory an all-gather will fill."""
        spec = self.placement.unsharded_spec
        needs_grad = self.sharded.requires_grad
        if spec is None:
            self.unsharded = nn.Parameter(tensor, requires_grad=needs_grad)
        else:
            self.unsharded = make_traceable(tensor, with_dtype(spec, tensor.dtype), requires_grad=needs_grad)
        self.unsharded._weft_is_unsharded = True  # type: ignore[attr-defined]

    def point_unsharded_at(self, tensor: torch.Tensor) -> None:
        """Give the unsharded parameter other memory. It stays the same object: autograd knows it."""
        if self.unsharded is None:
            self.init_unsharded(tensor)
        elif isinstance(self.unsharded, DTensor):
            self.unsharded._local_tensor = tensor
        else:
            self.unsharded.data = tensor

    # Unsharded gradients

    def pop_unsharded_grad(self) -> torch.Tensor | None:
        """This rank's gradient of the unsharded parameter, as a plain dense tensor; it is removed here."""
        total, self.accumulated_grad = self.accumulated_grad, None
        if self.unsharded is None or self.unsharded.grad is None:
            return total
        grad = _dense_local(self.unsharded.grad, self.placement)
        self.unsharded.grad = None
        return grad if total is None else total.add_(grad)

    def accumulate_unsharded_grad(self, dtype: torch.dtype) -> None:
        """Keep the gradient of a backward that doesn't reduce, in the reduce dtype."""
        if self.unsharded is None or self.unsharded.grad is None:
            return
        if self.accumulated_grad is None and self.unsharded.grad.dtype == dtype:
            return  # autograd adds the next one to it
        total = self.pop_unsharded_grad()
        self.accumulated_grad = None if total is None else total.to(dtype)

    def exchange_unsynced(self, kept: tuple[Any, Any]) -> tuple[Any, Any]:
        """Put other unreduced gradients in place of those so far, which are returned."""
        before = (self.accumulated_grad, None if self.unsharded is None else self.unsharded.grad)
        self.accumulated_grad, grad = kept
        if self.unsharded is not None:
            self.unsharded.grad = grad
        return before

    def drop_unreduced_grads(self) -> None:
        """Drop what waits to be reduced."""
        self.accumulated_grad = None
        if self.unsharded is not None:
            self.unsharded.grad = None

    def make_sharded_grad(self, local: torch.Tensor) -> DTensor:
        """The sharded gradient as users see it."""
        spec = cast("DTensor", self.sharded)._spec
        return make_dtensor(local.view(self.local_shape), with_dtype(spec, local.dtype))


@torch.no_grad()
def shard_parameter(
    fqn: str,
    param: nn.Parameter,
    sites: Sequence[Site],
    dp_mesh: DataParallelMesh,
    placement_fn: Callable[[nn.Parameter], Shard | None] | None,
    device: torch.device,
    *,
    is_pinned: bool,
) -> ShardedParam:
    """Replace a user's parameter, wherever it is registered, by a DTensor of this rank's shard."""
    placement = resolve_placement(fqn, param, dp_mesh, None if placement_fn is None else placement_fn(param))
    local = _own_shard(placement, dp_mesh)
    if not local.is_meta:
        local = local.to(device)
        local = local.pin_memory() if is_pinned else local
    sharded = make_parameter(local, placement.sharded_spec, requires_grad=param.requires_grad)
    _move_hooks(param, sharded)
    shape = torch.empty(placement.local.shape, dtype=placement.local.dtype, device="meta")
    placement = dataclasses.replace(placement, local=shape)  # the user's memory may be freed
    made = ShardedParam(fqn, sites, placement, dp_mesh, sharded)
    made.origin = _origin_of(param)
    made.register(sharded)
    return made


def is_unsharded_param(tensor: torch.Tensor) -> bool:
    """Whether modules compute with this tensor in place of a sharded parameter."""
    return hasattr(tensor, "_weft_is_unsharded")


def copy_to_rank_major(grad: torch.Tensor, layout: ShardLayout) -> torch.Tensor:
    """A tensor's shards one after the other, padded: for tensors whose shards are not contiguous."""
    by_rank = grad.new_zeros(layout.num_ranks * layout.padded_shard_numel)
    for rank in range(layout.num_ranks):
        start, length = layout.span(rank)
        if length:
            shard = grad.narrow(layout.dim, start, length)
            by_rank[rank * layout.padded_shard_numel :][: shard.numel()].view(shard.shape).copy_(shard)
    return by_rank


def copy_from_rank_major(by_rank: torch.Tensor, layout: ShardLayout, out: torch.Tensor) -> None:
    """The inverse of copy_to_rank_major."""
    for rank in range(layout.num_ranks):
        start, length = layout.span(rank)
        if length:
            shard = out.narrow(layout.dim, start, length)
            begin = rank * layout.padded_shard_numel
            shard.copy_(by_rank[begin : begin + shard.numel()].view(shard.shape))


def _own_shard(placement: Placement, dp_mesh: DataParallelMesh) -> torch.Tensor:
    full = placement.local
    if dp_mesh.shard_size == 1:
        return full
    layout = ShardLayout(tuple(full.shape), placement.dim, dp_mesh.shard_size)
    start, length = layout.span(dp_mesh.shard_rank)
    if not hasattr(full, "fsdp_pre_all_gather"):
        return full.narrow(layout.dim, start, length).clone(memory_format=torch.contiguous_format)
    # A tensor class of the user's: only the operations that torch asks of it, and memory for a padded shard.
    chunks = torch.chunk(full, dp_mesh.shard_size, dim=layout.dim)
    padded = full.new_zeros(chunks[0].size())
    if length:
        padded.narrow(layout.dim, 0, length).copy_(chunks[dp_mesh.shard_rank])
    return padded.narrow(layout.dim, 0, length)


def _move_hooks(param: nn.Parameter, sharded: nn.Parameter) -> None:
    """Hooks that the user registered before stay in force: they get the sharded gradient."""
    before: Any = param
    for hook in (before._backward_hooks or {}).values():
        if sharded.requires_grad:
            sharded.register_hook(hook)
    for hook in (before._post_accumulate_grad_hooks or {}).values():
        sharded.register_post_accumulate_grad_hook(hook)


def _origin_of(param: nn.Parameter) -> object:
    """The same object for all sharded parameters that were made of one, as long as one of them lives."""
    if not hasattr(param, "_weft_origin"):
        param._weft_origin = object()  # type: ignore[attr-defined]
    return param._weft_origin  # type: ignore[attr-defined]


def _dense_local(grad: torch.Tensor, placement: Placement) -> torch.Tensor:
    if type(grad) is not torch.Tensor:
        grad = local_gradient(grad, placement)
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    return grad if grad.is_contiguous() else grad.contiguous()


class _AttributeSlot:
    """A module that watches its attributes, with the interface of its dictionary of parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __setitem__(self, name: str, param: nn.Parameter) -> None:
        setattr(self._module, name, param)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        return self._module._parameters[name]


def _slot_of(site: Site) -> tuple[Any, str]:
    # nn.Module's checks take longer than all else in a step of many small parameters.
    is_plain = type(site.module).__setattr__ is nn.Module.__setattr__
    return (site.module._parameters if is_plain else _AttributeSlot(site.module)), site.name


def _describe(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__} of shape {tuple(value.shape)}"

"""Which parameters and buffers of a module are replicated, and how a parameter's gradient is read and set.

A DTensor parameter (tensor parallel, on another axis of the mesh) has a local tensor on each rank, and the
ranks of a data-parallel group hold the same shard. So specs, buckets and collectives are about local
tensors; a plain parameter is its own local tensor. Users see DTensors: `.grad` has the parameter's
placements. A gradient that arrives in others is redistributed before it goes to its bucket, for example
summed over the parameter's own mesh where SequenceParallel left a Partial.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from weft import comm
from weft.comm.group import state_of
from weft.comm_hooks.mean import FEATURE
from weft.data_parallel.bucket_plan import ParamSpec, param_spec
from weft.errors import ConfigError, InternalError, StateError, UnfitError
from weft.tensors import local_of, make_dtensor, make_spec, with_dtype

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


@dataclass(frozen=True, slots=True)
class DDPParam:
    """A parameter that is reduced, and the spec of its gradient."""

    param: torch.Tensor
    spec: ParamSpec  # of its local tensor
    dtensor_spec: DTensorSpec | None = None  # of a DTensor parameter, and so of its gradient

    def as_grad(self, local: torch.Tensor) -> torch.Tensor:
        """The local gradient as `.grad`: a DTensor where the parameter is one."""
        spec = self.dtensor_spec
        return local if spec is None else make_dtensor(local, with_dtype(spec, local.dtype))


def make_ddp_param(name: str, param: torch.Tensor, *, is_sparse: bool, is_delayed: bool) -> DDPParam:
    """A parameter by its name in the module. Raises UnfitError for one that can't be reduced."""
    local = local_of(param)
    if not isinstance(param, DTensor):
        return DDPParam(param, param_spec(name, local, is_sparse=is_sparse, is_delayed=is_delayed))
    if is_sparse:
        raise UnfitError(
            f"parameter '{name}' is a DTensor, and its module makes sparse gradients, which DTensors can't "
            "have. Make the embedding with sparse=False, or leave it out of tensor parallel."
        )
    place = param.device_mesh.get_coordinate()
    piece = f"piece {place} of {list(param.shape)} by {param.placements}"
    spec = param_spec(name, local, is_delayed=is_delayed, piece=piece)
    return DDPParam(param, spec, make_spec(param.device_mesh, param.placements, param))


def check_dtensor_ranks(params: Iterable[tuple[str, torch.Tensor]], group: ProcessGroup) -> None:
    """Raise UnfitError for a DTensor with shards on several ranks of the group: those have no mean."""
    ranks = state_of(group).ranks
    for name, param in params:
        if not isinstance(param, DTensor):
            continue
        holders: list[int] = param.device_mesh.mesh.flatten().tolist()
        if len({*ranks} & {*holders}) > 1:
            raise UnfitError(
                f"parameter '{name}' is a DTensor on ranks {holders} ({param.placements}), and the "
                f"data-parallel group has ranks {list(ranks)}: they must have one rank in common. If "
                "fully_shard made it, that reduces its gradient, too: leave DistributedDataParallel or "
                "replicate out. Else distribute it over one axis of a mesh, mesh['tp'] say, and pass another "
                "as device_mesh=mesh['dp']; or leave its module to others with `ignored_modules` (replicate)."
            )


def local_grads_of(ddp_params: Iterable[DDPParam]) -> list[torch.Tensor | None]:
    """Their local gradients. Those of DTensors must have been redistributed."""
    locals_: list[torch.Tensor | None] = []
    for ddp_param in ddp_params:
        grad = ddp_param.param.grad
        if ddp_param.dtensor_spec is not None and not has_param_placements(ddp_param.param):
            raise InternalError(f"the gradient of '{ddp_param.spec.name}' has not been redistributed")
        locals_.append(None if grad is None else local_of(grad))
    return locals_


def has_param_placements(param: torch.Tensor) -> bool:
    """Whether a DTensor parameter's gradient, if there is one, has the parameter's placements."""
    grad = param.grad
    return grad is None or getattr(grad, "placements", None) == param.placements  # type: ignore[attr-defined]


def redistribute_grads(dtensor_params: Mapping[int, DDPParam], params: Iterable[torch.Tensor]) -> None:
    """Bring the gradients of these parameters, as far as they are DTensors, to the parameters' placements.

    `dtensor_params` are those with DTensors, by the id of the parameter. All ranks of their meshes must call
    it, in the same order. Not in place: a gradient's memory may be another gradient's too.
    """
    for param in params:
        ddp_param = dtensor_params.get(id(param))
        if ddp_param is not None and not has_param_placements(param):
            _redistribute_grad(ddp_param)


def _redistribute_grad(ddp_param: DDPParam) -> None:
    param, dtensor_spec = ddp_param.param, ddp_param.dtensor_spec
    if dtensor_spec is None:
        raise InternalError(f"parameter '{ddp_param.spec.name}' is no DTensor")
    grad = param.grad
    if not isinstance(grad, DTensor) or grad.device_mesh != dtensor_spec.mesh:
        where = f" on {grad.device_mesh}" if isinstance(grad, DTensor) else ""
        raise StateError(
            f"parameter '{ddp_param.spec.name}' is a DTensor on {dtensor_spec.mesh}, and its gradient came "
            f"as a {type(grad).__name__}{where}. A hook on it must return a DTensor on the parameter's own "
            "mesh."
        )
    with torch.no_grad():
        param.grad = ddp_param.as_grad(comm.local_in(grad, dtensor_spec.placements, feature=FEATURE))


ParamSlot = tuple[dict[str, nn.Parameter | None], str, nn.Parameter]  # _parameters of a module, a name


@dataclass(frozen=True)
class ModuleTensors:
    """A module's replicated parameters and buffers, in the order of `named_parameters`."""

    ddp_params: tuple[DDPParam, ...]  # those that require gradients
    slots: tuple[ParamSlot, ...]  # where they are registered
    frozen: tuple[tuple[str, nn.Parameter], ...]
    buffer_slots: tuple[tuple[nn.Module, str], ...]  # modules may reassign buffers

    def buffers(self) -> list[torch.Tensor]:
        """The buffers there are now; of DTensors, the local tensors."""
        found = (module._buffers.get(name) for module, name in self.buffer_slots)
        return [local_of(buffer) for buffer in found if buffer is not None]

    def params(self) -> Iterator[torch.Tensor]:
        """All parameters; of DTensors, the local tensors."""
        yield from (local_of(param) for _, param in self.named_params())

    def named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All parameters, with their names."""
        yield from ((ddp_param.spec.name, ddp_param.param) for ddp_param in self.ddp_params)
        yield from self.frozen

    @functools.cached_property
    def tied_slots(self) -> tuple[ParamSlot, ...]:
        """The slots of tied parameters."""
        counts = Counter(id(param) for _, _, param in self.slots)
        return tuple(slot for slot in self.slots if counts[id(slot[2])] > 1)

    def check_tied_params_kept(self) -> None:
        """The same for tied parameters: what is left of them may still be used."""
        self.check_params_kept(self.tied_slots)

    def check_params_kept(self, slots: Iterable[ParamSlot] | None = None) -> None:
        """Raise StateError for a parameter that has been replaced: the new one's gradient isn't reduced."""
        for owner, name, param in self.slots if slots is None else slots:
            found = owner.get(name)
            # A plain tensor is there for one call only, from torch.func.functional_call.
            if found is not param and isinstance(found, nn.Parameter) and found.requires_grad:
                fqn = next(ddp_param.spec.name for ddp_param in self.ddp_params if ddp_param.param is param)
                raise StateError(
                    f"parameter '{fqn}' is another one than when the module was wrapped; it would not be "
                    "reduced. Change values in place (param.data.copy_), or wrap the module again. If "
                    "fully_shard was applied to the module, or around it, leave out one of the two."
                )

    def check_frozen(self) -> None:
        """Raise StateError for a parameter that was frozen when the module was wrapped and isn't now."""
        for name, param in self.frozen:
            if param.requires_grad:
                raise StateError(
                    f"parameter '{name}' was frozen when the module was wrapped and requires a gradient "
                    "now; it would not be reduced. Wrap the module again after thawing, or freeze it after "
                    "wrapping."
                )


def find_module_tensors(
    module: nn.Module, ignored_names: Collection[str], delayed_names: Collection[str] = ()
) -> ModuleTensors:
    """Find a module's parameters and buffers. Shared ones count once."""
    sparse = _with_sparse_gradients(module)
    ddp_params: list[DDPParam] = []
    frozen: list[tuple[str, nn.Parameter]] = []
    for name, param in module.named_parameters():
        if name in ignored_names:
            continue
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise UnfitError(
                "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
                f"Run a dummy forward pass to correctly initialize the modules: '{name}' is uninitialized."
            )
        if not param.requires_grad:
            frozen.append((name, param))
            continue
        is_sparse, is_delayed = id(param) in sparse, name in delayed_names
        ddp_params.append(make_ddp_param(name, param, is_sparse=is_sparse, is_delayed=is_delayed))
    missing = set(delayed_names) - {ddp_param.spec.name for ddp_param in ddp_params}
    if missing:
        raise ConfigError(
            f"delay_all_reduce_named_params names {sorted(missing)}, which are not parameters of the module "
            "that are reduced. Take the names from module.named_parameters()."
        )
    buffer_slots = tuple(_buffer_slots(module, ignored_names))
    slots = _parameter_slots(module, {id(ddp_param.param) for ddp_param in ddp_params})
    return ModuleTensors(tuple(ddp_params), tuple(slots), tuple(frozen), buffer_slots)


def _with_sparse_gradients(module: nn.Module) -> set[int]:
    return {
        id(child.weight)
        for child in module.modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse
    }


def _parameter_slots(module: nn.Module, wanted: Collection[int]) -> Iterator[ParamSlot]:
    for child in module.modules():
        for name, param in child._parameters.items():
            if param is not None and id(param) in wanted:
                yield child._parameters, name, param


def _buffer_slots(module: nn.Module, ignored_names: Collection[str]) -> Iterator[tuple[nn.Module, str]]:
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            fqn = f"{prefix}.{name}" if prefix else name
            if buffer is None or id(buffer) in seen or fqn in ignored_names:
                continue
            seen.add(id(buffer))
            yield child, name

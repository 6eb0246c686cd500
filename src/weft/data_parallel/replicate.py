"""`replicate`: data parallel without a wrapper.

The module stays what it is and keeps its names; forward hooks do what DistributedDataParallel.forward does.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.transforms import beside_transforms
from weft.comm_hooks.bucket import GradHook
from weft.compiler import at_trace, is_tracing
from weft.data_parallel.bucket_plan import resolve_caps
from weft.data_parallel.join import ReplicaJoinHook
from weft.data_parallel.options import (
    ReplicaOptions,
    resolve_buffer_sync,
    resolve_delayed,
    resolve_process_group,
)
from weft.data_parallel.parameters import check_dtensor_ranks
from weft.data_parallel.replica import Replica
from weft.errors import ConfigTypeError, InternalError, UnfitError
from weft.join import Joinable, JoinHook
from weft.modules import Prepared, attach, attached, give_class, owners_below
from weft.modules.attached import check_free
from weft.torch_private import check_torch

FEATURE = "replicate"


class ReplicatedModule(Prepared, Joinable, calls_by_feature=True):
    """The methods that `replicate` adds to a module."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce the gradients of forwards from now on, or keep them local and add them up."""
        module = cast("nn.Module", self)
        for child in module.modules() if recurse else (module,):
            state = attached(child, FEATURE)
            if state is not None:
                state.wants_sync = requires_gradient_sync

    @contextmanager
    def no_sync(self, enabled: bool = True) -> Generator[None]:
        """Keep gradients local for forwards made within, and add them up for the next reduction.

        As DistributedDataParallel's, and for all replicated modules inside. With `enabled=False` it changes
        nothing.
        """
        children = cast("nn.Module", self).modules()
        states = [state for child in children if (state := attached(child, FEATURE)) is not None]
        before = [state.wants_sync for state in states]
        for state in states if enabled else ():
            state.wants_sync = False
        try:
            yield
        finally:
            for state, wanted in zip(states, before, strict=True):
                state.wants_sync = wanted

    def register_comm_hook(self, state: Any, hook: GradHook) -> None:
        """Reduce each bucket with `hook(state, bucket)`, which returns a Future of the reduced buffer."""
        _replica_of(self).register_hook(state, hook)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook by which joined ranks shadow this module."""
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return ReplicaJoinHook(_replica_of(self))

    @property
    def join_device(self) -> torch.device:
        """The device of Join's own collectives."""
        return _replica_of(self).device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group whose ranks join."""
        return _replica_of(self).group


class ReplicateState:
    """What `replicate` attaches to a module. A copy of the module has its own, with a replica of its own."""

    def __init__(self, module: nn.Module, options: ReplicaOptions) -> None:
        self._module = weakref.ref(module)  # which holds this
        self.options = options
        self._replica: Replica | None = None
        self._wants_sync = True  # until there is a replica
        self.init_replica = _make_init(weakref.ref(self))

    @property
    def wants_sync(self) -> bool:
        """Whether the next forward's gradients are reduced."""
        return self._wants_sync if self._replica is None else self._replica.wants_sync

    @wants_sync.setter
    def wants_sync(self, wanted: bool) -> None:
        self._wants_sync = wanted
        if self._replica is not None:
            self._replica.wants_sync = wanted

    @property
    def module(self) -> nn.Module:
        """The module that this state is attached to."""
        module = self._module()
        if module is None:
            raise InternalError("the state of replicate was used after its module")
        return module

    @property
    def replica(self) -> Replica:
        """The replica, made by all ranks together when it is first needed."""
        if self._replica is None:
            with beside_transforms("replicate"):
                self._replica = Replica(self.module, cast("Joinable", self.module), self.options)
            self._replica.wants_sync = self._wants_sync
        return self._replica

    def before_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The module's forward pre-hook."""
        if is_tracing():
            at_trace(self.init_replica)
            assert self._replica is not None
            return self._replica.before_forward(args, kwargs)
        return self.replica.before_forward(args, kwargs)

    def after_forward(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """The module's forward hook."""
        return (self._replica or self.replica).after_forward(output)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicateState:
        new = ReplicateState.__new__(ReplicateState)
        memo[id(self)] = new
        new._module = weakref.ref(copy.deepcopy(self.module, memo))
        new.options = self.options
        new._replica = None
        new.init_replica = _make_init(weakref.ref(new))
        new._wants_sync = self.wants_sync
        return new


def _make_init(ref: weakref.ref[ReplicateState]) -> Callable[[Any], None]:
    """A function for `at_trace` that makes the replica."""

    def init(_: Any) -> None:
        state = ref()
        assert state is not None
        assert state.replica is not None

    return init


def replicate(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None = None,
    *,
    device_mesh: DeviceMesh | None = None,
    device_id: int | torch.device | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Replicate the module over the ranks of the world, of `device_mesh` or of `process_group`; returns it.

    Parameters below modules that are replicated or sharded themselves, and those in
    `ignored_modules`, are left to others. The other arguments are DistributedDataParallel's, but for
    `mixed_precision`: without a wrapper nobody casts. Ranks compare and share their parameters at the
    first forward, so that they may still be loaded.
    Raises if the module is replicated or sharded already; nothing is changed then.
    """
    check_torch()
    check_free(module, FEATURE)
    ignored_names = _ignored_names(module, ignored_modules)
    options = _resolve(module, device_mesh, device_id, kwargs, ignored_names)
    ours = ((name, param) for name, param in module.named_parameters() if name not in ignored_names)
    check_dtensor_ranks(ours, options.group)
    state = ReplicateState(module, options)
    attach(module, FEATURE, state)
    give_class(module, ReplicatedModule, "")  # by its own name: programs write it into what they save
    Joinable.__init__(cast("Joinable", module))
    module.register_forward_pre_hook(state.before_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(state.after_forward)
    return module


def find_state(module: object) -> ReplicateState | None:
    """The state of a module that `replicate` was applied to; None for any other."""
    return attached(cast("nn.Module", module), FEATURE)


def _replica_of(module: ReplicatedModule) -> Replica:
    return attached(cast("nn.Module", module), FEATURE).replica


def _ignored_names(module: nn.Module, ignored_modules: Iterable[nn.Module] | None) -> frozenset[str]:
    left_alone = [*(ignored_modules or ()), *owners_below(module)]
    theirs = {id(tensor) for child in left_alone for tensor in (*child.parameters(), *child.buffers())}
    ours = (*module.named_parameters(), *module.named_buffers())
    by_name: Iterable[str] = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    return frozenset(by_name) | {name for name, tensor in ours if id(tensor) in theirs}


def _resolve(
    module: nn.Module,
    device_mesh: DeviceMesh | None,
    device_id: Any,
    kwargs: dict[str, Any],
    ignored_names: frozenset[str],
) -> ReplicaOptions:
    if device_id is not None and not isinstance(device_id, int | torch.device):
        raise UnfitError(f"Expected device_id to be int or torch.device, but got {type(device_id)}.")
    unknown = set(kwargs) - _KNOWN
    if unknown:
        raise ConfigTypeError(
            f"replicate got arguments it doesn't know: {sorted(unknown)}. It takes {sorted(_KNOWN)}."
        )
    at_start, at_forward = resolve_buffer_sync(
        kwargs.get("broadcast_buffers"), kwargs.get("forward_sync_buffers")
    )
    return ReplicaOptions(
        group=resolve_process_group(kwargs.get("process_group"), device_mesh),
        caps=resolve_caps(kwargs.get("bucket_cap_mb"), kwargs.get("bucket_cap_mb_list")),
        ignored_names=ignored_names,
        delayed_names=resolve_delayed(
            kwargs.get("delay_all_reduce_named_params"), kwargs.get("param_to_hook_all_reduce")
        ),
        init_sync=kwargs.get("init_sync", True),
        init_sync_buffers=at_start,
        forward_sync_buffers=at_forward,
        find_unused_parameters=kwargs.get("find_unused_parameters", False),
        gradient_as_bucket_view=kwargs.get("gradient_as_bucket_view", False),
        static_graph=kwargs.get("static_graph", False),
        device=_resolve_device(module, device_id if device_id is not None else _only_id(kwargs)),
    )


def _only_id(kwargs: dict[str, Any]) -> int | torch.device | None:
    """The device in `device_ids`, as DistributedDataParallel takes it."""
    ids: Any = kwargs.get("device_ids")
    if ids is None:
        return None
    if len(ids) != 1:
        raise UnfitError(f"replicate: device_ids must be None or a list with one device, got {ids}.")
    return ids[0]


def _resolve_device(module: nn.Module, device_id: int | torch.device | None) -> torch.device | None:
    if device_id is None:
        return None
    if isinstance(device_id, torch.device):
        return device_id
    kinds = {param.device.type for param in module.parameters()}
    return torch.device(kinds.pop(), device_id) if len(kinds) == 1 else None


_KNOWN = {
    "batched_grad_copy",
    "check_reduction",
    "skip_all_reduce_unused_params",
    "bucket_cap_mb",
    "bucket_cap_mb_list",
    "broadcast_buffers",
    "delay_all_reduce_named_params",
    "device_ids",
    "find_unused_parameters",
    "forward_sync_buffers",
    "gradient_as_bucket_view",
    "init_sync",
    "param_to_hook_all_reduce",
    "process_group",
    "static_graph",
}

replicate.state = find_state  # type: ignore[attr-defined]

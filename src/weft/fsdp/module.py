"""What a module can do once it is sharded: the methods that `fully_shard` gives it.

Two of them are more than a setting. A pipeline's schedule has a stage reduce once, behind the last
microbatch: it keeps gradients from being reduced in the microbatches' backwards; schedules of torch 2.15 then
call `finalize_backward`, older ones turn to the state that torch's own fully_shard would have left on the
module, for which `StageState` stands in. And `deepcopy` makes a model that is sharded alike and independent:
modules are copied as plain ones with sharded parameters, without hooks and states; then both, the old and the
new, get their states. So a copy never sees half-made buffers, and process groups are shared.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weft.autograd import current_backward
from weft.comm_hooks.bucket import GradHook
from weft.errors import ConfigError, ConfigTypeError, InternalError, RefusedError, StateError
from weft.fsdp.comm_hook import make_comm_hook
from weft.fsdp.mesh import resolve_post_forward_mesh
from weft.fsdp.param import ShardedParam, Site
from weft.fsdp.param_group import ParamGroup
from weft.fsdp.reduce import plan_buckets
from weft.fsdp.state import ModuleState, check_has_values, find_state
from weft.fsdp.state_dict import fill_unset, find_meta_buffers
from weft.modules import STATES_KEY, Prepared, enter_state


class UnshardHandle:
    """An unshard under way. The module's forward waits for it, or a caller who needs it before."""

    def __init__(self, groups: list[ParamGroup] | None = None) -> None:
        self._groups = groups or []

    def wait(self) -> None:
        """Return when the module has unsharded parameters."""
        groups, self._groups = self._groups, []
        for group in groups:
            group.wait_for_unshard()


class FSDPModule(Prepared):
    """A module whose parameters are sharded. `fully_shard` makes one of any module, in place."""

    _weft_own_class: type  # what it was before

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # A sliced Sequential makes another of its own class: a plain one.
        own = cls._weft_own_class
        made = own.__new__(own, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    # Parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this module's parameters, those of sharded modules inside it not included.

        Every rank must call it. With `async_op` it returns at once with a handle; forward waits for it, too.
        """
        groups = state_of(self).groups
        for group in groups:
            group.prepare()
            check_has_values(group)
            group.start_unshard()
        handle = UnshardHandle(groups)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the unsharded parameters and register the sharded ones; not of sharded modules inside."""
        for group in state_of(self).groups:
            group.reshard()

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: start afresh. Call it on the root, on every rank.

        Gradients that were not reduced yet are lost. A forward that failed is noticed by the next one as
        well.
        """
        state = state_of(self)
        _check_root(state, "reset_iter_state")
        if state.model is not None:
            state.model.start_over()

    # When to communicate

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for torch's sake: each backward waits for its own reductions here, last or not."""

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Have a step's backwards ended by `finalize_backward`. Call it on the root, before forward."""
        state = state_of(self)
        _check_root(state, "set_manual_backward_finalization")
        if enabled != state.is_finalized_manually and current_backward() is not None:
            raise StateError(
                "set_manual_backward_finalization cannot change mode during backward: call it before forward."
            )
        state.is_finalized_manually = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce what the step's backwards have accumulated here, as pipelines do behind the last one.

        Call it on the root, on every rank, once gradients are to be reduced again. Raises StateError without
        `set_manual_backward_finalization(True)`. Returns, with `async_op` too, when gradients are reduced.
        """
        state = state_of(self)
        _check_root(state, "finalize_backward")
        if not state.is_finalized_manually:
            raise StateError(
                "finalize_backward requires manual backward finalization. Call "
                "set_manual_backward_finalization(True) before forward."
            )
        if current_backward() is not None:
            raise StateError(
                "finalize_backward must be called after backward completes, not in a hook of it."
            )
        if state.is_root is not None:  # before the first forward nothing is kept
            reduce_kept_grads(state)
        return GradientReductionHandle() if async_op else None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce gradients in backward, or accumulate them on this rank until a backward that does."""
        for group in _groups_of(self, recurse=recurse):
            group.settings.reduces_grads = requires_gradient_sync
            group.settings.all_reduces_grads = requires_gradient_sync

    @contextmanager
    def no_sync(self, enabled: bool = True) -> Generator[None]:
        """Accumulate gradients on this rank in backwards made within, for the next one outside to reduce.

        It holds for sharded modules inside, too; gradients are kept unsharded until then. With
        `enabled=False` it changes nothing, so that a loop can say when: `no_sync(step % 4 != 3)`.
        """
        settings = [group.settings for group in _groups_of(self)]
        before = [(one.reduces_grads, one.all_reduces_grads) for one in settings]
        if enabled:
            self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for one, (reduces, all_reduces) in zip(settings, before, strict=True):
                one.reduces_grads, one.all_reduces_grads = reduces, all_reduces

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With hybrid sharding: reduce over the replicas too, or keep this shard's sum until a backward that
        does.
        """
        for group in _groups_of(self, recurse=recurse):
            group.settings.all_reduces_grads = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Reshard parameters after forward and unshard them again for backward, or keep them unsharded."""
        if not isinstance(reshard_after_forward, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}.")
        for state in _states_of(self, recurse=recurse):
            state.keeps_root_unsharded = False
            for group in state.groups:
                if group.dp_mesh.shard_group is not None:
                    group.settings.post_forward_mesh = resolve_post_forward_mesh(
                        group.dp_mesh, reshard_after_forward
                    )

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Reshard parameters after backward, or keep them unsharded for the next forward."""
        for group in _groups_of(self, recurse=recurse):
            group.settings.reshards_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Unshard for backward, or not: for modules whose backward needs no parameters, as an embedding's."""
        for group in state_of(self).groups:
            group.settings.unshards_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Start to unshard these modules when this one's forward begins."""
        state_of(self).forward_prefetch = _checked_states(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Start to unshard these modules when backward reaches this one."""
        state_of(self).backward_prefetch = _checked_states(modules)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Accepted for torch's sake: all-gathers are ordered behind the stream that the forward runs on."""

    # How to reduce

    def register_comm_hook(self, state: Any, hook: GradHook, *, recurse: bool = True) -> None:
        """Reduce gradients with `hook(state, bucket)`, here and in the sharded modules inside.

        The hooks of weft.comm_hooks work, and the user's own: it gets a bucket with a part for each rank that
        the parameters are sharded over, and returns a Future of the mean; of it this rank's part is taken.
        Raises ConfigError where the hook would average over other ranks than those of the mesh.
        """
        groups = list(_groups_of(self, recurse=recurse))
        num_buckets = sum(
            len(plan_buckets(group.params, lambda param, group=group: param.reduce_dtype(group.policy)))
            for group in groups
        )
        registered = make_comm_hook(hook, state, [group.dp_mesh for group in groups], num_buckets)
        for group in groups:
            group.settings.comm_hook = registered

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Call the hook with the reduced shard (1-D), before gradients are made of it; it may change it in
        place.
        """
        for group in state_of(self).groups:
            if stream is not None and group.dp_mesh.replicate_group is not None:
                raise ConfigError("stream cannot be set when using native HSDP")
            group.settings.all_reduce_hook = hook
            group.settings.all_reduce_stream = stream

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by this, not by the number of ranks."""
        for group in state_of(self).groups:
            group.settings.gradient_divide_factor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of set_gradient_divide_factor."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Use only sums in collectives and divide by hand: for backends that have no mean."""
        for group in state_of(self).groups:
            group.settings.sums_only = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Give zeros, not None, to parameters that no rank has used. Ranks may differ in what they use
        anyhow.
        """
        for group in _groups_of(self, recurse=recurse):
            group.settings.reduces_unused = reduce_scatter_unused_params

    def set_custom_all_gather(self, comm: Any) -> None:
        """All-gather with the user's own implementation: `comm.allocate` and `comm(...)` are called."""
        for group in state_of(self).groups:
            group.settings.custom_all_gather = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce-scatter with the user's own implementation: `comm.allocate` and `comm(...)` are called."""
        for group in state_of(self).groups:
            group.settings.custom_reduce_scatter = comm

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accepted for torch's sake: weft's groups read parameters and gradients where they lie."""

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Accepted for torch's sake, without effect."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Accepted for torch's sake: gradients are read where they lie, and two reductions are under way at
        most.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):  # pyright: ignore
            raise ConfigTypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}."
            )
        if max_input_buffers < 1:
            raise ConfigError(f"max_input_buffers must be a positive int, got {max_input_buffers}.")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce-scatter on a process group of its own, beside the all-gathers. Every rank must call it."""
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for group in _groups_of(self, recurse=recurse):
            shard_group = group.dp_mesh.shard_group
            if shard_group is None:
                continue
            ranks = tuple(dist.get_process_group_ranks(shard_group))
            if enable and ranks not in made:
                new = group.settings.reduce_scatter_group or dist.new_group(
                    list(ranks), use_local_synchronization=True
                )
                made[ranks] = cast("dist.ProcessGroup", new)
            group.settings.reduce_scatter_group = made.get(ranks)

    # Of nn.Module

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()  # what is moved or cast are the sharded parameters
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for group in state_of(self).groups:
            group.prepare()
        return result

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Allocate memory on a device, without values. The caller sets buffers that no state dict sets."""
        unset = find_meta_buffers(cast("nn.Module", self))
        result = super().to_empty(device=device, recurse=recurse)  # type: ignore[misc]
        state_of(self).unset_buffers += fill_unset(unset)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also of parameters that are unsharded now."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for group in _groups_of(self):
            for param in group.params:
                if set_to_none:
                    param.sharded.grad = None
                elif param.sharded.grad is not None:
                    param.sharded.grad.zero_()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy_sharded(cast("nn.Module", self), memo)

    def _get_fsdp_state(self) -> ModuleState:
        return state_of(self)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted for torch's sake: all-gathers are always asynchronous."""


def state_of(module: Any) -> ModuleState:
    """The state of a module that fully_shard was applied to."""
    state = find_state(module)
    if state is None:
        raise InternalError(f"{type(module).__name__} has the class of a sharded module, and no state.")
    return state


def _states_of(module: Any, *, recurse: bool = True) -> Iterator[ModuleState]:
    seen: set[ModuleState] = set()
    for part in module.modules() if recurse else (module,):
        state = find_state(part)
        if state is not None and state not in seen:
            seen.add(state)
            yield state


def _groups_of(module: Any, *, recurse: bool = True) -> Iterator[ParamGroup]:
    for state in _states_of(module, recurse=recurse):
        yield from state.groups


def _checked_states(modules: list[Any]) -> list[ModuleState]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ConfigError(
                f"Expects FSDPModule but got {type(module)}: {module}. Apply fully_shard to it first."
            )
    return [state_of(module) for module in modules]


# Pipelines


class StageState:
    """Stands in for the state of torch's fully_shard, with the names that torch's schedules use."""

    def __init__(self, state: ModuleState) -> None:
        self._state = weakref.ref(state)  # whose module holds this

    @property
    def _state_ctx(self) -> Any:
        return SimpleNamespace(all_states=())  # of torch's there are none

    def _root_post_backward_final_callback(self) -> None:
        state = self._state()
        if state is None:
            raise InternalError("the state of a sharded stage was used after its module")
        reduce_kept_grads(state)


class GradientReductionHandle:
    """What `finalize_backward(async_op=True)` returns: of a reduction that has ended by then."""

    def wait(self) -> None:
        """Return at once: gradients may be read."""


def _check_root(state: ModuleState, method: str) -> None:
    if state.is_root is False:
        raise StateError(
            f"{method} must be called on the root FSDP module, the one whose forward runs first."
        )


def reduce_kept_grads(root: ModuleState) -> None:
    """Reduce, outside of any backward, what earlier backwards have accumulated on this rank."""
    model = root.lazy_init()
    with torch.enable_grad():
        # Reductions end with a backward: here an empty one.
        start = torch.zeros((), requires_grad=True) * 1.0
    start.register_hook(lambda _: model.enter_backward())
    start.backward()


# Copies


def copy_sharded(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """What copy.deepcopy gives for a sharded module. Every rank of its mesh should make the same copies."""
    states = list(
        dict.fromkeys(state for part in module.modules() if (state := find_state(part)) is not None)
    )
    _check_ready(module, states)
    parts = {part for state in states for part in state.modules}
    taken = [(part, type(part), part.__dict__.pop(STATES_KEY)) for part in parts]
    for state in states:
        for group in state.groups:
            group.reshard()
            for param in group.params:
                _rewrap_grad(param)
        state.remove_hooks()
    for part, cls, _ in taken:
        part.__class__ = cls._weft_own_class  # type: ignore[attr-defined]
    try:
        # The values: `module` itself is in the memo from here on.
        copied = copy.deepcopy(module, memo)
    finally:
        for part, cls, kept in taken:
            part.__class__ = cls
            part.__dict__[STATES_KEY] = kept
        for state in states:
            state.install_hooks()
    new_states = {state: _copy_state(state, memo) for state in states}
    for part, cls, kept in taken:
        new = memo[id(part)]
        new.__class__ = cls
        new.__dict__[STATES_KEY] = {key: new_states.get(value, value) for key, value in kept.items()}
        for state in kept.values():
            if state in new_states:
                enter_state(new, StageState(new_states[state]))
    for state, new_state in new_states.items():
        new_state.forward_prefetch = [new_states.get(other, other) for other in state.forward_prefetch]
        new_state.backward_prefetch = [new_states.get(other, other) for other in state.backward_prefetch]
        new_state.install_hooks()
    return copied


def _check_ready(module: nn.Module, states: Sequence[ModuleState]) -> None:
    inside = set(module.modules())
    if any(part not in inside for state in states for part in state.modules):
        raise RefusedError(
            "FSDP does not support deepcopy of a part of modules that were sharded together, as a list. Copy "
            "the module that contains all of them."
        )
    if any(state.model is None for state in states):
        raise RefusedError(
            "FSDP does not support deepcopy of a model that has not run yet. Copy it before fully_shard, or "
            "after its first forward. Please use state dict for serialization."
        )


def _rewrap_grad(param: ShardedParam) -> None:
    """Graphs make gradients that are parts of a flat tensor, which torch takes for DTensors with memory."""
    grad = param.sharded.grad
    if isinstance(grad, DTensor) and grad.storage_offset():
        param.sharded.grad = param.make_sharded_grad(grad._local_tensor)


def _copy_state(state: ModuleState, memo: dict[int, Any]) -> ModuleState:
    return ModuleState(
        [memo[id(module)] for module in state.modules],
        [_copy_group(group, memo) for group in state.groups],
        state.policy,
        state.device,
        keeps_root_unsharded=state.keeps_root_unsharded,
    )


def _copy_group(group: ParamGroup, memo: dict[int, Any]) -> ParamGroup:
    params: list[ShardedParam] = []
    for param in group.params:
        sites = [Site(memo[id(site.module)], site.name) for site in param.sites]
        sharded = sites[0].module._parameters[sites[0].name]
        assert sharded is not None
        copied = ShardedParam(param.fqn, sites, param.placement, group.dp_mesh, sharded)
        copied.origin = param.origin
        copied.register(sharded)  # tied ones stay one
        params.append(copied)
    settings = dataclasses.replace(group.settings)
    return ParamGroup(
        params, group.dp_mesh, group.policy, settings, group.shard_device, is_pinned=group.is_pinned
    )

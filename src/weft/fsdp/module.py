"""What a module can do once it is sharded: the methods that `fully_shard` gives it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn

from weft.comm_hooks.bucket import GradHook
from weft.errors import ConfigError, ConfigTypeError, InternalError, StateError
from weft.fsdp.copying import copy_sharded
from weft.fsdp.group import ParamGroup
from weft.fsdp.hooked import register_hook
from weft.fsdp.mesh import smaller_mesh
from weft.fsdp.pipelined import GradientReductionHandle, finalize, set_finalized_by_call
from weft.fsdp.reduce import gradient_batches
from weft.fsdp.state import ModuleState, check_has_values
from weft.fsdp.tree import find_state
from weft.fsdp.unset_buffers import fill_unset, find_meta_buffers
from weft.modules import Prepared


class UnshardHandle:
    """An unshard under way. Whoever wants it before the module's forward waits for it."""

    def __init__(self, groups: list[ParamGroup] | None = None) -> None:
        self._groups = groups or []

    def wait(self) -> None:
        """Return when the module has whole parameters."""
        groups, self._groups = self._groups, []
        for group in groups:
            group.finish_whole()


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
        """Make this module's parameters whole, those of sharded modules inside it not included.

        Every rank must call it. With `async_op` it returns at once with a handle; forward waits for it, too.
        """
        groups = state_of(self).groups
        for group in groups:
            group.prepare()
            check_has_values(group)
            group.start_whole()
        handle = UnshardHandle(groups)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the whole parameters and register the sharded ones; sharded modules inside are left alone."""
        for group in state_of(self).groups:
            group.reshard()

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: start afresh. Call it on the root, on every rank.

        Gradients that were not reduced yet are lost. A forward that failed is noticed by the next one as
        well.
        """
        state = state_of(self)
        if state.is_root is False:
            raise StateError(
                "reset_iter_state must be called on the root FSDP module, the one whose forward runs first."
            )
        if state.tree is not None:
            state.tree.start_over()

    # When to communicate

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted for torch's sake: each backward waits for its own reductions here, last or not."""

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Have a step's backwards ended by `finalize_backward`. Call it on the root, before forward."""
        set_finalized_by_call(state_of(self), enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce what the step's backwards have added up on this rank, as pipelines do behind the last one.

        Call it on the root, on every rank, once gradients are to be reduced again. Raises StateError without
        `set_manual_backward_finalization(True)`. Returns, with `async_op` too, when gradients are reduced.
        """
        finalize(state_of(self))
        return GradientReductionHandle() if async_op else None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce gradients in backward, or add them up on this rank until a backward that does."""
        for group in _groups_of(self, recurse=recurse):
            group.settings.reduces = requires_gradient_sync
            group.settings.reduces_replicas = requires_gradient_sync

    @contextmanager
    def no_sync(self, enabled: bool = True) -> Generator[None]:
        """Add gradients up on this rank in backwards made within, for the next one outside to reduce.

        It holds for sharded modules inside, too; gradients are kept whole until then. With `enabled=False`
        it changes nothing, so that a loop can say when: `no_sync(step % 4 != 3)`.
        """
        settings = [group.settings for group in _groups_of(self)]
        before = [(one.reduces, one.reduces_replicas) for one in settings]
        if enabled:
            self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for one, (reduces, reduces_replicas) in zip(settings, before, strict=True):
                one.reduces, one.reduces_replicas = reduces, reduces_replicas

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With hybrid sharding: reduce over the replicas too, or keep this shard's sum until a backward that
        does.
        """
        for group in _groups_of(self, recurse=recurse):
            group.settings.reduces_replicas = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free parameters after forward and gather them again for backward, or keep them."""
        if not isinstance(reshard_after_forward, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}.")
        for state in _states_of(self, recurse=recurse):
            state.keeps_root_whole = False
            for group in state.groups:
                if group.data.shard_group is not None:
                    group.settings.after_forward = smaller_mesh(group.data, reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Free parameters after backward, or keep them for the next forward: memory for traffic."""
        for group in _groups_of(self, recurse=recurse):
            group.settings.reshards_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Gather for backward, or not: for modules whose backward needs no parameters, as an embedding's."""
        for group in state_of(self).groups:
            group.settings.gathers_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Start to gather these modules when this one's forward begins."""
        state_of(self).forward_prefetch = _checked_states(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Start to gather these modules when backward comes to this one."""
        state_of(self).backward_prefetch = _checked_states(modules)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Accepted for torch's sake: gatherings are ordered behind the stream that the forward runs on."""

    # How to reduce

    def register_comm_hook(self, state: Any, hook: GradHook, *, recurse: bool = True) -> None:
        """Reduce gradients with `hook(state, bucket)`, here and in the sharded modules inside.

        The hooks of weft.comm_hooks work, and the user's own: it gets a bucket with a part for each rank that
        the parameters are sharded over, and returns a Future of the mean; of it this rank's part is taken.
        Raises ConfigError where the hook would average over other ranks than those of the mesh.
        """
        groups = list(_groups_of(self, recurse=recurse))
        batches = [
            gradient_batches(group.params, lambda param, group=group: param.reduce_dtype(group.policy))
            for group in groups
        ]
        registered = register_hook(hook, state, [group.data for group in groups], sum(map(len, batches)))
        for group in groups:
            group.settings.comm_hook = registered

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Call the hook with the reduced shard (1-D), before gradients are made of it; it may change it in
        place.
        """
        for group in state_of(self).groups:
            if stream is not None and group.data.replicate_group is not None:
                raise ConfigError("stream cannot be set when using native HSDP")
            group.settings.all_reduce_hook = hook
            group.settings.all_reduce_stream = stream

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by this, not by the number of ranks."""
        for group in state_of(self).groups:
            group.settings.divide_factor = factor

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
        """Gather with the user's own all-gather: `comm.allocate` and `comm(...)` are called."""
        for group in state_of(self).groups:
            group.settings.custom_gather = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce with the user's own reduce-scatter: `comm.allocate` and `comm(...)` are called."""
        for group in state_of(self).groups:
            group.settings.custom_reduce = comm

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
        """Reduce on a process group of its own, beside the gatherings. Every rank must call it."""
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for group in _groups_of(self, recurse=recurse):
            shard_group = group.data.shard_group
            if shard_group is None:
                continue
            ranks = tuple(dist.get_process_group_ranks(shard_group))
            if enable and ranks not in made:
                new = group.settings.reduce_group or dist.new_group(
                    list(ranks), use_local_synchronization=True
                )
                made[ranks] = cast("dist.ProcessGroup", new)
            group.settings.reduce_group = made.get(ranks)

    # Of nn.Module

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.reshard()  # what is moved or cast are the sharded parameters
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for group in state_of(self).groups:
            group.prepare()
        return result

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Make room on a device, without values. Buffers that no state dict sets must be set by hand."""
        places = find_meta_buffers(cast("nn.Module", self))
        result = super().to_empty(device=device, recurse=recurse)  # type: ignore[misc]
        state_of(self).unset_buffers += fill_unset(places)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also of parameters that are whole now."""
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
        """Accepted for torch's sake: gatherings are always asynchronous."""


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

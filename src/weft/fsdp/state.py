"""What fully_shard ties to a module, and what all sharded modules of a model share: the hooks of a step.

A module's pre-forward hook unshards its parameters; the post-forward hook reshards them, unless settings say
otherwise. Hooks on its outputs run when backward reaches it, and unshard again. An autograd function on its
inputs runs when backward leaves it: its gradients are reduced, its parameters resharded. What autograd did
not announce is done at the end of backward.

Invariant: `ModelState` is made at the first forward, when every fully_shard has been applied; the module
that runs first is the root. How a group unshards and reduces is param_group.py's work, in the order that
order.py keeps.
"""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from weft.autograd import (
    announce_gradients,
    current_backward,
    on_backward_end,
    told_of_backward,
    traced_inside_only,
)
from weft.comm.transforms import beside_transforms, is_transformed, unwrapped
from weft.compiler import is_tracing
from weft.errors import ConfigError, StateError
from weft.fsdp.compile import TracedModuleState, keep_traceable
from weft.fsdp.join import UnevenSteps
from weft.fsdp.order import CollectiveOrder, PhaseStatus, bitmask
from weft.fsdp.param import ShardedParam
from weft.fsdp.param_group import ParamGroup, ShardedState
from weft.fsdp.policy import MixedPrecisionPolicy
from weft.fsdp.reduce import ReductionQueue
from weft.fsdp.state_dict import UnsetBuffer, check_buffers_set, make_copyable
from weft.modules import attached
from weft.tensors import find_tensors, map_tensors

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class ModuleState:
    """The state of one module, or of several that were given as a list."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParamGroup],
        policy: MixedPrecisionPolicy,
        device: torch.device,
        *,
        keeps_root_unsharded: bool,
    ) -> None:
        self.modules = tuple(modules)
        self.groups = list(groups)
        self.policy = policy
        self.device = device
        self.keeps_root_unsharded = keeps_root_unsharded  # reshard_after_forward was left to weft
        self.model: ModelState | None = None
        self.is_root: bool | None = None
        self.is_finalized_manually = False  # a step's backwards end with finalize_backward()
        self.forward_prefetch: list[ModuleState] = []
        self.backward_prefetch: list[ModuleState] = []
        self.unset_buffers: list[UnsetBuffer] = []  # to be set before the first forward
        self.traced = TracedModuleState(self)
        # For each forward under way (a module may call itself): the exception handled when it began.
        self._running: list[BaseException | None] = []
        self.modules_to_run: set[nn.Module] = set()  # of several modules, in a forward that has begun
        self._hook_handles: list[Any] = []

    def install_hooks(self) -> None:
        """Install the hooks on the modules."""
        for module in self.modules:
            self._hook_handles += [
                module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True),
                module.register_forward_hook(self.post_forward, always_call=True),
            ]
        for group in self.groups:
            for owner in {site.module for param in group.params for site in param.sites}:
                self._hook_handles += [
                    owner.register_state_dict_pre_hook(_resharding_hook(group)),
                    owner.register_state_dict_post_hook(make_copyable),
                    owner.register_load_state_dict_pre_hook(_resharding_hook(group)),
                    owner.register_load_state_dict_post_hook(_preparing_hook(group)),
                ]

    def remove_hooks(self) -> None:
        """Remove the hooks again."""
        for handle in self._hook_handles:
            handle.remove()
        self._hook_handles.clear()

    def lazy_init(self) -> ModelState:
        """The model's state; the first call makes it, with this module as the root."""
        if self.model is None:
            self.model = _init_model_state(self)
            if self.keeps_root_unsharded:
                for group in self.groups:
                    group.settings.post_forward_mesh = None  # backward would all-gather it again at once
            for state in self.model.states:
                state.prepare()
        return self.model

    def prepare(self) -> None:
        """Before the first use: parameters must have values, and buffers are made."""
        for group in self.groups:
            group.prepare()
            check_has_values(group)
        check_buffers_set(self.unset_buffers)

    def groups_below(self) -> list[ParamGroup]:
        """The groups of this module and of those inside it, also before the first forward."""
        found = [find_state(module) for module in self.modules[0].modules()]
        return [group for state in dict.fromkeys(found) if state is not None for group in state.groups]

    # Forward

    @traced_inside_only
    def pre_forward(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The modules' forward pre-hook."""
        if is_tracing():
            return self._pre_forward_traced(module, args, kwargs)
        if self.modules_to_run and self._needs_no_pre_forward() and current_backward() is None:
            self._running.append(sys.exception())  # another one of several, in a forward that has begun
            return args, kwargs
        return self.pre_forward_eager(module, args, kwargs)

    def _pre_forward_traced(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        self.traced.prepare_trace()
        if self.traced.find_break_reason():  # the graph ends before this
            return self.traced.pre_forward_outside(module, args, kwargs)
        args, kwargs = self._cast_inputs(*self._move_inputs(args, kwargs, is_root=bool(self.is_root)))
        unshard = self.traced.unshard_of(module)
        assert unshard is not None
        unshard.begin()
        return args, kwargs

    def _needs_no_pre_forward(self) -> bool:
        """Whether parameters are unsharded already, and inputs go in as they are."""
        is_cast = self.policy.param_dtype is not None and self.policy.cast_forward_inputs
        return not is_cast and not self.forward_prefetch and self._is_unsharded()

    def _is_unsharded(self) -> bool:
        return all(group.sharded_state is ShardedState.UNSHARDED for group in self.groups)

    def pre_forward_eager(self, module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The forward pre-hook outside of graphs."""
        is_recomputed = current_backward() is not None
        is_first = not self.modules_to_run and not self._running
        with beside_transforms("fully_shard"):
            model = self._enter_forward(is_first=is_first, is_recomputed=is_recomputed)
        # The outermost one's, also when it runs again in backward, with the inputs it had.
        is_outermost = model.forward_root is self or (is_recomputed and bool(self.is_root))
        args, kwargs = self._cast_inputs(*self._move_inputs(args, kwargs, is_root=is_outermost))
        # Under forward-mode AD backward comes by the tangents as well: it leaves the module when it is over.
        if is_first and torch.is_grad_enabled() and self.groups and not is_transformed():
            args, kwargs = self._register_post_backward(args, kwargs)
        return args, kwargs

    def _enter_forward(self, *, is_first: bool, is_recomputed: bool) -> ModelState:
        """Unshard for a forward of the module, which may be a recomputation in backward."""
        if is_transformed():
            for group in self.groups:
                group.check_not_transformed()
        model = self.lazy_init()
        if self.unset_buffers:
            check_buffers_set(self.unset_buffers)
            self.unset_buffers.clear()
        if is_recomputed:
            model.enter_backward()
        elif model.forward_root is None:
            model.begin_forward(self)
        if not is_recomputed:
            self._running.append(sys.exception())
            if is_first:
                for group in self.groups:
                    group.reshard_if_stale()
        if is_first and len(self.modules) > 1:
            self.modules_to_run = set(self.modules)
        for group in self.groups:
            group.unshard()
        for state in self.forward_prefetch:
            for group in state.groups:
                group.start_unshard()
        return model

    @traced_inside_only
    def post_forward(self, module: nn.Module, args: Args, output: Any) -> Any:
        """The modules' forward hook."""
        unshard = self.traced.unshard_of(module)
        if unshard is not None and unshard.depth:
            unshard.end()
            return self._cast_output(output)
        if is_tracing():
            self.traced.prepare_trace()
            return self.traced.post_forward_outside(module, output)
        return self.post_forward_eager(module, output)

    def post_forward_eager(self, module: nn.Module, output: Any) -> Any:
        """The forward hook outside of graphs."""
        model = self.model
        is_recomputed = current_backward() is not None
        if model is None or (not is_recomputed and self._has_failed(model)):
            return output
        self.modules_to_run.discard(module)
        is_last = not is_recomputed and not self.modules_to_run and not self._running
        if is_last:
            # No backward will reshard the root: an optimizer made now must find sharded parameters.
            frees_all = self.keeps_root_unsharded and not torch.is_grad_enabled()
            output = self._clone_freed(output, frees_all=frees_all)
            with beside_transforms("fully_shard"):
                for group in self.groups:
                    group.reshard_after_forward()
                    if frees_all:
                        group.reshard()
        if torch.is_grad_enabled():
            output = self._register_pre_backward(output)
        if is_last and model.forward_root is self:
            with beside_transforms("fully_shard"):
                model.end_forward()
        return self._cast_output(output)

    def _has_failed(self, model: ModelState) -> bool:
        """Whether the hook runs because of an exception: then the forward is dropped."""
        if not self._running:  # not even begun, or dropped already
            return True
        error, before = sys.exception(), self._running.pop()
        if error is None or error is before:
            return False
        model.drop_forward()
        return True

    def _clone_freed(self, output: Any, *, frees_all: bool) -> Any:
        """The output, cloned where it lies in memory of parameters that is freed now."""
        freed = {ptr for group in self.groups for ptr in group.ptrs_freed_after_forward(frees_all=frees_all)}
        if not freed:
            return output

        def is_freed(tensor: torch.Tensor) -> bool:
            tensor = unwrapped(tensor)
            is_plain = tensor.layout is torch.strided and type(tensor) in (torch.Tensor, nn.Parameter)
            return is_plain and tensor.untyped_storage().data_ptr() in freed

        if not any(is_freed(tensor) for tensor in find_tensors(output)):
            return output
        return map_tensors(lambda tensor: tensor.clone() if is_freed(tensor) else tensor, output)

    def end_forward(self) -> None:
        """The root's forward has ended: close what was left open, or all-gathered for peers."""
        self.traced.close()
        is_partial = bool(self.modules_to_run)
        self.modules_to_run.clear()
        self._running.clear()
        for group in self.groups:
            if is_partial or group.is_unshard_pending:
                group.reshard_after_forward()

    # Backward

    @traced_inside_only
    def _pre_backward_hook(self, _: torch.Tensor) -> None:
        """Backward reaches the module: unshard."""
        with beside_transforms("fully_shard"):
            model = self.lazy_init()
            if model.is_in_backward and not self.backward_prefetch and self._is_unsharded():
                return  # the hook of another output, or of another one of several modules, has run
            model.enter_backward()
            for group in self.groups:
                if group.settings.unshards_in_backward:
                    group.unshard()
            for state in self.backward_prefetch:
                for group in reversed(state.groups):
                    group.start_unshard()

    def post_backward(self) -> None:
        """Backward leaves the module: reduce and reshard."""
        self.lazy_init().enter_backward()
        for group in reversed(self.groups):
            self.post_backward_of(group)

    def post_backward_of(self, group: ParamGroup) -> None:
        """Reshard a group, and reduce its gradients or keep them."""
        # On a smaller mesh it stays until all ranks are done: peers may all-gather from there.
        is_post_forward = group.sharded_state is ShardedState.SHARDED_POST_FORWARD
        if group.settings.reshards_after_backward and not is_post_forward:
            group.reshard()
        if not group.settings.reduces_grads:
            group.accumulate_grads()
        elif group.has_grads:
            group.reduce_grads()

    # Inputs and outputs

    def _move_inputs(self, args: Args, kwargs: Kwargs, *, is_root: bool) -> tuple[Args, Kwargs]:
        """The root's inputs, on the device."""
        if not is_root or self.device.type == "cpu":
            return args, kwargs
        return map_tensors(self._move, args), map_tensors(self._move, kwargs)

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _cast_inputs(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return args, kwargs
        return map_tensors(_caster(dtype), args), map_tensors(_caster(dtype), kwargs)

    def _cast_output(self, output: Any) -> Any:
        dtype = self.policy.output_dtype
        return output if dtype is None else map_tensors(_caster(dtype), output)

    def _register_post_backward(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Pass the inputs through a function whose backward runs when backward has left the module."""
        inputs = {id(tensor): tensor for tensor in find_tensors((args, kwargs)) if tensor.requires_grad}
        if not inputs:
            return args, kwargs
        passed: Any = _PostBackward.apply(self, *inputs.values())  # type: ignore[no-untyped-call]
        # By identity: one tensor given twice stays one, and a container may hide some of them.
        passed_by_id = dict(zip(inputs, passed, strict=True))
        return map_tensors(lambda tensor: passed_by_id.get(id(tensor), tensor), (args, kwargs))

    def _register_pre_backward(self, output: Any) -> Any:
        """Register a hook on the outputs that runs when backward reaches the module."""
        if is_transformed():
            return map_tensors(lambda tensor: told_of_backward(tensor, self._pre_backward_hook), output)
        for tensor in (output,) if type(output) is torch.Tensor else find_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._pre_backward_hook)
                if tensor._base is not None and tensor._base.grad_fn is not None:
                    # A view that is changed in place loses its hooks; what it is a view of doesn't.
                    tensor._base.register_hook(self._pre_backward_hook)
        return output


class _PostBackward(torch.autograd.Function):
    """Passes tensors on; its backward runs once all their gradients are there."""

    @staticmethod
    def forward(ctx: Any, state: ModuleState, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.state = state
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    @traced_inside_only
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.state.post_backward()
        return None, *grads


class ModelState:
    """What the sharded modules below one root share: numbers, orders, the forward or backward under way."""

    def __init__(self, root: ModuleState, states: Sequence[tuple[str, ModuleState]]) -> None:
        self.root = weakref.ref(root)
        self.states = [state for _, state in states]
        self.reduction_queue = ReductionQueue()
        self.uneven_steps = UnevenSteps(self.reduction_queue)
        self.forward_root: ModuleState | None = None
        self.is_in_backward = False
        self._is_traceable = False
        self._end_callback: weakref.ref[Any] | None = None
        self._groups = [group for state in self.states for group in state.groups]
        self._groups_by_order: dict[CollectiveOrder, list[ParamGroup]] = {}  # an order for each set of ranks
        self._assign_names(states)
        _check_no_duplicates(self._groups)
        self._assign_numbers()

    def _assign_names(self, states: Sequence[tuple[str, ModuleState]]) -> None:
        for name, state in states:
            for group in state.groups:
                group.name = name or "root"
        root = self.root()
        assert root is not None
        fqns = {param: fqn for fqn, param in root.modules[0].named_parameters(remove_duplicate=False)}
        for param in self._params():
            param.fqn = fqns.get(param.sharded, param.fqn)

    def _assign_numbers(self) -> None:
        """Number the groups and parameters of each set of ranks in module order."""
        by_ranks: dict[frozenset[int], list[ParamGroup]] = {}
        for group in self._groups:
            by_ranks.setdefault(group.dp_mesh.ranks, []).append(group)
        for groups in by_ranks.values():
            params = [param for group in groups for param in group.params]
            order = CollectiveOrder(groups[0].dp_mesh, groups, len(params), self._finish_plans)
            self._groups_by_order[order] = groups
            for index, group in enumerate(groups):
                group.index, group.order, group.reduction_queue = index, order, self.reduction_queue
            for bit, param in enumerate(params):
                param.bit = bit

    def _params(self) -> Iterator[ShardedParam]:
        return (param for group in self._groups for param in group.params)

    # Phases: of all orders at once

    def _begin_phase(self, *what: Hashable) -> None:
        settings = tuple(group.settings.order_key() for group in self._groups)
        for order in self._groups_by_order:
            order.begin_phase(what, settings)

    def _finish_plans(self) -> None:
        for order in self._groups_by_order:
            order.finish_plan()

    def _end_phase(self, order: CollectiveOrder) -> PhaseStatus:
        """End the phase on the ranks of one order; returns their combined status."""
        groups, in_backward = self._groups_by_order[order], self.is_in_backward
        return order.end_phase(
            PhaseStatus(
                used=functools.reduce(operator.or_, (group.used for group in groups)),
                post_forward=bitmask(
                    group.index
                    for group in groups
                    if group.sharded_state is ShardedState.SHARDED_POST_FORWARD
                ),
                unsharded=bitmask(
                    group.index for group in groups if group.stays_unsharded(in_backward=in_backward)
                ),
            )
        )

    # Forward

    def begin_forward(self, root: ModuleState) -> None:
        """The outermost sharded module's forward begins."""
        if self.is_in_backward and not self._is_backward_alive():
            self.drop_step()  # that backward has failed
        self.forward_root = root
        for group in self._groups:
            group.drop_post_forward()
            group.free_unheld_grads()
        self.uneven_steps.begin_step(root)
        self._begin_phase("forward", self.states.index(root), torch.is_grad_enabled())

    def end_forward(self) -> None:
        """It has ended: on this rank, and when this returns on all."""
        self.uneven_steps.end_forward()
        self._finish_plans()
        for state in self.states:
            state.end_forward()
        for order, groups in self._groups_by_order.items():
            status = self._end_phase(order)
            for group in groups:
                group.settle_post_forward(is_everywhere=bool(status.post_forward >> group.index & 1))
        self.forward_root = None

    def shadow_step(self, root: ModuleState) -> None:
        """Take part in a step of peers, with this rank's shards and no gradients."""
        with self.uneven_steps.shadowed_step(root) as has_backward:
            self._begin_phase("forward", self.states.index(root), has_backward)
            self.end_forward()
            if has_backward:
                self._begin_phase("backward")
                self.is_in_backward = True
                self.end_backward()

    # Backward

    def enter_backward(self) -> None:
        """A backward has reached a sharded module. No effect if it is known."""
        if self.is_in_backward and self._is_backward_alive():
            return
        if self.is_in_backward:
            self.drop_step()  # the one before has failed
        if current_backward() is None:
            raise StateError("fully_shard: a hook of backward ran outside of one.")
        self.is_in_backward = True
        announce_gradients([param.sharded for param in self._params()], unsynced=self)
        self._begin_phase("backward")
        callback = _EndCallback(self.end_backward)
        self._end_callback = weakref.ref(callback)
        on_backward_end(callback)

    def _is_backward_alive(self) -> bool:
        return self._end_callback is not None and self._end_callback() is not None

    def exchange_unsynced(self, kept: list[Any] | None) -> list[Any]:
        """Put other unreduced gradients in place of those so far, which are returned."""
        return [
            param.exchange_unsynced((None, None) if kept is None else kept[place])
            for place, param in enumerate(self._params())
        ]

    def end_backward(self) -> None:
        """Everything is computed: reduce what is left, wait, and deliver the gradients."""
        for state in reversed(self.states):
            for group in reversed(state.groups):
                state.post_backward_of(group)
        self._finish_plans()
        used_anywhere = {order: self._end_phase(order).used for order in self._groups_by_order}
        self.reduction_queue.finish()
        for group in self._groups:
            if group.settings.reshards_after_backward or group.is_unshard_pending:
                group.reshard()  # also what was all-gathered for peers
        for group in self._groups:
            group.deliver_withheld(used_anywhere[group.order])
        for state in self.states:
            state.modules_to_run.clear()  # of a recomputed forward
        self.is_in_backward = False
        # Now an optimizer may step. Said after each backward: torch.compiler.reset() forgets it.
        self._is_traceable = keep_traceable(() if self._is_traceable else self._groups)

    # Failure

    def drop_forward(self) -> None:
        """An exception ends the forward. Gradients of earlier ones stay."""
        self.uneven_steps.end_forward()
        for order in self._groups_by_order:
            order.drop_phases()
        for group in self._groups:
            group.reshard()
        for state in self.states:
            state.end_forward()
        self.forward_root = None

    def drop_step(self) -> None:
        """An exception has ended the step. Gradients that were not delivered are lost."""
        self.uneven_steps.end_forward()
        for order in self._groups_by_order:
            order.drop_phases()
        self.reduction_queue.drop()
        for group in self._groups:
            group.drop_step()
        for state in self.states:
            state.end_forward()
        self.forward_root = None
        self.is_in_backward = False

    def start_over(self) -> None:
        """Ranks have failed at different places: drop the step, and the order of those before."""
        self.drop_step()
        for order in self._groups_by_order:
            order.forget_plans()


class _EndCallback:
    """A callback that only the backward it belongs to holds."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    @traced_inside_only
    def __call__(self) -> None:
        self._callback()


def _init_model_state(root: ModuleState) -> ModelState:
    """Make the state of all sharded modules in this one, which is the first to run."""
    if len(root.modules) != 1:
        raise StateError(
            f"FSDP requires a single root module but got {root.modules}: the first module that runs must "
            "contain all others. Apply fully_shard to that one, too, or run it first."
        )
    found: dict[ModuleState, str] = {}
    for name, module in root.modules[0].named_modules():
        state = find_state(module)
        if state is None:
            continue
        if state is not root and state.model is not None and state not in found:
            raise StateError(
                f"FSDP state has already been lazily initialized for {name}. FSDP requires running forward "
                "through the root module first: module and root would not know of each other."
            )
        found[state] = name if state not in found else f"{found[state]}, {name}"
    model = ModelState(root, [(name, state) for state, name in found.items()])
    for state in found:
        state.model = model
        state.is_root = state is root
    return model


def find_state(module: nn.Module) -> ModuleState | None:
    """The state that fully_shard, or replicate_with_fsdp, has tied to the module."""
    return attached(module, "fully_shard") or attached(module, "replicate_with_fsdp")


def _check_no_duplicates(groups: Sequence[ParamGroup]) -> None:
    owners: dict[object, ParamGroup] = {}
    for group in groups:
        for param in group.params:
            owner = owners.setdefault(param.origin, group)
            if owner is not group:
                raise ConfigError(
                    f"Parameter '{param.fqn}' is shared with a parameter already managed by another FSDP "
                    f"group (that of {owner.name}). For shared/tied parameters, use fully_shard([module_a, "
                    "module_b]) to place them in the same FSDP group."
                )


def check_has_values(group: ParamGroup) -> None:
    """Raise if parameters are still on the meta device."""
    names = [param.fqn for param in group.params if param.local.is_meta]
    if names:
        raise StateError(
            "FSDP parameters should be materialized from meta device before training, but the following "
            f"were still on meta device: {names}. For example, call module.to_empty(device) to materialize "
            "to device and call module.reset_parameters() on each module to initialize values, or load a "
            "state dict."
        )


def _caster(dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return cast


def _resharding_hook(group: ParamGroup) -> Any:
    def reshard(*_: Any, **__: Any) -> None:
        if group.sharded_state is not ShardedState.SHARDED:
            group.register_sharded()

    return reshard


def _preparing_hook(group: ParamGroup) -> Any:
    def prepare(*_: Any, **__: Any) -> None:
        group.prepare()

    return prepare

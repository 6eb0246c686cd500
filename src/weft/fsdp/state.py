"""What fully_shard ties to a module: its groups of parameters, and the hooks that gather and reduce them.

Before a module's forward its parameters become whole; after it they are freed, unless settings say otherwise.
Its outputs tell when backward comes to it: they become whole again. Its inputs tell when backward leaves it:
its gradients are reduced and the parameters freed. What autograd didn't tell is done at the end of backward.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from weft.autograd import (
    current_backward,
    told_of_backward,
    traced_inside_only,
)
from weft.comm.transforms import beside_transforms, is_transformed, unwrapped
from weft.compiler import is_tracing
from weft.errors import StateError
from weft.fsdp.graph_side import GraphSide
from weft.fsdp.group import ParamGroup, Shown
from weft.fsdp.policy import MixedPrecisionPolicy
from weft.fsdp.state_dict import make_copyable
from weft.fsdp.tree import Tree, plant_tree
from weft.fsdp.unset_buffers import UnsetBuffer, check_set
from weft.tensors import find_tensors, map_tensors


class ModuleState:
    """The state of one module, or of several that were given as a list."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParamGroup],
        policy: MixedPrecisionPolicy,
        device: torch.device,
        *,
        keeps_root_whole: bool,
    ) -> None:
        self.modules = tuple(modules)
        self.groups = list(groups)
        self.policy = policy
        self.device = device
        self.keeps_root_whole = keeps_root_whole  # nothing was said about reshard_after_forward
        self.tree: Tree | None = None
        self.is_root: bool | None = None
        self.is_finalized_by_call = False  # a step's backwards end with finalize_backward()
        self.forward_prefetch: list[ModuleState] = []
        self.backward_prefetch: list[ModuleState] = []
        # For each forward under way (a module may call itself): what was being handled when it began.
        self._running: list[BaseException | None] = []
        self._still_to_run: set[nn.Module] = set()  # of several modules, in a forward that has begun
        self._handles: list[Any] = []
        self.unset_buffers: list[UnsetBuffer] = []  # to be set before the first forward
        self.graph = GraphSide(self)

    def install(self) -> None:
        """Hang the hooks on the modules."""
        for module in self.modules:
            self._handles += [
                module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True),
                module.register_forward_hook(self.after_forward, always_call=True),
            ]
        for group in self.groups:
            for owner in {site.module for param in group.params for site in param.sites}:
                self._handles += [
                    owner.register_state_dict_pre_hook(_resharder(group)),
                    owner.register_state_dict_post_hook(make_copyable),
                    owner.register_load_state_dict_pre_hook(_resharder(group)),
                    owner.register_load_state_dict_post_hook(_preparer(group)),
                ]

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def ready(self) -> Tree:
        """The tree, made when first needed."""
        if self.tree is None:
            self.tree = plant_tree(self)
            if self.keeps_root_whole:
                for group in self.groups:
                    group.settings.after_forward = None  # backward would gather it again at once
            for state in self.tree.states:
                state.prepare()
        return self.tree

    def prepare(self) -> None:
        """Before the first use: parameters must have values, and buffers are made."""
        for group in self.groups:
            group.prepare()
            check_has_values(group)
        check_set(self.unset_buffers)

    # Forward

    @traced_inside_only
    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The modules' forward pre-hook."""
        if is_tracing():
            return self._before_traced_forward(module, args, kwargs)
        if self._still_to_run and self._has_nothing_to_do() and current_backward() is None:
            self._running.append(sys.exception())  # another one of several, in a forward that has begun
            return args, kwargs
        return self.before_eager_forward(module, args, kwargs)

    def _before_traced_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.graph.see_trace()
        if self.graph.find_obstacle():  # the graph ends before this
            return self.graph.before_outside(module, args, kwargs)
        if self.is_root and self.device.type != "cpu":
            args, kwargs = map_tensors(self._moved, args), map_tensors(self._moved, kwargs)
        args, kwargs = self._cast_inputs(args, kwargs)
        stay = self.graph.stay_of(module)
        assert stay is not None
        stay.begin()
        return args, kwargs

    def _has_nothing_to_do(self) -> bool:
        """Whether parameters are whole already and inputs go in as they are."""
        is_cast = self.policy.param_dtype is not None and self.policy.cast_forward_inputs
        return not is_cast and not self.forward_prefetch and self._is_whole()

    def _is_whole(self) -> bool:
        return all(group.shown is Shown.WHOLE for group in self.groups)

    def before_eager_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same outside of graphs."""
        is_recomputed = current_backward() is not None
        is_first = not self._still_to_run and not self._running
        with beside_transforms("fully_shard"):
            tree = self._enter_forward(is_first=is_first, is_recomputed=is_recomputed)
        # The outermost one's, also when it runs again in backward, with the inputs it had.
        is_outermost = tree.forward_root is self or (is_recomputed and self.is_root)
        if is_outermost and self.device.type != "cpu":
            args, kwargs = map_tensors(self._moved, args), map_tensors(self._moved, kwargs)
        args, kwargs = self._cast_inputs(args, kwargs)
        # Under forward-mode AD backward comes by the tangents as well: it leaves the module when it is over.
        if is_first and torch.is_grad_enabled() and self.groups and not is_transformed():
            args, kwargs = self._watch_inputs(args, kwargs)
        return args, kwargs

    def _enter_forward(self, *, is_first: bool, is_recomputed: bool) -> Tree:
        """A forward of the module begins: its parameters become whole."""
        if is_transformed():
            for group in self.groups:
                group.check_not_transformed()
        tree = self.ready()
        if self.unset_buffers:
            check_set(self.unset_buffers)
            self.unset_buffers.clear()
        if is_recomputed:
            tree.enter_backward()
        elif tree.forward_root is None:
            tree.begin_forward(self)
        if not is_recomputed:
            self._running.append(sys.exception())
        if is_first and not is_recomputed:
            for group in self.groups:
                group.drop_stale()
        if is_first and len(self.modules) > 1:
            self._still_to_run = set(self.modules)
        for group in self.groups:
            group.need_whole()
        for state in self.forward_prefetch:
            for group in state.groups:
                group.start_whole()
        return tree

    @traced_inside_only
    def after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """The modules' forward hook."""
        stay = self.graph.stay_of(module)
        if stay is not None and stay.depth:
            stay.end()
            return self._cast_output(output)
        if is_tracing():
            self.graph.see_trace()
            return self.graph.after_outside(module, output)
        return self.after_eager_forward(module, output)

    def after_eager_forward(self, module: nn.Module, output: Any) -> Any:
        """The same outside of graphs."""
        tree = self.tree
        is_recomputed = current_backward() is not None
        if tree is None or (not is_recomputed and self._has_failed(tree)):
            return output
        self._still_to_run.discard(module)
        is_last = not is_recomputed and not self._still_to_run and not self._running
        if is_last:
            # No backward will free the root: an optimizer made now must find sharded parameters.
            frees_all = self.keeps_root_whole and not torch.is_grad_enabled()
            output = self._kept_from_freeing(output, frees_all=frees_all)
            with beside_transforms("fully_shard"):
                for group in self.groups:
                    group.reshard_after_forward()
                    if frees_all:
                        group.reshard()
        if torch.is_grad_enabled():
            output = self._watch_outputs(output)
        if is_last and tree.forward_root is self:
            with beside_transforms("fully_shard"):
                tree.end_forward()
        return self._cast_output(output)

    def _has_failed(self, tree: Tree) -> bool:
        """Whether this runs because of an exception: then nothing of the forward goes on."""
        if not self._running:  # not even begun, or given up already
            return True
        error, before = sys.exception(), self._running.pop()
        if error is None or error is before:
            return False
        tree.abandon_forward()
        return True

    def _kept_from_freeing(self, output: Any, *, frees_all: bool) -> Any:
        """The output, copied where it lies in the memory of parameters that are freed now."""
        freed = {
            address for group in self.groups for address in group.freed_after_forward(frees_all=frees_all)
        }
        if not freed:
            return output

        def lies_there(tensor: torch.Tensor) -> bool:
            tensor = unwrapped(tensor)
            is_plain = tensor.layout is torch.strided and type(tensor) in (torch.Tensor, nn.Parameter)
            return is_plain and tensor.untyped_storage().data_ptr() in freed

        if not any(lies_there(tensor) for tensor in find_tensors(output)):
            return output
        return map_tensors(lambda tensor: tensor.clone() if lies_there(tensor) else tensor, output)

    def end_forward(self) -> None:
        """The root's forward has ended: what was left open, or gathered for others, is closed."""
        self.graph.close()
        is_partial = bool(self._still_to_run)
        self._still_to_run.clear()
        self._running.clear()
        for group in self.groups:
            if is_partial or group.is_unused_ahead:
                group.reshard_after_forward()

    # Backward

    def before_backward(self) -> None:
        """Backward comes to the module."""
        tree = self.ready()
        if tree.is_in_backward and not self.backward_prefetch and self._is_whole():
            return  # another of its outputs, or another one of several modules, has told
        tree.enter_backward()
        for group in self.groups:
            if group.settings.gathers_in_backward:
                group.need_whole()
        for state in self.backward_prefetch:
            for group in reversed(state.groups):
                group.start_whole()

    def after_backward(self) -> None:
        """Backward leaves the module."""
        self.ready().enter_backward()
        for group in reversed(self.groups):
            self.after_backward_of(group)

    def after_backward_of(self, group: ParamGroup) -> None:
        """Reduce what has come, if it is to be reduced now, and free the parameters."""
        # On a smaller mesh it stays until all ranks are done: others may gather from there.
        if group.settings.reshards_after_backward and group.shown is not Shown.SMALL:
            group.reshard()
        if not group.settings.reduces:
            group.accumulate()
        elif group.has_gradients:
            if group.is_alone:
                group.launch_reduce()
            else:
                group.conductor.reduce(group.index)

    def end_backward(self) -> None:
        """The backward is over."""
        self._still_to_run.clear()

    # Inputs and outputs

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _cast_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return args, kwargs
        return map_tensors(_caster(dtype), args), map_tensors(_caster(dtype), kwargs)

    def _cast_output(self, output: Any) -> Any:
        dtype = self.policy.output_dtype
        return output if dtype is None else map_tensors(_caster(dtype), output)

    def _watch_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let the inputs tell when backward has come through the module."""
        watched = {id(tensor): tensor for tensor in find_tensors((args, kwargs)) if tensor.requires_grad}
        if not watched:
            return args, kwargs
        passed: Any = _Leaving.apply(self, *watched.values())  # type: ignore[no-untyped-call]
        # By identity: one tensor given twice stays one, and a container may hide some of them.
        passed_by_id = dict(zip(watched, passed, strict=True))
        return map_tensors(lambda tensor: passed_by_id.get(id(tensor), tensor), (args, kwargs))

    @traced_inside_only
    def _entering(self, _: torch.Tensor) -> None:
        with beside_transforms("fully_shard"):
            self.before_backward()

    def _watch_outputs(self, output: Any) -> Any:
        """Let the outputs tell when backward comes to the module."""
        if is_transformed():
            return map_tensors(lambda tensor: told_of_backward(tensor, self._entering), output)
        for tensor in (output,) if type(output) is torch.Tensor else find_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._entering)
                if tensor._base is not None and tensor._base.grad_fn is not None:
                    # A view that is changed in place loses its hooks; what it is a view of doesn't.
                    tensor._base.register_hook(self._entering)
        return output


class _Leaving(torch.autograd.Function):
    """Passes tensors on; in backward it runs when all their gradients are there."""

    @staticmethod
    def forward(ctx: Any, state: ModuleState, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.state = state
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    @traced_inside_only
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.state.after_backward()
        return None, *grads


def check_has_values(group: ParamGroup) -> None:
    """Raise if parameters are still on the meta device."""
    names = [param.name for param in group.params if param.local.is_meta]
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


def _resharder(group: ParamGroup) -> Any:
    def reshard(*_: Any, **__: Any) -> None:
        if group.shown is not Shown.SHARDED:
            group.show_sharded()

    return reshard


def _preparer(group: ParamGroup) -> Any:
    def prepare(*_: Any, **__: Any) -> None:
        group.prepare()

    return prepare

"""One rank's copy of a module: what happens around its forward, eager and compiled.

`weft.DistributedDataParallel` wraps a module and makes one, `weft.replicate` attaches one; both do the
same. What happens in backward is reducer.py's work.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from weft import comm
from weft.autograd import (
    current_backward,
    told_of_backward,
    unseen_by_autograd,
)
from weft.comm.simulated import check_one_rank
from weft.comm.transforms import beside_transforms, is_transformed
from weft.comm_hooks.bucket import GradHook
from weft.comm_hooks.hook_check import check_hook
from weft.comm_hooks.mean import FEATURE
from weft.compiler import at_trace, is_backward_traced, is_tracing
from weft.data_parallel.arrivals import defer_torch_optimizers
from weft.data_parallel.buffers import BufferHook, broadcast_tensors
from weft.data_parallel.compile import CompiledReducer
from weft.data_parallel.join import announce_step
from weft.data_parallel.options import ReplicaOptions, check_same_model
from weft.data_parallel.parameters import check_dtensor_ranks, find_module_tensors
from weft.data_parallel.reducer import Reducer
from weft.errors import InternalError, StateError, UnfitError
from weft.join import Join, Joinable
from weft.modules import check_outside_wrapper
from weft.tensors import find_tensors, map_tensors


class Replica:
    """A module, its reducer, and what keeps its buffers alike."""

    def __init__(self, module: nn.Module, owner: Joinable, options: ReplicaOptions) -> None:
        if options.group.size() > 1:
            check_one_rank("data parallel")
        self._owner = weakref.ref(owner)  # which holds this, and shall go with its last user
        self.options = options
        self.group = options.group
        self.tensors = find_module_tensors(module, options.ignored_names, options.delayed_names)
        ddp_params = self.tensors.ddp_params
        if not ddp_params:
            raise UnfitError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter that "
                "requires a gradient."
            )
        check_dtensor_ranks(self.tensors.named_params(), self.group)
        self.device = ddp_params[0].spec.device
        if options.init_sync:
            check_same_model([ddp_param.spec for ddp_param in ddp_params], self.group)
            self.broadcast_state(0, with_buffers=options.init_sync_buffers)
        self.reducer = Reducer(
            ddp_params,
            self.group,
            options.caps,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            find_unused_parameters=options.find_unused_parameters,
        )
        self.reducer.static_graph = options.static_graph
        self.reducer.on_unused = self.tensors.check_params_kept
        sync_buffers = options.forward_sync_buffers
        self.compiled = CompiledReducer(self.reducer, self.tensors, forward_sync_buffers=sync_buffers)
        self.wants_sync = True  # whether the next forward's gradients are reduced
        self._module = weakref.ref(module)  # which holds this
        self.buffer_hook: BufferHook | None = None
        self.error = ""  # the last that the user was told
        self.hook_name = ""  # where it isn't the hook's own

    @property
    def owner(self) -> Joinable:
        """The DDP module, or the replicated one."""
        owner = self._owner()
        if owner is None:
            raise InternalError("a replica was used after its module")
        return owner

    def broadcast_state(self, src: int, *, with_buffers: bool) -> None:
        """Broadcast the parameters, and the buffers, of one rank of the group."""
        if self.group.size() > 1:
            buffers = self.tensors.buffers() if with_buffers else []
            tensors, limit_bytes = [*self.tensors.params(), *buffers], self.options.broadcast_bytes
            broadcast_tensors(tensors, src, self.group, "initial state", limit_bytes)

    # Around forward

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Check the module, sync its buffers, and return the inputs on its device."""
        if not is_tracing():
            return self._before_eager_forward(args, kwargs)
        # Join's and a buffer hook's collectives are made outside of graphs.
        if self.owner._join_config.enable or self.buffer_hook is not None:
            eager: Any = torch.compiler.disable(self._before_eager_forward)
            return eager(args, kwargs)
        self._before_traced_forward()
        return self._move_inputs(args, kwargs)

    def _before_eager_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self.reducer.forward_state.in_traced_forward = False  # a forward before this one may have failed
        # A forward within a backward recomputes activations: ranks agreed on everything the first time.
        if current_backward() is None:
            with beside_transforms("data parallel"):
                check_outside_wrapper(self.compiled.params)
                self.tensors.check_frozen()
                self.tensors.check_tied_params_kept()
                self.reducer.check_last_backward()
                defer_torch_optimizers(self.compiled.params)
                self.reducer.times.mark("forward_start")
                self._sync_before_forward()
        return self._move_inputs(args, kwargs)

    def _move_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if self.options.device is not None and self.options.device.type != "cpu":
            move = functools.partial(torch.Tensor.to, device=self.options.device, non_blocking=True)
            return map_tensors(move, args), map_tensors(move, kwargs)
        return args, kwargs

    def _sync_before_forward(self) -> None:
        """Announce the step to joined ranks, and sync the buffers."""
        if not torch.is_grad_enabled() and self.owner._join_config.enable:
            return  # an evaluation within the loop: the ranks that have joined don't see it
        Join.notify_join_context(self.owner)
        watch = self.owner._join_config.watch
        if watch is not None:
            watch.forwards.add(id(self.owner))
        num_active = Join.num_active(self.owner)
        self.reducer.has_even_inputs = num_active is None
        hook = self.buffer_hook
        source = 0
        if num_active is not None:
            source = announce_step(self, num_active)
        else:
            self.reducer.find_divisor = self.group.size
            if hook is not None:
                hook.wait()
        if self.will_sync_buffers() and (hook is None or not hook.is_after_forward):
            self.sync_buffers(source)

    def will_sync_buffers(self) -> bool:
        """Whether the next forward starts with a broadcast of the buffers."""
        has_any = self.options.forward_sync_buffers and bool(self.tensors.buffer_slots)
        return has_any and self.reducer.forward_state.last_forward_synced

    def sync_buffers(self, src: int) -> None:
        """Broadcast the buffers of one rank of the group, or call the user's hook."""
        if self.buffer_hook is not None:
            module = self._module()
            assert module is not None
            self.buffer_hook.run(module, self.options.ignored_names)
            if not self.reducer.has_hooks or not torch.is_grad_enabled() or is_backward_traced():
                self.buffer_hook.wait()  # no backward's end will
        else:
            self.broadcast_buffers(self.tensors.buffers(), src)

    def broadcast_buffers(self, buffers: Sequence[torch.Tensor], src: int) -> None:
        """Broadcast these buffers from one rank of the group."""
        if self.group.size() == 1:
            return
        # A graph whose backward is to come may hold a buffer. What it needs of it the module has written
        # itself, without telling autograd, as BatchNorm does with its statistics.
        with unseen_by_autograd(buffers):
            broadcast_tensors(buffers, src, self.group, "buffers", self.options.broadcast_bytes)

    def after_forward(self, output: Any) -> Any:
        """Hook the output, whose gradient is the first sign of backward."""
        if not is_tracing():
            return self._after_eager_forward(output)
        if self.owner._join_config.enable or self.buffer_hook is not None:
            eager: Any = torch.compiler.disable(self._after_eager_forward)
            return eager(output)
        self._after_traced_forward()
        return output

    def _after_eager_forward(self, output: Any) -> Any:
        if self.reducer.forward_state.in_traced_forward:
            self.compiled.note_graph_break()
        watch = self.owner._join_config.watch
        if watch is not None:
            watch.forwards.discard(id(self.owner))
        hook = self.buffer_hook
        is_recomputed = current_backward() is not None
        if hook is not None and hook.is_after_forward and not is_recomputed and self.will_sync_buffers():
            with beside_transforms("data parallel"):
                self.sync_buffers(0)
        if not torch.is_grad_enabled():
            if current_backward() is None and not self.owner._join_config.enable:
                self.reducer.forward_state.last_forward_synced = False
            return output
        self.reducer.forward_state.last_forward_synced = self.wants_sync
        self.reducer.expect_backward(is_synced=self.wants_sync)
        if self.reducer.has_hooks and is_backward_traced():
            self.compiled.listen()
        if self.reducer.has_hooks:
            begin = functools.partial(self.reducer.begin_from_output, self.wants_sync, hook)
            if is_transformed():
                return map_tensors(lambda tensor: told_of_backward(tensor, begin), output)
            for tensor in find_tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(begin)
        return output

    # In a compiled forward: only what Dynamo can trace, on plain attributes

    def _before_traced_forward(self) -> None:
        compiled, state = self.compiled, self.reducer.forward_state
        at_trace(compiled.note_before)
        if state.last_forward_synced and compiled.forward_sync_buffers:
            self._sync_traced_buffers()
        if compiled.has_nothing_to_reduce or compiled.has_graph_break or not torch.is_grad_enabled():
            return
        if compiled.wire != "" and self.wants_sync and not state.has_unsynced:
            at_trace(compiled.note_marked)
            state.in_traced_forward = True

    def _sync_traced_buffers(self) -> None:
        if self.group.size() == 1:
            return
        first = self.compiled.first_rank
        for module, name in self.tensors.buffer_slots:
            buffer = module._buffers[name]
            if buffer is not None:
                comm.broadcast(buffer, first, self.group, feature=FEATURE, label="buffers").wait()

    def _after_traced_forward(self) -> None:
        compiled, state = self.compiled, self.reducer.forward_state
        if state.in_traced_forward:
            at_trace(compiled.note_after)
            state.in_traced_forward = False
            if compiled.has_graph_break:
                state.has_uncompiled_grads = True
        if not torch.is_grad_enabled():
            state.last_forward_synced = False
        elif not compiled.has_nothing_to_reduce:
            state.last_forward_synced = state.is_synced = self.wants_sync
            state.is_backward_pending = state.is_traced = True

    # Options that change

    def prepare_for_backward(self, tensors: Collection[torch.Tensor]) -> None:
        """Reduce in the next backward through the module's outputs, even if forward ran under no_sync."""
        state = self.reducer.forward_state
        if state.is_backward_pending and state.is_traced:
            raise StateError(
                "prepare_for_backward: the forward was compiled, and its backward reduces or not as it was "
                "told then. Run the forward that is to be reduced outside of no_sync()."
            )
        state.is_sync_forced = True

    def register_hook(self, state: Any, hook: GradHook) -> None:
        """Reduce gradients with this hook from now on."""
        check_hook(hook)
        if self.reducer.hook is not None:
            raise StateError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. To use several "
                "hooks, compose them with weft.comm_hooks.chain."
            )
        self.reducer.set_hook(hook, state)
        self.compiled.refresh()

    def change_group(self, group: ProcessGroup) -> None:
        """Go on with another group."""
        check_dtensor_ranks(self.tensors.named_params(), group)
        self.group = group
        self.reducer.change_group(group)
        self.compiled.refresh()

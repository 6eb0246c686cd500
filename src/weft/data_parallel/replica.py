"""A module that every rank has a copy of: what happens around its forward.

`weft.DistributedDataParallel` wraps a module in one, `weft.replicate` attaches one; both
do the same. The reducer does what happens in backward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from weft import comm
from weft.autograd import (
    current_backward,
    told_of_backward,
    traced_inside_only,
    unseen_by_autograd,
)
from weft.comm.simulated import check_one_rank
from weft.comm.transforms import beside_transforms, is_transformed
from weft.comm_hooks.bucket import GradHook
from weft.comm_hooks.hook_check import check_hook
from weft.comm_hooks.mean import FEATURE
from weft.compiler import at_trace, is_backward_traced, is_tracing
from weft.data_parallel.agreement import (
    BROADCAST_BYTES,
    broadcast_tensors,
    check_same_model,
    find_last,
)
from weft.data_parallel.buffer_hook import BufferHook
from weft.data_parallel.graph_side import GraphSide
from weft.data_parallel.members import check_apart
from weft.data_parallel.module_parts import find_parts
from weft.data_parallel.plan import BucketCaps
from weft.data_parallel.reducer import Reducer
from weft.data_parallel.torch_optimizers import defer_torch_optimizers
from weft.errors import InternalError, StateError, UnfitError
from weft.join import Join, Joinable
from weft.modules import check_outside_wrapper
from weft.tensors import find_tensors, map_tensors

# What ranks with inputs tell those without.
_REDUCES, _SYNCS_BUFFERS = 1, 2


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """How a module is replicated. Names of parameters are those in the module."""

    group: ProcessGroup
    caps: BucketCaps = field(default_factory=BucketCaps)
    ignored_names: Collection[str] = ()
    delayed_names: Collection[str] = ()
    syncs_at_start: bool = True
    syncs_buffers_at_start: bool = True
    syncs_buffers: bool = True
    looks_for_unused: bool = False
    keeps_buffers: bool = False
    is_static: bool = False
    device: torch.device | None = None  # where inputs are moved to
    broadcast_bytes: int = BROADCAST_BYTES  # in a message of parameters or buffers


class Replica:
    """One rank's copy of a module and its ties to the others."""

    def __init__(self, module: nn.Module, owner: Joinable, options: ReplicaOptions) -> None:
        if options.group.size() > 1:
            check_one_rank("data parallel")
        self._owner = weakref.ref(owner)  # which holds this, and shall go with its last user
        self.options = options
        self.group = options.group
        self.parts = find_parts(module, options.ignored_names, options.delayed_names)
        members = self.parts.members
        if not members:
            raise UnfitError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter that "
                "requires a gradient."
            )
        check_apart(self.parts.named(), self.group)
        self.device = members[0].spec.device
        if options.syncs_at_start:
            check_same_model([member.spec for member in members], self.group)
            self.broadcast_state(0, with_buffers=options.syncs_buffers_at_start)
        self.reducer = Reducer(
            members,
            self.group,
            options.caps,
            keeps_buffers=options.keeps_buffers,
            looks_for_unused=options.looks_for_unused,
        )
        self.reducer.is_static = options.is_static
        self.reducer.on_unused = self.parts.check_in_place
        self.graph = GraphSide(self.reducer, self.parts, syncs_buffers=options.syncs_buffers)
        self.wants_sync = True  # the user's wish for the next forward
        self._module = weakref.ref(module)
        self.buffer_hook: BufferHook | None = None
        self.error = ""
        self.hook_name = ""  # where it isn't the hook's own

    @property
    def owner(self) -> Joinable:
        """What the user sees of it: the DDP module, or the replicated one."""
        owner = self._owner()
        if owner is None:
            raise InternalError("a replica was used after its module")
        return owner

    def broadcast_state(self, src: int, *, with_buffers: bool) -> None:
        """Give every rank the parameters, and the buffers, of one."""
        if self.group.size() > 1:
            buffers = self.parts.buffers() if with_buffers else []
            states, limit_bytes = [*self.parts.states(), *buffers], self.options.broadcast_bytes
            broadcast_tensors(states, src, self.group, "initial state", limit_bytes)

    # Around forward

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """What must be done before the module runs; the inputs, on its device."""
        if not is_tracing():
            return self._before_eager_forward(args, kwargs)
        # Uneven inputs are told to other ranks outside of graphs, and there a hook of buffers runs.
        if self.owner._join_config.enable or self.buffer_hook is not None:
            eager: Any = torch.compiler.disable(self._before_eager_forward)
            return eager(args, kwargs)
        self._before_traced_forward()
        return self._moved(args, kwargs)

    def _before_eager_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self.reducer.expected.is_inside = False  # a forward before this one may have failed
        # A forward within a backward recomputes activations: ranks agreed on everything the first time.
        if current_backward() is None:
            with beside_transforms("data parallel"):
                check_outside_wrapper(self.graph.params)
                self.parts.check_frozen()
                self.parts.check_tied()
                self.reducer.check_whole()
                defer_torch_optimizers(self.graph.params)
                self.reducer.times.forward_begins()
                self._keep_in_step()
        return self._moved(args, kwargs)

    def _moved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if self.options.device is not None and self.options.device.type != "cpu":
            move = functools.partial(torch.Tensor.to, device=self.options.device, non_blocking=True)
            return map_tensors(move, args), map_tensors(move, kwargs)
        return args, kwargs

    def _keep_in_step(self) -> None:
        """Tell joined ranks that this one goes on, and take the buffers of one rank for all."""
        if not torch.is_grad_enabled() and self.owner._join_config.enable:
            return  # an evaluation within the loop: the ranks that have joined don't see it
        Join.notify_join_context(self.owner)
        num_active = Join.num_active(self.owner)
        self.reducer.is_even = num_active is None
        hook = self.buffer_hook
        if num_active is None:
            self.reducer.find_divisor = self.group.size
            if hook is not None:
                hook.wait()
            if self.will_sync_buffers() and (hook is None or not hook.is_after_forward):
                self.sync_buffers(0)
            return
        if hook is not None:
            raise StateError(
                "Join can't stand in for ranks without inputs in a hook of buffers. Leave the hook out, or "
                "sync buffers yourself after the loop."
            )
        is_whole = getattr(self.owner, "_divide_by_initial_world_size", True)
        self.reducer.find_divisor = self.group.size if is_whole else lambda: num_active
        source = 0
        if num_active < self.group.size():  # tell those that have joined what comes
            note = _REDUCES * self.wants_sync + _SYNCS_BUFFERS * self.will_sync_buffers()
            source, _ = find_last(True, self.group, self.device, note)
        if self.will_sync_buffers():
            self.sync_buffers(source)

    def will_sync_buffers(self) -> bool:
        """Whether the next forward starts with one rank's buffers for all."""
        has_any = self.options.syncs_buffers and bool(self.parts.buffer_slots)
        return has_any and self.reducer.expected.was_synced

    def sync_buffers(self, src: int) -> None:
        """Take the buffers of one rank of the group for all, or what the user's hook makes of them."""
        if self.buffer_hook is not None:
            module = self._module()
            assert module is not None
            self.buffer_hook.run(module, self.options.ignored_names)
            if not self.reducer.is_listening or not torch.is_grad_enabled() or is_backward_traced():
                self.buffer_hook.wait()  # no backward will tell of its end
        else:
            self.broadcast_buffers(self.parts.buffers(), src)

    def broadcast_buffers(self, buffers: Sequence[torch.Tensor], src: int) -> None:
        """Take one rank's values of buffers for all."""
        if self.group.size() == 1:
            return
        # A graph that is still to be run backward may hold a buffer. What it needs of it is what the
        # module wrote there itself, without telling autograd, as BatchNorm does with its statistics.
        with unseen_by_autograd(buffers):
            broadcast_tensors(buffers, src, self.group, "buffers", self.options.broadcast_bytes)

    def after_forward(self, output: Any) -> Any:
        """Listen for the backward of this output."""
        if not is_tracing():
            return self._after_eager_forward(output)
        if self.owner._join_config.enable or self.buffer_hook is not None:
            eager: Any = torch.compiler.disable(self._after_eager_forward)
            return eager(output)
        self._after_traced_forward()
        return output

    def _after_eager_forward(self, output: Any) -> Any:
        if self.reducer.expected.is_inside:
            self.graph.break_off()
        hook = self.buffer_hook
        is_recomputed = current_backward() is not None
        if hook is not None and hook.is_after_forward and not is_recomputed and self.will_sync_buffers():
            with beside_transforms("data parallel"):
                self.sync_buffers(0)
        if not torch.is_grad_enabled():
            if current_backward() is None and not self.owner._join_config.enable:
                self.reducer.expected.was_synced = False
            return output
        self.reducer.expected.was_synced = self.wants_sync
        self.reducer.expect(is_synced=self.wants_sync)
        if self.reducer.is_listening and is_backward_traced():
            self.graph.listen()
        if self.reducer.is_listening:
            begin = functools.partial(_begin, self.reducer, self.wants_sync, hook)
            if is_transformed():
                return map_tensors(lambda tensor: told_of_backward(tensor, begin), output)
            for tensor in find_tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(begin)
        return output

    # In a graph: only what can be traced, on plain attributes

    def _before_traced_forward(self) -> None:
        graph, expected = self.graph, self.reducer.expected
        at_trace(graph.note_before)
        if expected.was_synced and graph.syncs_buffers:
            self._sync_traced_buffers()
        if graph.is_idle or graph.is_broken or not torch.is_grad_enabled():
            return
        if graph.wire != "" and self.wants_sync and not expected.has_unsynced:
            at_trace(graph.note_marked)
            expected.is_inside = True

    def _sync_traced_buffers(self) -> None:
        if self.group.size() == 1:
            return
        first = self.graph.first_rank
        for module, name in self.parts.buffer_slots:
            buffer = module._buffers[name]
            if buffer is not None:
                comm.broadcast(buffer, first, self.group, feature=FEATURE, label="buffers").wait()

    def _after_traced_forward(self) -> None:
        graph, expected = self.graph, self.reducer.expected
        if expected.is_inside:
            at_trace(graph.note_after)
            expected.is_inside = False
            if graph.is_broken:
                expected.has_left = True
        if not torch.is_grad_enabled():
            expected.was_synced = False
        elif not graph.is_idle:
            expected.was_synced = expected.is_synced = self.wants_sync
            expected.is_open = expected.is_traced = True

    # Options that change

    def prepare_for_backward(self, tensors: Collection[torch.Tensor]) -> None:
        """Reduce in the next backward through the module's outputs, also where forward ran under no_sync."""
        expected = self.reducer.expected
        if expected.is_open and expected.is_traced:
            raise StateError(
                "prepare_for_backward: the forward was compiled, and its backward reduces or not as it was "
                "told then. Run the forward that is to be reduced outside of no_sync()."
            )
        expected.is_asked_for = True

    def register_hook(self, state: Any, hook: GradHook) -> None:
        """Reduce gradients with this hook from now on."""
        check_hook(hook)
        if self.reducer.hook is not None:
            raise StateError(
                "register_comm_hook or register_builtin_comm_hook can only be called once. To use several "
                "hooks, compose them with weft.comm_hooks.chain."
            )
        self.reducer.set_hook(hook, state)
        self.graph.refresh()

    def change_group(self, group: ProcessGroup) -> None:
        """Go on with other ranks."""
        check_apart(self.parts.named(), group)
        self.group = group
        self.reducer.change_group(group)
        self.graph.refresh()

    # Uneven inputs

    def shadow_step(self) -> None:
        """Take part in a step of the ranks that still have inputs."""
        self.reducer.is_even = False
        source, note = find_last(False, self.group, self.device)
        if note & _SYNCS_BUFFERS:
            self.sync_buffers(source)
        self.reducer.expected.was_synced = bool(note & _REDUCES)
        if note & _REDUCES:
            self.reducer.shadow()

    def take_final_state(self, is_last_joiner: bool) -> None:
        """End with the same parameters and buffers on all ranks: those of one that trained to the end."""
        source, _ = find_last(is_last_joiner, self.group, self.device)
        self.broadcast_state(source, with_buffers=self.options.syncs_buffers)


@traced_inside_only
def _begin(reducer: Reducer, is_synced: bool, hook: BufferHook | None, _: torch.Tensor) -> None:
    if is_tracing():  # compiled autograd: gradients are reduced where they are made
        return
    expected = reducer.expected
    is_asked_for, expected.is_asked_for = expected.is_asked_for, False
    with beside_transforms("data parallel"):
        reducer.begin(is_synced=is_synced or is_asked_for)
        if hook is not None:
            hook.wait_at_backward_end()

"""`DistributedDataParallel`: torch's interface of a module that every rank has a copy of.

What it does happens in replica.py (around forward) and reducer.py (in backward).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.group import resolve_group
from weft.comm_hooks.bucket import GradHook
from weft.compiler import is_tracing
from weft.data_parallel.bucket_plan import resolve_caps
from weft.data_parallel.buffers import BufferCommHook, BufferCommHookLocation, BufferHook
from weft.data_parallel.join import ReplicaJoinHook
from weft.data_parallel.logging import describe
from weft.data_parallel.mixed_precision import MixedPrecision, cast_floating, install_mixed_precision
from weft.data_parallel.options import (
    ReplicaOptions,
    resolve_buffer_sync,
    resolve_delayed,
    resolve_device_ids,
    resolve_process_group,
)
from weft.data_parallel.replica import Replica
from weft.errors import ConfigError, StateError, WeftError
from weft.join import Join, Joinable, JoinHook
from weft.modules import Prepared, check_unheld, known_as_wrapper, watch_wrappers
from weft.tensors import map_tensors
from weft.torch_private import check_torch

# Attributes of this process, which copies and pickles are made without.
_NOT_COPIED = ("_own_replica", "_cast_parameters", "process_group", "device_mesh", "_join_config")


@known_as_wrapper
class DistributedDataParallel(Prepared, nn.Module, Joinable, calls_by_feature=True):
    """Train copies of a module on every rank of a group; gradients are averaged during backward.

    The arguments are torch's. Unused parameters need no flag: one that some rank used gets the
    mean over all ranks, one that none used keeps its gradient. `find_unused_parameters=True` lets
    buckets with unused parameters go before backward ends, at the price of a look at the graph.
    `check_reduction`, `batched_grad_copy` and `skip_all_reduce_unused_params` are accepted: weft always
    checks and always copies in batches. Parameters of `delay_all_reduce_named_params` go last.

    Raises on every rank, with the first difference, if ranks bring different parameters.
    """

    _weft_wrapper: ClassVar[str] = "DistributedDataParallel"  # holds the module inside
    _active_ddp_module: ClassVar[DistributedDataParallel | None] = None

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, torch.Tensor]] | None = None,
        param_to_hook_all_reduce: torch.Tensor | None = None,
        mixed_precision: MixedPrecision | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        check_torch()
        super().__init__()
        Joinable.__init__(self)
        group = resolve_process_group(process_group, device_mesh)
        delayed = resolve_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
        self.device_ids, self.output_device = resolve_device_ids(module, device_ids, output_device)
        at_start, self.forward_sync_buffers = resolve_buffer_sync(broadcast_buffers, forward_sync_buffers)
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        self.device_mesh = device_mesh
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        check_unheld(module, self.parameters_to_ignore)
        self.module = module
        options = ReplicaOptions(
            group=group,
            caps=resolve_caps(bucket_cap_mb, bucket_cap_mb_list),
            ignored_names=self.parameters_to_ignore,
            delayed_names=delayed,
            init_sync=init_sync,
            init_sync_buffers=at_start,
            forward_sync_buffers=self.forward_sync_buffers,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            device=None if self.device_ids is None else next(module.parameters()).device,
        )
        self._attach(options)

    def _attach(self, options: ReplicaOptions) -> None:
        """Make the replica, together with the other ranks."""
        watch_wrappers()
        # Not an attribute that nn.Module would look into: the replica points back here.
        vars(self)["_own_replica"] = Replica(self.module, self, options)
        self.process_group = options.group
        self._divide_by_initial_world_size = True
        if self.mixed_precision is not None:
            replica = self._replica
            vars(self)["_cast_parameters"] = install_mixed_precision(
                self.module, self.mixed_precision, options.ignored_names, replica.reducer
            )

    @property
    def _replica(self) -> Replica:
        # Under another name than its own: Dynamo would look the property up again.
        return cast("Replica", self.__dict__["_own_replica"])

    # Forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; its backward reduces the gradients unless `no_sync` is on."""
        args, kwargs = self._replica.before_forward(inputs, kwargs)
        if self.mixed_precision is None:
            running: AbstractContextManager[None] = nullcontext()
        else:
            cast = functools.partial(cast_floating, dtype=self.mixed_precision.param_dtype)
            args, kwargs = map_tensors(cast, (args, kwargs))
            running = vars(self)["_cast_parameters"].running()
        with nullcontext() if is_tracing() else self._inside_forward(), running:
            output = self.module(*args, **kwargs)
        return self._replica.after_forward(output)

    @contextmanager
    def _inside_forward(self) -> Generator[None]:
        DistributedDataParallel._active_ddp_module = self
        try:
            yield
        finally:
            DistributedDataParallel._active_ddp_module = None

    @contextmanager
    def no_sync(self, enabled: bool = True) -> Generator[None]:
        """Keep gradients local for forwards made within, and add them up for the next reduction.

        With `enabled=False` it changes nothing, so that a loop can say when: `no_sync(step % 4 != 3)`.
        """
        before = self.require_backward_grad_sync
        if enabled:
            self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next forward's gradients are reduced."""
        return self._replica.wants_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        self._replica.wants_sync = wanted

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next forward may find buffers that differ between ranks."""
        return self._replica.reducer.forward_state.last_forward_synced

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, wanted: bool) -> None:
        self._replica.reducer.forward_state.last_forward_synced = wanted

    @property
    def reducer(self) -> Replica:
        """Where torch's pipelines and Accelerate find `prepare_for_backward`, which forces a reduction."""
        return self._replica

    @property
    def broadcast_buffers(self) -> bool:
        """Whether each forward starts with a broadcast of the buffers."""
        return self.forward_sync_buffers

    @property
    def static_graph(self) -> bool:
        """Whether the user promised that every step has the same graph."""
        return self._replica.reducer.static_graph

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """The caps of the first buckets, as in bucket_cap_mb_list."""
        return list(self._replica.options.caps.each_bytes)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._replica.device

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward starts with a broadcast of the buffers."""
        return self._replica.will_sync_buffers()

    # Hooks

    def register_comm_hook(self, state: Any, hook: GradHook) -> None:
        """Reduce each bucket with `hook(state, bucket)`, which returns a Future of the reduced buffer."""
        try:
            self._replica.register_hook(state, hook)
        except WeftError as error:
            self._replica.error = str(error)
            raise

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """torch's C++ hooks: ours are those of weft.comm_hooks."""
        from weft.comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

        hooks = {"ALLREDUCE": allreduce_hook, "FP16_COMPRESS": fp16_compress_hook}
        self.register_comm_hook(self.process_group, hooks[comm_hook_type.name])
        self._replica.hook_name = str(comm_hook_type)

    def _register_buffer_comm_hook(
        self, state: Any, hook: BufferCommHook, comm_hook_location: Any = BufferCommHookLocation.POST_FORWARD
    ) -> None:
        """Call `hook(state, buffers by name)` before or after each forward, in place of a broadcast.

        Futures that it returns are waited for at the end of backward.
        """
        self._replica.buffer_hook = BufferHook(state, hook, comm_hook_location)

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Broadcast these buffers, all by default, from one rank of the group."""
        replica = self._replica
        before = self.broadcast_bucket_size
        self.broadcast_bucket_size = before if bucket_size is None else bucket_size
        try:
            replica.broadcast_buffers(replica.tensors.buffers() if bufs is None else bufs, authoritative_rank)
        finally:
            self.broadcast_bucket_size = before

    @property
    def broadcast_bucket_size(self) -> int:
        """Bytes of parameters or buffers in one broadcast, at most. May be set."""
        return self._replica.options.broadcast_bytes

    @broadcast_bucket_size.setter
    def broadcast_bucket_size(self, num_bytes: int) -> None:
        if num_bytes <= 0:
            raise ConfigError(f"broadcast_bucket_size is a number of bytes above 0, got {num_bytes}.")
        self._replica.options = dataclasses.replace(self._replica.options, broadcast_bytes=num_bytes)

    # Uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may have different numbers of inputs."""
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook by which joined ranks shadow this module."""
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return ReplicaJoinHook(self._replica)

    @property
    def join_device(self) -> torch.device:
        """The device of Join's own collectives."""
        return self._replica.device

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group whose ranks join."""
        return self.process_group

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        # A copy in the same group, whose collectives need the other ranks' copies.
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        nn.Module.__init__(new)
        for name, value in self.__dict__.items():
            if name not in _NOT_COPIED:
                vars(new)[name] = copy.deepcopy(value, memo)
        vars(new)["device_mesh"] = self.device_mesh
        before = self._replica
        new._attach_copy(dataclasses.replace(before.options, group=before.group))
        is_ours = self.mixed_precision is not None  # a hook that the copy has already
        if before.reducer.hook is not None and not is_ours:
            new._replica.reducer.set_hook(before.reducer.hook, before.reducer.hook_state)
        new._replica.buffer_hook = before.buffer_hook
        return new

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}
        options = self._replica.options
        state["_options"] = {
            field.name: getattr(options, field.name)
            for field in dataclasses.fields(options)
            if field.name != "group"
        }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # In the world's group, with the values that were pickled. All ranks must do so.
        state = dict(state)
        options = ReplicaOptions(group=resolve_group(None), **state.pop("_options"))
        nn.Module.__setstate__(self, state)  # type: ignore[arg-type]
        vars(self)["device_mesh"] = None
        self._attach_copy(options)

    def _attach_copy(self, options: ReplicaOptions) -> None:
        Joinable.__init__(self)
        self._attach(dataclasses.replace(options, init_sync=False))

    # Private names that tools reach for

    @classmethod
    def _get_active_ddp_module(cls) -> DistributedDataParallel | None:
        """The DDP module whose forward runs now."""
        return cls._active_ddp_module

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Any
    ) -> None:
        """Leave these names of the module, not yet wrapped, alone: neither broadcast nor reduced."""
        names = set(params_and_buffers_to_ignore)
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in names:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    def _set_static_graph(self) -> None:
        """Promise that every step has the same graph."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self._replica.reducer.num_steps:
            self._replica.error = (
                "_set_static_graph() should be called before training loop starts: buckets are waited for "
                "by what the first step showed. Pass static_graph=True when the module is wrapped."
            )
            raise StateError(self._replica.error)
        self._replica.reducer.static_graph = True

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What weft knows of the module, its buckets and its last step, by torch's names."""
        return describe(self)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Accepted: every step is timed, since that costs next to nothing."""
        if sample_rate < 1:
            raise ConfigError("DDP runtime logging sample rate should be equal or greater than 1")

    def _check_reducer_finalized(self) -> None:
        """Raise if a backward has begun and not ended."""
        if self._replica.reducer.is_reducing():
            raise StateError("Expected to have finished reduction: a backward is under way, or has failed.")

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """The module's parameters without those that data parallel leaves alone."""
        for name, param in module.named_parameters():
            if not hasattr(param, "_ddp_ignored"):
                yield (name, param) if named_params else param

    def _update_process_group(self, new_process_group: ProcessGroup) -> None:
        """Go on with another group, from a new bucket plan."""
        self._replica.change_group(new_process_group)
        self.process_group = new_process_group

    def _remove_autograd_hooks(self) -> None:
        self._replica.reducer.ready_hooks.remove()

"""Hooks on parameters: which gradients are ready, and the user's hooks, which wait for the mean.

Ready: autograd calls a post-accumulate-grad hook of each parameter. A Python function costs one or two
microseconds a call, `list.append` a third of that, and models have hundreds of small parameters. So once
the order of arrival is known, most parameters are only appended to a list, and the last one of each bucket
calls the reducer (`GradReadyHooks`). A DTensor's gradient is checked as it arrives: redistributing it is a
collective, and all ranks of its mesh make those in the order of arrival.

User hooks: autograd runs them when this rank's gradient is there. An optimizer step in one would use the
local gradient, and ranks would drift apart. In a backward that reduces they are run after the reduction
instead (`DeferredHook`); in any other backward as ever. They keep their places in the parameter's own
dictionary, so that their handles can remove them. The hooks of torch's `_apply_optimizer_in_backward` run
even earlier and are turned into such hooks.

CUDA streams: autograd accumulates a gradient on the stream where forward first used the parameter, while a
bucket is filled on the stream of its last gradient (`GradStreams`).

Private names of torch, used here and nowhere else: `param_to_optim_hook_handle_map` of
`torch.distributed.optim.apply_optimizer_in_backward` (hook handles by parameter), and
`_in_backward_optimizers` of a parameter.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from weft.autograd import accumulation_node, current_backward, is_reachable, traced_inside_only, will_run
from weft.comm.call import hosted_by
from weft.comm_hooks.mean import FEATURE
from weft.data_parallel.parameters import has_param_placements
from weft.errors import StateError


class ReadyParams(list[torch.Tensor]):
    """Parameters whose gradients are ready, in order of arrival. autograd calls its `append`."""

    on_ready: weakref.WeakMethod[Callable[[], None]]  # of the reducer
    redistribute: weakref.WeakMethod[Callable[[torch.Tensor], None]]  # likewise; set where there are DTensors


class GradReadyHooks:
    """Lists parameters as their gradients become ready, and calls `on_ready` for some of them.

    Dropping it removes the hooks.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        on_ready: Callable[[], None],
        redistribute: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self.ready_params = ReadyParams()
        self._params = params
        self._handles: dict[int, RemovableHandle] = {}
        self._notifying: Collection[int] = ()
        self._in_graph: Callable[[torch.Tensor, int], None] | None = None
        self.ready_params.on_ready = weakref.WeakMethod(on_ready)
        if redistribute is not None:
            self.ready_params.redistribute = weakref.WeakMethod(redistribute)
        append, notify = self.ready_params.append, _make_notify(self.ready_params)
        self._append, self._append_dtensor = append, _make_redistribute(self.ready_params, append)
        self._notify, self._notify_dtensor = notify, _make_redistribute(self.ready_params, notify)

    @property
    def is_installed(self) -> bool:
        """Whether any parameter has a hook."""
        return bool(self._handles)

    def install_traced(self, in_graph: Callable[[torch.Tensor, int], None]) -> None:
        """Install hooks that call this, with the parameter and its index, where compiled autograd traces.

        They run before the user's hooks, which are traced as well and shall see the mean.
        """
        if self._in_graph is not None:
            return
        self._in_graph = in_graph
        notifying, self._notifying = self._notifying, ()
        self.remove()
        self.install(notifying)

    def install(self, notifying: Collection[int]) -> None:
        """List every arrival; call `on_ready` for these parameters, by index. Replaces hooks that differ."""
        before, self._notifying = self._notifying, frozenset(notifying)
        for index, param in enumerate(self._params):
            is_notifying = index in self._notifying
            if index in self._handles and is_notifying == (index in before):
                continue
            if not param.requires_grad:  # frozen meanwhile, and autograd takes no hook for it
                continue
            if index in self._handles:
                self._handles[index].remove()
            if isinstance(param, DTensor):
                hook = self._notify_dtensor if is_notifying else self._append_dtensor
            else:
                hook = self._notify if is_notifying else self._append
            if self._in_graph is not None:
                hook = _make_traceable(index, self._in_graph, hook)
            self._handles[index] = handle = param.register_post_accumulate_grad_hook(hook)
            if self._in_graph is not None:
                _move_first(param, handle.id)

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}

    def __del__(self) -> None:
        self.remove()


def _move_first(param: Any, key: int) -> None:
    """Let a hook of the parameter run before all others: autograd goes by the order of insertion."""
    hooks: dict[int, Any] = param._post_accumulate_grad_hooks
    for other in [other for other in hooks if other != key]:
        hooks[other] = hooks.pop(other)


def ready_params_of(hook: object) -> ReadyParams | None:
    """The list that a hook of a parameter appends to; None for a hook that isn't of GradReadyHooks."""
    bound = getattr(hook, "__self__", None)
    return bound if isinstance(bound, ReadyParams) else getattr(hook, "_weft_ready_params", None)


def _make_notify(ready_params: ReadyParams) -> Callable[[torch.Tensor], None]:
    @traced_inside_only
    def notify(param: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            raise StateError(
                "compiled autograd traces a backward of a replicated module whose forward ran before it was "
                "enabled. Enable it with weft.compiler.autograd(), or around the forward too."
            )
        ready_params.append(param)
        on_ready = ready_params.on_ready()
        if on_ready is not None:
            on_ready()

    notify._weft_ready_params = ready_params  # type: ignore[attr-defined]
    return notify


def _make_traceable(
    index: int, in_graph: Callable[[torch.Tensor, int], None], then: Callable[[torch.Tensor], None]
) -> Callable[[torch.Tensor], None]:
    """A hook that calls `in_graph` while compiled autograd traces a backward, and `then` otherwise."""

    @traced_inside_only
    def run(param: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            in_graph(param, index)
        else:
            then(param)

    run._weft_ready_params = ready_params_of(then)  # type: ignore[attr-defined]
    return run


def _make_redistribute(
    ready_params: ReadyParams, then: Callable[[torch.Tensor], None]
) -> Callable[[torch.Tensor], None]:
    """A hook for a DTensor: bring its gradient to the parameter's placements, then call `then`."""

    @traced_inside_only
    def run(param: torch.Tensor) -> None:
        redistribute = None if has_param_placements(param) else ready_params.redistribute()
        if redistribute is not None:
            redistribute(param)
        then(param)

    run._weft_ready_params = ready_params  # type: ignore[attr-defined]
    return run


# The user's hooks

ParamHook = Callable[[torch.Tensor], Any]


class DeferredHook:
    """A user's post-accumulate-grad hook that doesn't run in a backward that its reducer reduces."""

    def __init__(self, hook: ParamHook, reducer: weakref.ref[Any]) -> None:
        self.hook = hook
        self.reducer = reducer
        self.ran_in: int | None = None  # the last backward in which it ran at once

    @traced_inside_only
    def __call__(self, param: torch.Tensor) -> None:
        reducer = self.reducer()
        if reducer is None or not reducer.is_reducing():
            self.ran_in = current_backward()
            self.hook(param)


def hooks_of(param: torch.Tensor) -> dict[int, Any]:
    """The dictionary of the parameter's post-accumulate-grad hooks. The one use of that private name."""
    return param._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]


def defer_hooks(param: torch.Tensor, reducer: weakref.ref[Any]) -> bool:
    """Replace the user's hooks of this parameter with deferred ones; whether it has any."""
    hooks = hooks_of(param)
    users = [key for key, hook in hooks.items() if ready_params_of(hook) is None]
    for key in users:
        if isinstance(hooks[key], DeferredHook):
            hooks[key].reducer = reducer  # the module may have been wrapped again
        else:
            hooks[key] = DeferredHook(hooks[key], reducer)
    return bool(users)


def defer_all_hooks(
    params: Sequence[torch.Tensor], reducer: weakref.ref[Any], arriving: Sequence[torch.Tensor]
) -> set[int]:
    """Defer the user's hooks of all parameters; the indices of those that have any.

    Raises StateError where it is too late: autograd runs the hooks of the `arriving` parameters now, which
    happens in a compiled backward that no forward's output has announced.
    """
    _check_deferrable(arriving)
    return {index for index, param in enumerate(params) if defer_hooks(param, reducer)}


def _check_deferrable(arriving: Sequence[torch.Tensor]) -> None:
    for param in arriving:
        for hook in hooks_of(param).values():
            if ready_params_of(hook) is None and not isinstance(hook, DeferredHook):
                raise StateError(
                    f"a post-accumulate-grad hook ({getattr(hook, '__qualname__', hook)}) was registered "
                    "after its module was compiled, and would see this rank's own gradient. Register it "
                    "before the module's first compiled forward."
                )


def reducers_of(param: torch.Tensor) -> list[Any]:
    """The reducers that have a hook on this parameter."""
    return list(_other_reducers(param, None))


def has_other_reducer(param: torch.Tensor, reducer: object) -> bool:
    """Whether another reducer has a hook on this parameter."""
    return any(True for _ in _other_reducers(param, reducer))


def is_reduced_by_other(param: torch.Tensor, reducer: object) -> bool:
    """Whether another reducer reduces this parameter's gradient in the backward under way."""
    return any(other.is_reducing() for other in _other_reducers(param, reducer))


def _other_reducers(param: torch.Tensor, reducer: object) -> Iterator[Any]:
    for hook in hooks_of(param).values():
        ready_params = ready_params_of(hook)
        on_ready: Any = None if ready_params is None else ready_params.on_ready()
        if on_ready is not None and on_ready.__self__ is not reducer:
            yield on_ready.__self__


def run_deferred(param: torch.Tensor, backward: int | None, *, has_stepped: bool) -> None:
    """Run the hooks that were deferred in this backward: the parameter's gradient is the mean now.

    `has_stepped`: the gradient hook has stepped the parameter's optimizers already.
    """
    for hook in list(hooks_of(param).values()):
        if not isinstance(hook, DeferredHook) or (backward is not None and hook.ran_in == backward):
            continue
        if has_stepped and getattr(hook.hook, "steps_optimizers", False):
            param.grad = None
        else:
            with hosted_by(FEATURE):
                hook.hook(param)


_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


def defer_torch_optimizers(params: Iterable[torch.Tensor]) -> None:
    """Let optimizers of torch's `_apply_optimizer_in_backward` step on the mean. Free without any."""
    module: Any = sys.modules.get(_MODULE)
    handles: Any = getattr(module, "param_to_optim_hook_handle_map", None)
    if not handles:
        return
    for param in params:
        if param not in handles:
            continue
        for handle in handles.pop(param):
            handle.remove()
        stepped: Any = param
        if not getattr(stepped, "_steps_in_backward", False):  # one hook steps all optimizers of a parameter
            stepped._steps_in_backward = True
            param.register_post_accumulate_grad_hook(_step_and_clear)


def _step_and_clear(param: torch.Tensor) -> None:
    stepped: Any = param
    for optimizer in stepped._in_backward_optimizers:
        optimizer.step()
    param.grad = None


# A gradient hook that steps the optimizers itself keeps data parallel from calling this one.
vars(_step_and_clear)["steps_optimizers"] = True


# Streams and nodes


class GradStreams:
    """The CUDA streams on which the gradients of one backward were accumulated, by device.

    Only parameters that call the reducer are recorded, so where there are several streams all must call it.
    """

    def __init__(self) -> None:
        self._seen: dict[torch.device, list[torch.cuda.Stream]] = {}

    def record(self, param: torch.Tensor) -> None:
        """This parameter's gradient was accumulated on the current stream."""
        if param.is_cuda:
            streams = self._seen.setdefault(param.device, [])
            stream = torch.cuda.current_stream(param.device)
            if stream not in streams:
                streams.append(stream)

    @property
    def has_several(self) -> bool:
        """Whether gradients of one device were accumulated on different streams."""
        return any(len(streams) > 1 for streams in self._seen.values())

    @contextmanager
    def waiting_for_all(self, device: torch.device) -> Generator[None]:
        """Order the work inside after all recorded streams, and their later work after it.

        The latter because memory of gradients that are dropped inside is free for those streams at once.
        """
        if device not in self._seen:
            yield
            return
        here = torch.cuda.current_stream(device)
        others = [stream for stream in self._seen[device] if stream != here]
        for stream in others:
            here.wait_stream(stream)
        yield
        for stream in others:
            stream.wait_stream(here)


class AccumulationNodes:
    """The AccumulateGrad nodes of parameters, asked where arrivals alone don't tell."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self._kept: dict[int, Any] = {}  # a node lives as long as somebody holds it

    def _nodes(self) -> dict[int, Any]:
        for index, param in enumerate(self._params):
            if param.requires_grad and index not in self._kept:
                self._kept[index] = accumulation_node(param)
        return self._kept

    def find_unused(self) -> list[int]:
        """The indices of parameters whose nodes the backward under way won't run."""
        nodes = self._nodes()
        return [
            index for index in range(len(self._params)) if index not in nodes or not will_run(nodes[index])
        ]

    def are_bypassed(self, roots: Iterable[Any]) -> bool:
        """Whether a backward without arrivals must not reduce: all parameters are frozen, or it reached some.

        The latter is `torch.autograd.grad` for other gradients. A rank whose graph holds none of its
        parameters has used none of them, and takes part with zeros.
        """
        if not any(param.requires_grad for param in self._params):
            return True
        return is_reachable(roots, self._nodes().values())

"""Hear of gradients as autograd makes them, at little cost.

autograd calls a hook for each parameter whose gradient is there. A Python function costs a
microsecond or two each time, which shows in models of many small parameters; `list.append` costs a
third of it. So once the order of arrival is known, most parameters only write themselves down, and
those that matter, the last one of each bucket, call back. A DTensor's gradient is looked at when it
comes: what ranks of its mesh must do together they do in the order of arrival.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from weft.autograd import traced_inside_only
from weft.data_parallel.members import is_settled
from weft.errors import StateError


class Arrivals(list[torch.Tensor]):
    """Parameters whose gradients have come, in order. autograd calls its `append`."""

    look: weakref.WeakMethod[Callable[[], None]]  # of whom they are for
    settle: weakref.WeakMethod[Callable[[torch.Tensor], None]]  # the same, where there are DTensors


class Listener:
    """Writes arrivals down and calls `look` back for some of them. Stops when it is dropped."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        look: Callable[[], None],
        settle: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self.arrived = Arrivals()
        self._params = params
        self._handles: dict[int, RemovableHandle] = {}
        self._callers: Collection[int] = ()
        self._in_graph: Callable[[torch.Tensor, int], None] | None = None
        self.arrived.look = weakref.WeakMethod(look)
        if settle is not None:
            self.arrived.settle = weakref.WeakMethod(settle)
        self._arrive = _make_arrive(self.arrived)
        self._arrive_placed = _make_settled(self.arrived, self._arrive)
        self._note_placed = _make_settled(self.arrived, self.arrived.append)

    @property
    def is_on(self) -> bool:
        """Whether it hears anything."""
        return bool(self._handles)

    def listen_in_graphs(self, in_graph: Callable[[torch.Tensor, int], None]) -> None:
        """From now on, call this with the parameter and its index where compiled autograd traces a backward.

        These hooks stand before the user's, which are traced as well and shall see the mean.
        """
        if self._in_graph is not None:
            return
        self._in_graph = in_graph
        callers, self._callers = self._callers, ()
        self.stop()
        self.listen(callers)

    def listen(self, callers: Collection[int]) -> None:
        """Write all arrivals down; call back when one of these parameters, by index, has come."""
        before, self._callers = self._callers, frozenset(callers)
        for index, param in enumerate(self._params):
            is_caller = index in self._callers
            if index in self._handles and is_caller == (index in before):
                continue
            if not param.requires_grad:  # frozen meanwhile: nothing to hear, and autograd takes no hook
                continue
            if index in self._handles:
                self._handles[index].remove()
            if isinstance(param, DTensor):
                hook = self._arrive_placed if is_caller else self._note_placed
            else:
                hook = self._arrive if is_caller else self.arrived.append
            if self._in_graph is not None:
                hook = _make_traceable(index, self._in_graph, hook)
            self._handles[index] = handle = param.register_post_accumulate_grad_hook(hook)
            if self._in_graph is not None:
                _put_first(param, handle.id)

    def stop(self) -> None:
        """Hear of nothing any more."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}

    def __del__(self) -> None:
        self.stop()


def _put_first(param: Any, key: int) -> None:
    """Let a hook of the parameter run before all others. Autograd goes by the order of insertion."""
    hooks: dict[int, Any] = param._post_accumulate_grad_hooks
    for other in [other for other in hooks if other != key]:
        hooks[other] = hooks.pop(other)


def arrivals_of(hook: object) -> Arrivals | None:
    """Where a parameter's hook writes arrivals down, if it is a Listener's."""
    bound = getattr(hook, "__self__", None)
    return bound if isinstance(bound, Arrivals) else getattr(hook, "_weft_arrivals", None)


def _make_arrive(arrived: Arrivals) -> Callable[[torch.Tensor], None]:
    @traced_inside_only
    def arrive(param: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            raise StateError(
                "compiled autograd traces a backward of a replicated module whose forward ran before it was "
                "enabled. Enable it with weft.compiler.autograd(), or around the forward too."
            )
        arrived.append(param)
        look = arrived.look()
        if look is not None:
            look()

    arrive._weft_arrivals = arrived  # type: ignore[attr-defined]
    return arrive


def _make_traceable(
    index: int, in_graph: Callable[[torch.Tensor, int], None], then: Callable[[torch.Tensor], None]
) -> Callable[[torch.Tensor], None]:
    """For compiled autograd: do what a graph can do while a backward is traced, and the usual otherwise."""

    @traced_inside_only
    def arrive(param: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            in_graph(param, index)
        else:
            then(param)

    arrive._weft_arrivals = arrivals_of(then)  # type: ignore[attr-defined]
    return arrive


def _make_settled(arrived: Arrivals, then: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """For DTensors: have a gradient settled that lies otherwise than its parameter, and go on."""

    @traced_inside_only
    def arrive(param: torch.Tensor) -> None:
        settle = None if is_settled(param) else arrived.settle()
        if settle is not None:
            settle(param)
        then(param)

    arrive._weft_arrivals = arrived  # type: ignore[attr-defined]
    return arrive

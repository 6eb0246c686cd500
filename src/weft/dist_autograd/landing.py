"""Where gradients land: in the context, and nothing is left in `.grad`.

While autograd adds a gradient to a leaf, and the leaf's hooks run, `.grad` is the context's gradient; before
and after it is what it was. So whatever autograd and hooks do with `.grad` works, and several contexts can
use a leaf at once. Parameters that a strategy reduces (`announce_gradients`) have the context's gradients
in `.grad` until the backward ends, when the reduced ones are there.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from weft.autograd import on_announcement
from weft.data_parallel.user_hooks import hooks_of, reducers_of
from weft.dist_autograd.context import DistAutogradContext
from weft.dist_autograd.running import current_run
from weft.errors import StateError
from weft.fsdp.param import is_whole

_lock = threading.Lock()
_leaves: dict[int, _Leaf] = {}
_lent: dict[int, Landing] = {}  # parameters whose `.grad` a landing has, by id


class _Leaf:
    """A leaf that backwards of contexts come to. Shared by those that go on at once."""

    def __init__(self, node: Any) -> None:
        self.num_landings = 0
        self._variable: torch.Tensor = node.variable
        self._turn = threading.Lock()
        self._landing: Landing | None = None  # whose turn it is
        self._thread = 0
        self._outer: torch.Tensor | None = None
        self._handles = [node.register_prehook(self._before), node.register_hook(self._after)]

    def _before(self, _: Any) -> None:
        run = current_run()
        if run is None:
            return  # a backward of its own, which happens to go on meanwhile
        self._turn.acquire()
        landing = self._landing = run.landing
        landing.taking.add(self)
        self._thread = threading.get_ident()
        self._outer = self._variable.grad
        self._variable.grad = landing.context.grads.get(self._variable)

    def _after(self, _: Any, grads: tuple[torch.Tensor | None, ...]) -> None:
        if self._landing is not None and self._thread == threading.get_ident():
            self._landing.keep(self._variable, grads[0])
            self.leave()

    def leave(self) -> None:
        """The gradient has been added, and hooks have run; or one of them has failed."""
        landing, self._landing = self._landing, None
        assert landing is not None
        landing.taking.discard(self)
        self._variable.grad, self._outer = self._outer, None
        self._turn.release()

    def remove(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()


class Landing:
    """Takes the gradients of one worker's part of a backward into its context."""

    def __init__(self, context: DistAutogradContext) -> None:
        self.context = context
        self.taking: set[_Leaf] = set()  # leaves at which it is now
        self._leaves: list[int] = []
        self._lent: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = []
        self._lent_ids: set[int] = set()
        self._reused: set[int] = set()
        self._shared: list[torch.Tensor] = []

    @contextmanager
    def ready(self, nodes: Iterable[Any]) -> Generator[None]:
        """Gradients of these leaves land in the context, inside."""
        try:
            for node in nodes:
                self._prepare(node)
            yield
        except BaseException:
            self._settle(has_failed=True)
            raise
        else:
            self._settle(has_failed=False)

    def _prepare(self, node: Any) -> None:
        variable = node.variable
        if is_whole(variable):
            return  # gradients of its shards are announced
        if hooks_of(variable) and (reducers := reducers_of(variable)):
            for reducer in reducers:
                self.lend([member.param for member in reducer.members], reducer.keeps_buffers)
            return
        with _lock:
            leaf = _leaves.get(id(variable))
            if leaf is None:
                leaf = _leaves[id(variable)] = _Leaf(node)
            leaf.num_landings += 1
        self._leaves.append(id(variable))

    def keep(self, variable: torch.Tensor, incoming: torch.Tensor | None) -> None:
        """Take what is in `.grad`. `incoming` is the gradient that autograd had for it."""
        grad, is_new = variable.grad, variable not in self.context.grads
        if grad is None:
            self.context.grads.pop(variable, None)
            return
        self.context.grads[variable] = grad
        if is_new and incoming is not None and not _have_same_memory(grad, incoming):
            # It was copied since another leaf gets it too. While this name holds it that copies it as well.
            self._shared.append(incoming)

    def lend(self, params: Sequence[torch.Tensor], is_memory_reused: bool) -> None:
        """Let `.grad` of parameters be the context's until the backward ends."""
        for param in params:
            if id(param) in self._lent_ids:
                continue
            with _lock:
                other = _lent.setdefault(id(param), self)
            if other is not self:
                raise StateError(
                    f"dist_autograd: backwards of contexts {other.context.id} and {self.context.id} came to "
                    "one module whose gradients are reduced. Let one end before the other begins."
                )
            self._lent_ids.add(id(param))
            outer = param.grad
            values = outer.clone() if is_memory_reused and outer is not None else None
            self._lent.append((param, outer, values))
            if is_memory_reused:
                self._reused.add(id(param))
            param.grad = self.context.grads.get(param)

    def _settle(self, *, has_failed: bool) -> None:
        for leaf in list(self.taking):
            leaf.leave()
        for param, outer, values in self._lent:
            grad = param.grad
            if not has_failed and grad is not None:
                self.context.grads[param] = grad.clone() if id(param) in self._reused else grad
            if outer is not None and values is not None:
                with torch.no_grad():
                    outer.copy_(values)
            param.grad = outer
        with _lock:
            for param_id in self._lent_ids:
                del _lent[param_id]
            for leaf_id in self._leaves:
                leaf = _leaves[leaf_id]
                leaf.num_landings -= 1
                if not leaf.num_landings:
                    leaf.remove()
                    del _leaves[leaf_id]
        self._shared.clear()


def _have_same_memory(grad: torch.Tensor, other: torch.Tensor) -> bool:
    if grad.is_sparse and other.is_sparse:
        return grad._values().data_ptr() == other._values().data_ptr()
    is_plain = grad.layout is torch.strided and other.layout is torch.strided
    return is_plain and grad.data_ptr() == other.data_ptr()


def _hear(params: Sequence[torch.Tensor], is_memory_reused: bool) -> None:
    run = current_run()
    if run is not None:
        run.landing.lend(params, is_memory_reused)


on_announcement(_hear)

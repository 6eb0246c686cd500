"""Where gradients land: in the context, and nothing is left in `.grad`.

A hook before the node that would add to a leaf's `.grad` takes the gradient, and leaves the node none. Leaves
with post-accumulate hooks are for autograd to add to, since those look at `.grad`: it is the context's while
they run, and before and after what it was. Either way several contexts can use a leaf at once.

Parameters that a strategy reduces (`announce_gradients`) have the context's gradients in `.grad` until the
backward ends, when the reduced ones are there. The context gets all of them then; none if the backward fails
here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

from weft.autograd import (
    Renew,
    Unsynced,
    accumulation_node,
    has_tensor_hooks,
    on_announcement,
    traced_inside_only,
)
from weft.data_parallel.arrivals import hooks_of, reducers_of
from weft.dist_autograd.context import DistAutogradContext
from weft.dist_autograd.running import current_run
from weft.dist_autograd.starts import Start
from weft.errors import StateError
from weft.fsdp.param import is_unsharded_param
from weft.tensors import dense_strides, holder_count, use_count

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
        self._num_inner = 0
        self._outer: torch.Tensor | None = None
        self._node = node
        self._handles = [node.register_prehook(self._before)]

    @property
    def has_company(self) -> bool:
        """Whether others have hooks before its node too."""
        return len(self._handles[0].hooks_dict_ref() or ()) > 1

    @traced_inside_only
    def _before(self, grads: tuple[torch.Tensor | None, ...]) -> tuple[None] | None:
        run = current_run()
        if run is None:
            return None  # a backward of its own, which happens to go on meanwhile
        landing = run.landing
        if not hooks_of(self._variable):
            if grads[0] is not None:
                with self._turn:
                    landing.add(self._variable, grads[0])
            return (None,)
        if self._landing is not None and self._thread == threading.get_ident():
            self._num_inner += 1  # a backward within a hook of this very leaf
            return None
        self._turn.acquire()
        if len(self._handles) == 1:  # most leaves have no hooks that would be looked after
            self._handles.append(self._node.register_hook(self._after))
        self._landing = landing
        landing.taking.add(self)
        self._thread = threading.get_ident()
        self._outer = self._variable.grad
        self._variable.grad = landing.show(self._variable)
        return None

    @traced_inside_only
    def _after(self, _: Any, __: Any) -> None:
        if self._landing is None or self._thread != threading.get_ident():
            return
        if self._num_inner:
            self._num_inner -= 1
        else:
            self._landing.keep(self._variable)
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
        count_fresh()  # before the engine is at work
        _hear_announcements()
        self.context = context
        self.taking: set[_Leaf] = set()  # leaves at which it is now
        self._added: dict[torch.Tensor, torch.Tensor] = {}
        self._kept: dict[torch.Tensor, torch.Tensor | None] = {}
        self._leaves: list[int] = []
        self._lent: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # with what `.grad` was
        self._lent_ids: set[int] = set()
        self._renew: list[Renew] = []
        self._shared: dict[int, torch.Tensor] = {}  # gradients that other leaves may get too, by id
        self._own: set[int] = set()  # ids of gradients that nobody else has, for certain
        self._unsynced: list[tuple[Unsynced, Any]] = []

    def prepare(self, nodes: Iterable[Any]) -> None:
        """Let gradients of these leaves land in the context, from now until it is settled."""
        for node in nodes:
            self._prepare(node)

    def expect(self, starts: Sequence[Start]) -> None:
        """Hear what the engine starts with: gradients that came in a message, some for leaves as they are."""
        self._own.clear()
        at_leaves = [
            (variable, grad)
            for edge, grad in starts
            if (variable := getattr(edge.node, "variable", None)) is not None
        ]
        for variable, grad in at_leaves:
            # One that a hook could keep is not the leaf's alone.
            leaf = _leaves.get(id(variable))
            is_seen = has_tensor_hooks(variable) or (leaf is not None and leaf.has_company)
            if not is_seen:
                self._own.add(id(grad))

    def take(self, pairs: Sequence[tuple[Any, torch.Tensor]]) -> bool:
        """Take gradients that came for leaves, by their nodes, which nobody watches.

        False, with none taken, where one is not as its leaf.
        """
        found = [(node.variable, grad) for node, grad in pairs]
        if not all(_is_as(grad, variable) for variable, grad in found):
            return False
        self._own = {id(grad) for _, grad in found}
        for variable, grad in found:
            self.add(variable, grad)
        return True

    def _prepare(self, node: Any) -> None:
        variable = node.variable
        if is_unsharded_param(variable):
            return  # gradients of its shards are announced
        if id(variable) in self._lent_ids:
            return
        if hooks_of(variable) and (reducers := reducers_of(variable)):
            for reducer in reducers:
                self.lend(reducer.params, reducer.bucket_set.release_buffers)
            return
        with _lock:
            leaf = _leaves.get(id(variable))
            if leaf is None:
                leaf = _leaves[id(variable)] = _Leaf(node)
            leaf.num_landings += 1
        self._leaves.append(id(variable))

    def add(self, variable: torch.Tensor, grad: torch.Tensor) -> None:
        """Take a leaf's gradient, to be added to what the context has of it."""
        # What another leaf has is nobody's own, whatever came in a message.
        is_alone = id(grad) not in self._shared and (
            id(grad) in self._own or _are_few(_count_holders(grad), count_fresh())
        )
        if is_alone and _is_fit_to_keep(grad, variable):
            self._added[variable] = grad
        else:
            self._added[variable] = _copy_like(grad, variable)
        self._shared[id(grad)] = grad  # another leaf that gets it does not have it alone

    def show(self, variable: torch.Tensor) -> torch.Tensor | None:
        """What a leaf's hooks are to find: a copy of the context's gradient, since the backward may fail."""
        known = self.context.grads.get(variable)
        return None if known is None else known.clone()

    def keep(self, variable: torch.Tensor) -> None:
        """Take what is in `.grad`, in place of what the context has of it."""
        self._kept[variable] = variable.grad

    def lend(self, params: Sequence[torch.Tensor], renew: Renew | None) -> None:
        """Let `.grad` of parameters be the context's until the backward ends."""
        if renew is not None and any(id(param) not in self._lent_ids for param in params):
            renew()  # what is in `.grad` now keeps its memory, and so will what comes
            self._renew.append(renew)
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
            self._lent.append((param, param.grad))
            param.grad = self.show(param)

    def lend_unsynced(self, unsynced: Unsynced) -> None:
        """Let what a strategy has not reduced yet be the context's until the backward ends."""
        if all(other is not unsynced for other, _ in self._unsynced):
            self._unsynced.append(
                (unsynced, unsynced.exchange_unsynced(self.context.unsynced.pop(unsynced, None)))
            )

    def settle(self, *, has_failed: bool) -> None:
        """The backward has ended here: the context gets its gradients, unless it has failed."""
        for leaf in list(self.taking):
            leaf.leave()
        for param, outer in self._lent:
            if param.grad is not None:
                self._kept[param] = param.grad
            param.grad = outer
        for renew in self._renew:
            renew()
        for unsynced, outer in self._unsynced:
            kept = unsynced.exchange_unsynced(outer)
            if not has_failed:
                self.context.unsynced[unsynced] = kept
        if not has_failed:
            self._hand_over()
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

    def _hand_over(self) -> None:
        """Give the context its gradients."""
        grads = self.context.grads
        with self.context.lock:
            for variable, grad in self._kept.items():
                if grad is None:
                    grads.pop(variable, None)
                else:
                    grads[variable] = grad
            for variable, grad in self._added.items():
                known = grads.setdefault(variable, grad)
                if known is grad:
                    continue
                with torch.no_grad():
                    # A sparse one can't be added to in place.
                    is_replaced = known.is_sparse and not grad.is_sparse
                    grads[variable] = grad + known if is_replaced else known.add_(grad)


def _count_holders(grad: torch.Tensor) -> tuple[int, int, int]:
    """How often a gradient is held in C++ and in Python, and by tensors that share its memory."""
    has_memory = grad.layout is torch.strided and type(grad) is torch.Tensor
    return holder_count(grad), sys.getrefcount(grad), use_count(grad) if has_memory else 0


def _are_few(counts: tuple[int, int, int], fresh: tuple[int, int, int]) -> bool:
    return counts[0] <= fresh[0] and counts[1] <= fresh[1] and counts[2] <= fresh[2]


class _Trial:
    """Counts where a landing does."""

    counts = (0, 0, 0)

    def add(self, variable: torch.Tensor, grad: torch.Tensor) -> None:
        self.counts = _count_holders(grad)


def _is_as(grad: torch.Tensor, variable: torch.Tensor) -> bool:
    """Whether autograd would pass a gradient on to a leaf as it is."""
    return grad.shape == variable.shape and grad.dtype is variable.dtype and grad.device == variable.device


def _is_fit_to_keep(grad: torch.Tensor, variable: torch.Tensor) -> bool:
    """Whether a gradient that nobody else has lies as one should."""
    if grad.is_sparse:
        return grad._indices().is_contiguous() and grad._values().is_contiguous()
    if grad.layout is not torch.strided or variable.layout is not torch.strided:
        return True
    return not grad._is_view() and (grad.stride() == variable.stride() or grad.is_contiguous())


def _copy_like(grad: torch.Tensor, variable: torch.Tensor) -> torch.Tensor:
    """A copy that lies as the leaf does, where that is possible."""
    is_plain = type(grad) is torch.Tensor and grad.layout is torch.strided
    if is_plain and variable.layout is torch.strided:
        strides = dense_strides(variable.shape, variable.stride())
        return grad.new_empty_strided(variable.shape, strides).copy_(grad)
    return grad.clone()


@cache
def count_fresh() -> tuple[int, int, int]:
    """How often autograd itself holds a gradient that nobody else has, when `Landing.add` gets it.

    Tried out once, and not on import: a process whose engine has run can't be forked.
    """
    leaf, trial = torch.zeros(1, device="cpu", requires_grad=True), _Trial()
    with torch.enable_grad():
        doubled = leaf * 2
    handle = accumulation_node(leaf).register_prehook(lambda grads: trial.add(leaf, grads[0]))
    torch.autograd.backward([doubled], [torch.ones(1, device="cpu")])
    handle.remove()
    return trial.counts


def _hear(params: Sequence[torch.Tensor], renew: Renew | None, unsynced: Unsynced | None) -> None:
    run = current_run()
    if run is not None:
        run.landing.lend(params, renew)
        if unsynced is not None:
            run.landing.lend_unsynced(unsynced)


@cache
def _hear_announcements() -> None:
    """Hear of gradients that strategies set, from the first landing on: not in processes without RPC."""
    on_announcement(_hear)

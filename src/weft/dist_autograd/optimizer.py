"""DistributedOptimizer: one optimizer for the parameters of several workers.

Every worker that has some of the parameters gets a LocalOptimizer for them. A step asks all of these at once,
and each takes the gradients that the context holds on its worker.

Invariant: the `grad` of a parameter is never touched. The optimizer works on twins, which have the memory and
the version counter of their parameters, and a `grad` of their own. So a step of one context can't get in the
way of another context's backward, or of a plain one.

Whoever steps a parameter holds its lock. No lock is held while a worker waits for another.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from weft.dist_autograd import api as autograd
from weft.dist_autograd.quick_steps import step_quickly
from weft.errors import ConfigError, ConfigTypeError, PeerError, PeerTimeoutError, StateError
from weft.rpc import RRef, WorkerInfo, get_worker_info, registry, rpc_async, rpc_sync
from weft.rpc.message_forms import is_named, is_word, need
from weft.rpc.rref import local_value_of

# By the id of the parameter. Only LocalOptimizers hold locks, and they hold the parameters too: an id in here
# is not another tensor's.
_locks: WeakValueDictionary[int, threading.Lock] = WeakValueDictionary()
_finding_locks = threading.Lock()

# Classes whose tensors can be given other memory (`param.data = ...`). One that wraps others has none.
_MOVABLE = (Tensor, nn.Parameter)

_Call = tuple[WorkerInfo, Callable[..., Any], tuple[Any, ...]]


class DistributedOptimizer:
    """Optimize parameters wherever they are: an `optimizer_class(params, *args, **kwargs)` on every owner.

    `params_rref` are RRefs to parameters, of this worker's own and of others. Raises PeerError (a
    RuntimeError) when an optimizer can't be made; the text has every worker's error.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Any],
        params_rref: Iterable[RRef[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        by_owner = _group_by_owner(params_rref)
        calls = [
            (owner, make_local_optimizer, (optimizer_class, rrefs, args, kwargs))
            for owner, rrefs in by_owner.items()
        ]
        # torch's name.
        self.remote_optimizers: list[RRef[LocalOptimizer]] = _call_owners(calls, "making the optimizer")

    def step(self, context_id: int) -> None:
        """Step on all owners at once, with the gradients of a context of dist_autograd; wait for all of them.

        A parameter without a gradient in the context stays as it is. Raises RuntimeError for a context that
        this worker doesn't know; PeerError where an owner's step failed, with every worker's error. The other
        owners have stepped then.
        """
        autograd._is_valid_context(context_id)
        self._ask_all(step_local_optimizer, [(context_id,)] * len(self.remote_optimizers), "step")

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The `state_dict` of every owner's optimizer, by the name of the worker."""
        states = self._ask_all(read_local_state, [()] * len(self.remote_optimizers), "state_dict")
        return {rref.owner_name(): state for rref, state in zip(self.remote_optimizers, states, strict=True)}

    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, Any]]) -> None:
        """Load what `state_dict` gave: on the same workers, with their parameters in the same order."""
        owners = [rref.owner_name() for rref in self.remote_optimizers]
        if sorted(owners) != sorted(state_dict):
            raise ConfigError(
                f"DistributedOptimizer.load_state_dict: the state is of workers {sorted(state_dict)}, the "
                f"parameters are on {sorted(owners)}. Give the workers the names that they had."
            )
        self._ask_all(load_local_state, [(dict(state_dict[name]),) for name in owners], "load_state_dict")

    def _ask_all(
        self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], doing: str
    ) -> list[Any]:
        asked = zip(self.remote_optimizers, arguments, strict=True)
        calls = [(rref.owner(), function, (rref, *args)) for rref, args in asked]
        # What is made in inference mode could not be used outside of it; a handler is never in it.
        own = None if torch.is_inference_mode_enabled() else get_worker_info()
        return _call_owners(calls, doing, own)


def _group_by_owner(params_rref: Iterable[Any]) -> dict[WorkerInfo, list[RRef[Tensor]]]:
    by_owner: dict[WorkerInfo, list[RRef[Tensor]]] = {}
    for rref in params_rref:
        if not isinstance(rref, RRef):
            raise ConfigTypeError(
                "DistributedOptimizer: params_rref must be RRefs to parameters; there is a "
                f"{type(rref).__name__} in it. Use weft.rpc.RRef(param) for a parameter of this worker, and "
                "remote_parameters() of a RemoteModule."
            )
        by_owner.setdefault(rref.owner(), []).append(cast(RRef[Tensor], rref))
    if not by_owner:
        raise ConfigError("DistributedOptimizer got an empty parameter list. Pass RRefs to parameters.")
    return by_owner


def _call_owners(calls: Sequence[_Call], doing: str, own: WorkerInfo | None = None) -> list[Any]:
    """Make calls to several workers at once; their results. Waits for all of them, whatever fails.

    A call to the worker `own` is this thread's to do, while the others do theirs.
    """
    errors: dict[WorkerInfo, Exception] = {}
    results: dict[int, Any] = {}  # by the place of the call
    futures: dict[int, torch.futures.Future[Any]] = {}

    def attempt(place: int, found: dict[int, Any], run: Callable[[], Any]) -> None:
        try:
            found[place] = run()
        except Exception as error:
            errors[calls[place][0]] = error

    for place, (owner, function, args) in enumerate(calls):
        if len(calls) == 1 and owner != own:
            attempt(place, results, partial(rpc_sync, owner, function, args))  # which costs less
        elif owner != own:
            attempt(place, futures, partial(rpc_async, owner, function, args))
    for place, (owner, function, args) in enumerate(calls):
        if owner == own:
            attempt(place, results, partial(function, *args))
    for place, future in futures.items():
        attempt(place, results, future.wait)
    if errors:
        raise _gather_errors(errors, len(calls), doing)
    return [results[place] for place in range(len(calls))]


def _gather_errors(errors: Mapping[WorkerInfo, Exception], num_owners: int, doing: str) -> PeerError:
    """One error that tells of all. Its cause is that of the worker, or a group of them."""
    told = "".join(
        f"\n  worker '{owner.name}' (id {owner.id}): {type(error).__name__}: {error}"
        for owner, error in errors.items()
    )
    is_late = all(isinstance(error, PeerTimeoutError) for error in errors.values())
    summary = f"DistributedOptimizer: {doing} failed on {len(errors)} of {num_owners} workers"
    gathered = (PeerTimeoutError if is_late else PeerError)(
        f"{summary}:{told}", [owner.id for owner in errors]
    )
    causes = list(errors.values())
    gathered.__cause__ = causes[0] if len(causes) == 1 else ExceptionGroup(summary, causes)
    return gathered


# What runs on the owners


class LocalOptimizer:
    """An owner's optimizer, `optim`, for the parameters that it has."""

    def __init__(
        self,
        optimizer_class: Callable[..., Any],
        params: Sequence[Tensor],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        for param in params:
            _check_param(param)
        # One for each parameter, so that an optimizer finds out that one was given twice.
        twins = {param: nn.Parameter(param.detach(), param.requires_grad) for param in params}
        self._pairs = list(twins.items())
        self._alone = _Alone(twins)
        self.optim = optimizer_class([twins[param] for param in params], *args, **(kwargs or {}))

    def step(self, context_id: int) -> None:
        """Step with the gradients that a context holds here."""
        try:
            gradients = autograd.get_gradients(context_id)
        except StateError:
            gradients = {}  # no call of the context came here; whoever asks for the step knows it
        with self._alone:
            try:
                for param, twin in self._pairs:
                    _move_memory(twin, to=param)  # which may have been given other memory: module.half()
                    twin.grad = gradients.get(param)
                step_quickly(self.optim)
            finally:
                for param, twin in self._pairs:
                    twin.grad = None
                    _move_memory(param, to=twin)  # where the optimizer makes a new tensor: p.data = ...

    def state_dict(self) -> dict[str, Any]:
        """A copy of the optimizer's state, which later steps don't change."""
        with self._alone:
            return copy.deepcopy(self.optim.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the optimizer a state."""
        with self._alone:
            self.optim.load_state_dict(state)


def _check_param(param: Any) -> None:
    """Raise for what no optimizer takes; a twin would hide it."""
    if not isinstance(param, Tensor):
        raise ConfigTypeError(
            f"optimizer can only optimize Tensors, but one of the params is {torch.typename(param)}. Pass "
            "RRefs to parameters, not to modules."
        )
    if not (param.is_leaf or param.retains_grad):
        raise ConfigError(
            "can't optimize a non-leaf Tensor: one of the RRefs is to a tensor that was computed, of shape "
            f"{tuple(param.shape)}. Pass RRefs to what it was computed from."
        )


class _Alone:
    """Keeps others from stepping some parameters for the length of a block."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        with _finding_locks:
            locks = [_locks.setdefault(id(param), threading.Lock()) for param in params]
        self._locks = sorted(locks, key=id)  # the order in which everybody takes them

    def __enter__(self) -> None:
        num_held = 0
        try:
            for lock in self._locks:
                lock.acquire()
                num_held += 1
        except BaseException:  # Ctrl-C while it waits
            self._release(num_held)
            raise

    def __exit__(self, *_: object) -> None:
        self._release(len(self._locks))

    def _release(self, num_held: int) -> None:
        for lock in self._locks[:num_held]:
            lock.release()


def _move_memory(tensor: Tensor, *, to: Tensor) -> None:
    """Let a tensor lie where the other does, if it doesn't."""
    if type(tensor) not in _MOVABLE or type(to) not in _MOVABLE:
        return
    if tensor.layout is torch.strided and to.layout is torch.strided:
        is_there = tensor.dtype is to.dtype and tensor.device == to.device and tensor.is_set_to(to)
        if not is_there:
            tensor.data = to.data


def make_local_optimizer(
    optimizer_class: Callable[..., Any],
    param_rrefs: Sequence[RRef[Tensor]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> RRef[LocalOptimizer]:
    """Make the optimizer of this worker's parameters."""
    need(
        type(param_rrefs) is list and type(args) is tuple and is_named(kwargs),
        "the arguments of an optimizer",
    )
    registry.current_agent().packer.check_call(optimizer_class)
    params = [local_value_of(rref) for rref in param_rrefs]
    return RRef(LocalOptimizer(optimizer_class, params, args, kwargs))


def step_local_optimizer(rref: RRef[LocalOptimizer], context_id: int) -> None:
    """Step this worker's parameters."""
    need(is_word(context_id), "a step")
    _local_optimizer(rref).step(context_id)


def read_local_state(rref: RRef[LocalOptimizer]) -> dict[str, Any]:
    """The state of this worker's optimizer."""
    return _local_optimizer(rref).state_dict()


def load_local_state(rref: RRef[LocalOptimizer], state: dict[str, Any]) -> None:
    """Give this worker's optimizer a state."""
    need(is_named(state), "the state of an optimizer")
    local = _local_optimizer(rref)
    if registry.current_agent().packer.fence is not None:
        _check_fused(local.optim, state)
    local.load_state_dict(state)


def _check_fused(optim: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Refuse a state of another shape than its parameter, which fused kernels would read and write beyond.

    Nor may a state switch to fused kernels. All others check shapes themselves. Strides are seen to when the
    optimizer steps.
    """
    groups, states = state.get("param_groups"), state.get("state")
    is_right = type(groups) is list and all(is_named(group) for group in cast("list[Any]", groups))
    need(is_right and type(states) is dict, "the state of an optimizer")
    for group, own in zip(cast("list[dict[str, Any]]", groups), optim.param_groups, strict=False):
        is_fused, numbers = own.get("fused"), group.get("params")
        need(type(numbers) is list and group.get("fused") is is_fused, "a group of an optimizer's state")
        for number, param in zip(cast("list[Any]", numbers), own["params"], strict=False) if is_fused else ():
            of_param = cast("dict[Any, Any]", states).get(number, {})
            need(is_named(of_param), "an optimizer's state of a parameter")
            for name, value in cast("dict[str, Any]", of_param).items():
                is_step = name == "step" and isinstance(value, Tensor) and value.numel() == 1
                is_fit = is_step or not isinstance(value, Tensor) or value.shape == param.shape
                need(is_fit, "an optimizer's state of a parameter")


def _local_optimizer(rref: RRef[Any]) -> LocalOptimizer:
    """The value, which peers may name by any RRef."""
    local = local_value_of(rref)
    if not isinstance(local, LocalOptimizer):
        raise ConfigTypeError(f"expected an RRef to a LocalOptimizer, not to a {type(local).__name__}.")
    return local

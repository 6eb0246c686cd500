"""Calls on the value of an RRef, run where the value is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from weft.errors import StateError
from weft.rpc import registry, tracking
from weft.rpc.functions import async_execution, is_async
from weft.rpc.message_forms import is_named, is_word, need

if TYPE_CHECKING:
    from weft.rpc.rref import RRef


class RRefProxy:
    """Any attribute of it is a function that calls the method of that name on the owner."""

    def __init__(self, rref: RRef[Any], how: str, timeout: float) -> None:
        self._rref = rref
        self._how = how
        self._timeout = timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(_invoke, self._rref, self._how, self._timeout, name)


def _invoke(rref: RRef[Any], how: str, timeout: float, name: str, /, *args: Any, **kwargs: Any) -> Any:
    rref.check_usable(how)
    payload = (rref, name, args, kwargs)
    if how == "rpc_sync":
        return rref.agent.caller.call_sync(rref.owner(), call_method, payload, {}, timeout)
    if how == "rpc_async":
        return rref.agent.caller.call_async(rref.owner(), call_method, payload, {}, timeout)
    # A mistake in the name would only show when the result is used: it is looked for first.
    method = getattr(rref._get_type(timeout=timeout), name)
    run = call_async_method if is_async(method) else call_plain_method
    return rref.agent.caller.call_remote(rref.owner(), run, payload, {}, timeout)


@async_execution
def call_method(rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of the value; the answer waits for its future where the method is an async one."""
    method = _method_of(rref, name, args, kwargs)
    result = method(*args, **kwargs)
    if is_async(method):
        return result
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return future


@async_execution
def call_async_method(rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method that returns a future of its result."""
    return _method_of(rref, name, args, kwargs)(*args, **kwargs)


def call_plain_method(rref: RRef[Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method that returns its result."""
    return _method_of(rref, name, args, kwargs)(*args, **kwargs)


def _method_of(rref: object, name: str, args: object, kwargs: object) -> Callable[..., Any]:
    need(type(args) is tuple and is_named(kwargs), "a call of a method")
    # This worker's agent, not that of the RRef that came: only its own `allow` counts.
    return registry.current_agent().packer.find_method(_value_of(rref), name)


def _value_of(rref: Any) -> Any:
    """The value of a peer's RRef. Raises for anything but an RRef to a value of this worker."""
    from weft.rpc.rref import local_value_of  # a cycle: rref.py imports the proxies

    return local_value_of(rref)


def ask_type(rref: RRef[Any], timeout: float) -> torch.futures.Future[Any]:
    """A future of the value's type."""
    if rref.is_owner():
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(type(rref.local_value()))
        return future
    rref.check_usable("_get_type()")
    return rref.agent.caller.call_async(rref.owner(), _rref_typeof_on_owner, (rref,), {}, timeout)


def _rref_typeof_on_owner(rref: RRef[Any]) -> type[Any]:
    return type(_value_of(rref))


def is_failed(future: torch.futures.Future[Any]) -> bool:
    """Whether a future that is done holds an error."""
    try:
        future.value()
    except Exception:
        return True
    return False


def run_backward(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """Run backward from the value of an RRef, where it is."""
    if not rref.is_owner():
        if context_id == -1:
            raise StateError(
                "User RRefs require 'dist_autograd_ctx_id' to be specified: gradients on another worker go "
                "into a context of distributed autograd."
            )
        arguments = (rref, context_id, retain_graph)
        rref.agent.caller.call_sync(rref.owner(), _backward_on_owner, arguments, {}, -1.0)
        return
    _backward_on_owner(rref, context_id, retain_graph)


def _backward_on_owner(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    is_context = context_id == -1 or is_word(context_id)
    need(type(context_id) is int and is_context and type(retain_graph) is bool, "a backward of an RRef")
    value = _value_of(rref)
    if not isinstance(value, torch.Tensor):
        raise StateError(f"RRef should contain a tensor for .backward(), not a {type(value).__name__}.")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)
    elif tracking.backward_in_context is None:
        raise StateError(f"Could not find autograd context with id: {context_id}")
    else:
        tracking.backward_in_context(context_id, [value], retain_graph)

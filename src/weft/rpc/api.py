"""The functions of RPC: calls, references, who is there, and the end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import torch

from weft.errors import ConfigTypeError, PeerTimeoutError, StateError
from weft.rpc import gathering, registry, torch_names
from weft.rpc.agent import Agent
from weft.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from weft.rpc.directory import Destination
from weft.rpc.message_forms import is_named, need
from weft.rpc.options import check_secs, check_timeout
from weft.rpc.rref import RRef
from weft.rpc.workers import WorkerInfo

__all__ = [
    "RRef",
    "_all_gather",
    "_barrier",
    "_broadcast_to_followers",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_gather_to_leader",
    "_get_current_rpc_agent",
    "_is_current_rpc_agent_set",
    "_set_and_start_rpc_agent",
    "_set_rpc_timeout",
    "_wait_all",
    "_wait_all_workers",
    "get_rpc_timeout",
    "get_worker_info",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

Arguments = tuple[Any, ...] | list[Any] | None

# Whether values that others still hold at a graceful shutdown are an error.
_ignore_rref_leak = True
_LEAK_WAIT_SECS = 2.0
_LEAST_LEAVE_SECS = 0.5  # that the store has to answer, where the timeout is over already
_thread_local_var = threading.local()
_polling = threading.Event()  # never set: its wait is a pause


def rpc_sync(
    to: Destination,
    func: Callable[..., Any],
    args: Arguments = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Call `func(*args, **kwargs)` on worker `to` (a name, an id or a WorkerInfo) and return what it returns.

    What it raises is raised here, with the remote traceback as its cause. `timeout`: seconds, 0 for none, the
    default of init_rpc's options where it is not given. Raises PeerError when the worker is gone,
    PeerTimeoutError after the timeout.
    """
    agent = registry.current_agent()
    _check_callable(func)
    return agent.caller.call_sync(to, func, tuple(args or ()), dict(kwargs or {}), timeout)


def rpc_async(
    to: Destination,
    func: Callable[..., Any],
    args: Arguments = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[Any]:
    """Call `func(*args, **kwargs)` on worker `to`; return a future of what it returns. Errors are the
    future's.

    Arguments are packed before this returns: they may be changed afterwards.
    """
    agent = registry.current_agent()
    _check_callable(func)
    future = agent.caller.call_async(to, func, tuple(args or ()), dict(kwargs or {}), timeout)
    own, torchs = getattr(_thread_local_var, "future_list", None), torch_names.waited_futures()
    for futures in [own] if torchs is own else [own, torchs]:
        if futures is not None:
            futures.append(future)
    return future


def remote(
    to: Destination,
    func: Callable[..., Any],
    args: Arguments = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Call `func(*args, **kwargs)` on worker `to`; return an RRef to what it returns, which stays there.

    What it raises is raised when the RRef is used. So is a timeout: when the value is not made within
    `timeout` seconds.
    """
    agent = registry.current_agent()
    _check_callable(func)
    return agent.caller.call_remote(to, func, tuple(args or ()), dict(kwargs or {}), timeout)


def _check_callable(func: object) -> None:
    if not callable(func):
        raise ConfigTypeError(f"function should be callable. {func!r} is not.")


# Who is there


def get_worker_info(worker_name: Destination | None = None) -> WorkerInfo:
    """The name and id of a worker; of this one where no name is given."""
    agent = registry.current_agent()
    return agent.info if worker_name is None else agent.directory.find(worker_name).info


def _get_current_rpc_agent() -> Agent:
    return registry.current_agent()


def _is_current_rpc_agent_set() -> bool:
    return registry.find_agent() is not None


def _set_and_start_rpc_agent(agent: Agent) -> None:
    registry.add(agent)
    torch_names.lend()


# Timeouts


def get_rpc_timeout() -> float:
    """The default timeout of this worker's calls, in seconds."""
    return registry.current_agent().timeout_secs


def _set_rpc_timeout(secs: float) -> None:
    registry.current_agent().timeout_secs = check_timeout(secs)


@contextlib.contextmanager
def _wait_all() -> Generator[None]:
    """Wait, at the end, for all that this thread calls with rpc_async inside."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        futures: list[torch.futures.Future[Any]] = _thread_local_var.future_list
        del _thread_local_var.future_list
        torch.futures.wait_all(futures)


# All together


def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """An object of every worker, by its name. All of them must call it."""
    agent = registry.current_agent()
    if timeout != UNSET_RPC_TIMEOUT:
        check_secs(timeout, "_all_gather: timeout")
    names = set(worker_names or (info.name for info in agent.get_worker_infos()))
    return gathering.gather(agent, obj, names, timeout, _gather_to_leader, _broadcast_to_followers)


def _gather_to_leader(
    sequence_id: str, worker_name: str, obj: Any, worker_names: Iterable[str] | None = None
) -> None:
    agent = registry.current_agent()
    is_right = type(sequence_id) is str and type(worker_name) is str
    need(is_right and type(worker_names) in (set, type(None)), "a part of a gathering")
    names = set(worker_names or (info.name for info in agent.get_worker_infos()))
    need(worker_name in names and all(type(name) is str for name in names), "a part of a gathering")
    agent.gatherings.add(sequence_id, worker_name, obj, names)


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    need(type(sequence_id) is str and is_named(objects_map), "the result of a gathering")
    registry.current_agent().gatherings.complete(sequence_id, objects_map)


def _barrier(worker_names: Iterable[str]) -> None:
    """Wait until all of these workers are here."""
    _all_gather(None, worker_names)


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until every worker is here. Calls are served meanwhile."""
    _all_gather(None, timeout=timeout)


# The end


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """End this worker.

    Graceful: wait until every worker has called this and no call is unfinished anywhere (at most `timeout`
    seconds, 0 for no limit). A worker that died meanwhile is an error that names it; this worker is ended all
    the same. Otherwise end now: calls that have no answer fail, here and on the others.
    """
    agent = registry.current_agent()
    check_secs(timeout, "shutdown: timeout")
    if graceful and agent.pool.is_worker:
        raise StateError("shutdown: a handler can't wait for its own end. Use graceful=False there.")
    deadline = time.monotonic() + timeout if timeout else None
    try:
        if graceful and agent.is_static:
            _wait_all_workers(timeout)
            _settle(agent, deadline)
            _delete_all_user_and_unforked_owner_rrefs()
            _check_leaks(agent)
            _wait_idle(agent, deadline)  # answers to the last gathering are on their way
        elif graceful:
            _wait_idle(agent, deadline)
    except BaseException:
        _end(agent, deadline)
        raise
    began = time.monotonic()
    if not _end(agent, deadline):
        raise _silent_store_error(agent, time.monotonic() - began)


def _end(agent: Agent, deadline: float | None) -> bool:
    """End an agent within what is left of a timeout; returns False if it is still on its group's list."""
    if deadline is None:
        return agent.end()
    return agent.end(leave_secs=max(_LEAST_LEAVE_SECS, deadline - time.monotonic()))


def _silent_store_error(agent: Agent, secs: float) -> PeerTimeoutError:
    host = agent.peers.get(0)
    by = "" if host is None else f", which worker '{host.info.name}' (id 0) hosts as a rule,"
    return PeerTimeoutError(
        f"shutdown: the store of this group{by} did not answer for {secs:.1f} seconds. "
        f"Worker '{agent.info.name}' has ended all the same; it stays on the group's list until the store "
        "answers.",
        [] if host is None else [0],
    )


def _settle(agent: Agent, deadline: float | None) -> None:
    """Wait until no worker has anything to do. Two looks that find nothing, with nothing begun between, prove
    it.
    """
    before: list[int] | None = None
    while True:
        _wait_idle(agent, deadline)
        left_secs = 0.0 if deadline is None else max(0.001, deadline - time.monotonic())
        states = _all_gather((agent.is_idle, agent.calls.num_started_by_users), timeout=left_secs)
        begun = [states[name][1] for name in sorted(states)]
        if all(is_idle for is_idle, _ in states.values()):
            if begun == before:
                return
            before = begun
        else:
            before = None


def _wait_idle(agent: Agent, deadline: float | None) -> None:
    pause_secs = 0.0005
    while not agent.is_idle:
        if deadline is not None and time.monotonic() > deadline:
            raise PeerTimeoutError(
                f"shutdown: calls were still unfinished on worker '{agent.info.name}' when its timeout was "
                f"over: {agent.describe_open()}."
            )
        _polling.wait(pause_secs)
        pause_secs = min(0.02, pause_secs * 2)


def _delete_all_user_and_unforked_owner_rrefs() -> None:
    """Give up the RRefs of this worker. Other workers' values go when nobody holds them."""
    registry.current_agent().book.delete_all_users()


def _check_leaks(agent: Agent) -> None:
    if _ignore_rref_leak:
        return
    _wait_all_workers()  # everyone has given up its RRefs; that may still be on its way here
    deadline = time.monotonic() + _LEAK_WAIT_SECS
    while (num_held := agent.book.counts()["num_owner_rrefs"]) and time.monotonic() < deadline:
        _polling.wait(0.002)
    _wait_all_workers()  # nobody leaves before all have looked: its RRefs would go with it
    if num_held:
        raise StateError(
            f"Leaking RRef: {num_held} values on worker '{agent.info.name}' are still held by RRefs of other "
            "workers."
        )

"""Which agent a thread's calls go through.

A process has one agent as a rule. Where ranks are threads it has several: a thread that called init_rpc uses
the agent that it made, and so do the threads of that agent's pool.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from weft import rank_thread
from weft.errors import StateError
from weft.rank_thread import EnterWorld

if TYPE_CHECKING:
    from weft.rpc.agent import Agent


class _Mine(threading.local):
    agent: Agent | None = None


_mine = _Mine()
_agents: list[Agent] = []
_lock = threading.Lock()
_kept: dict[str, Any] = {}
NOT_INITIALIZED = "RPC has not been initialized. Call weft.rpc.init_rpc first."


def current_agent(otherwise: str = NOT_INITIALIZED) -> Agent:
    """The agent of this thread; raises StateError when there is none."""
    agent = find_agent()
    if agent is None:
        raise StateError(otherwise)
    return agent


def find_agent() -> Agent | None:
    """The agent of this thread, if there is one."""
    mine = _mine.agent
    if mine is not None and not mine.is_ended:
        return mine
    # Threads that a worker's program started use its agent; a rank has its own, or none.
    return _agents[0] if len(_agents) == 1 and not rank_thread.is_rank() else None


@contextmanager
def serving(agent: Agent, enter_world: EnterWorld) -> Generator[None]:
    """Serve for an agent inside, in its rank's world."""
    enter(agent)
    torch.init_num_threads()  # without it some operations take all cores, whatever the user has set
    with enter_world():
        yield


def enter(agent: Agent) -> None:
    """Make an agent this thread's own."""
    _mine.agent = agent


def own_agent() -> Agent | None:
    """The agent that this very thread made or serves, if it has not ended."""
    mine = _mine.agent
    return mine if mine is not None and not mine.is_ended else None


def add(agent: Agent) -> None:
    """Make an agent known to the process, and to this thread: it ends with the thread's rank."""
    with _lock:
        _agents.append(agent)
    enter(agent)
    rank_thread.at_end_of_rank(_end_worker)


def remove(agent: Agent) -> None:
    """Forget an agent that ended."""
    with _lock:
        if agent in _agents:
            _agents.remove(agent)


def keep(init_method: str, store: Any) -> None:
    """Keep a store that this process may host: others still read it when this worker has all it needs."""
    with _lock:
        _kept[init_method] = store


def _end_worker(failure: str | None) -> None:
    """End the agent of a rank whose function has ended without a shutdown; with why, if it failed."""
    agent = own_agent()
    if agent is not None:
        agent.end(None if failure is None else f"its rank failed: {failure}")


def _forget_in_child() -> None:
    """A forked child has its parent's memory, but is no worker: it must not speak in its parent's name."""
    for agent in _agents:
        agent.is_ended = True
    _agents.clear()
    _kept.clear()
    _mine.agent = None


os.register_at_fork(after_in_child=_forget_in_child)

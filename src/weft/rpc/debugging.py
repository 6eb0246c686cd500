"""Numbers about a worker's RPC, under torch's names."""

from __future__ import annotations

from weft.rpc import registry

__all__ = ["_get_debug_info", "_rref_context_get_debug_info", "enable_gil_profiling"]


def _rref_context_get_debug_info() -> dict[str, str]:
    """How many RRefs there are."""
    agent = registry.current_agent()
    counts = {**agent.book.counts(), "num_pending_futures": agent.calls.num_open}
    return {name: str(number) for name, number in counts.items()}


def _get_debug_info() -> dict[str, str]:
    """All numbers of this worker."""
    return {**_rref_context_get_debug_info(), **registry.current_agent().get_debug_info()}


def enable_gil_profiling(flag: bool) -> None:
    """Accepted and without effect: no time is taken of the interpreter's lock."""

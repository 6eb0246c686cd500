"""What code that still reaches torch's RPC, by a private name or through TorchScript, finds.

torch.futures.collect_all and wait_all fail early for weft's futures too. An annotation `RRef[T]` means
torch's, which TorchScript knows. Two private names are in wide use, and have no public form:
`torch.distributed.rpc._set_rpc_timeout` sets weft's timeout too, and futures of weft's rpc_async are waited
for at the end of torch's `api._wait_all`. torch's RPC is not imported for it, nor used: where the program has
not loaded it there is nothing to do.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from weft.rpc import registry
from weft.rpc.calls import CallFuture, collect_all
from weft.rpc.options import check_timeout

_RPC = "torch.distributed.rpc"


def rref_annotation(item: Any) -> Any:
    """torch's own `RRef[item]`; None where torch has no RPC."""
    rref = getattr(sys.modules.get("torch._jit_internal"), "RRef", None)
    return None if rref is None else rref[item]


def waited_futures() -> list[Any] | None:
    """The list that torch's `_wait_all` waits for, on this thread."""
    api = sys.modules.get(f"{_RPC}.api")
    return getattr(getattr(api, "_thread_local_var", None), "future_list", None)


def lend() -> None:
    """Lend torch's names what they need to work with weft's agent and its futures. Once is enough."""
    _lend_timeout()
    if not hasattr(torch.futures.collect_all, "weft_lent"):
        torch.futures.collect_all = _lent(torch.futures.collect_all, _collect_all)
        torch.futures.wait_all = _lent(torch.futures.wait_all, _wait_all)


def _lent(own: Any, lent: Any) -> Any:
    wrapped: Any = functools.wraps(own)(lent)
    wrapped.weft_lent = own
    return wrapped


def _collect_all(futures: list[Any]) -> Any:
    """torch.futures.collect_all; with a future of weft's among them it fails as soon as one of them does.

    torch's own sees only errors that were set in C++, and a call that failed would wait for one that is
    stuck.
    """
    if not any(isinstance(future, CallFuture) for future in futures):
        return torch.futures.collect_all.weft_lent(futures)  # pyright: ignore[reportFunctionMemberAccess]
    return collect_all(futures)


def _wait_all(futures: list[Any]) -> list[Any]:
    if not any(isinstance(future, CallFuture) for future in futures):
        return torch.futures.wait_all.weft_lent(futures)  # pyright: ignore[reportFunctionMemberAccess]
    return [future.wait() for future in collect_all(futures).wait()]


def _lend_timeout() -> None:
    """Make torch's `_set_rpc_timeout` reach weft's agent while torch's own RPC is not in use."""
    rpc: Any = sys.modules.get(_RPC)
    own = getattr(rpc, "_set_rpc_timeout", None)
    if rpc is None or own is None or hasattr(own, "weft_lent"):
        return

    def set_rpc_timeout(secs: float) -> None:
        secs = check_timeout(secs)
        agent = registry.find_agent()
        if agent is None or rpc._is_current_rpc_agent_set():
            own(secs)
        if agent is not None:
            agent.timeout_secs = secs

    rpc._set_rpc_timeout = _lent(own, set_rpc_timeout)

"""What torch's tests use of `torch.distributed.rpc._testing`: a backend whose messages are lost or late.

As with torch's module, importing it registers the backend, here one that is weft's own but for that. torch
names the messages of its protocol; those that weft sends as well can fail here, and asking for others is an
error. A message that is lost is a call that has run out of time. Only what users call is touched: every
barrier of a shutdown would take seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from weft import rpc
from weft.errors import PeerTimeoutError
from weft.rpc import backend_registry
from weft.rpc.agent import Agent
from weft.rpc.notices import read_notice
from weft.rpc.options import TensorPipeRpcBackendOptions
from weft.rpc.peers import Peer
from weft.rpc.wire import Kind

BACKEND = "FAULTY_TENSORPIPE"

# torch's names for each of weft's messages: torch sends its own functions in another way than a user's.
CALL = ("PYTHON_CALL", "SCRIPT_CALL")
REMOTE = ("PYTHON_REMOTE_CALL", "SCRIPT_REMOTE_CALL")
FETCH = ("PYTHON_RREF_FETCH_CALL", "SCRIPT_RREF_FETCH_CALL")


class FaultyOptions(TensorPipeRpcBackendOptions):
    """Which messages are lost, and which are late, by how many seconds."""

    def __init__(
        self,
        rpc_timeout: float,
        init_method: str,
        *,
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
        num_worker_threads: int = 16,
    ) -> None:
        super().__init__(
            rpc_timeout=rpc_timeout, init_method=init_method, num_worker_threads=num_worker_threads
        )
        self.messages_to_fail = messages_to_fail
        self.messages_to_delay = messages_to_delay or {}
        self.num_fail_sends = num_fail_sends


def make_faulty_agent(rpc_backend_options: FaultyOptions, **where: Any) -> Agent:
    """Join the group with weft's own agent, and let it lose and delay what it sends from then on."""
    faults = {*rpc_backend_options.messages_to_fail, *rpc_backend_options.messages_to_delay}
    if foreign := faults - {*CALL, *REMOTE, *FETCH}:
        raise NotImplementedError(f"weft sends no {', '.join(sorted(foreign))}")
    own = backend_registry.BackendType.TENSORPIPE
    agent: Agent = backend_registry.init_backend(own, rpc_backend_options=rpc_backend_options, **where)
    send = agent.send

    def send_badly(peer: Peer, kind: Kind, call_id: int, body: bytes, *buffers: list[memoryview]) -> None:
        call = agent.calls._calls.get(call_id)
        names = ("",) if call is None or call.is_internal else torch_names(kind, body)
        if any(name in rpc_backend_options.messages_to_fail for name in names):
            raise PeerTimeoutError(f"a {kind.name} to {peer.info} was lost on purpose", [peer.info.id])
        delay_secs = max(rpc_backend_options.messages_to_delay.get(name, 0) for name in names)
        if delay_secs:
            threading.Timer(delay_secs, send, (peer, kind, call_id, body, *buffers)).start()
        else:
            send(peer, kind, call_id, body, *buffers)

    agent.send = send_badly  # type: ignore[method-assign]
    return agent


def torch_names(kind: Kind, body: bytes) -> tuple[str, ...]:
    """What torch calls such a message."""
    if kind is Kind.CONTROL and read_notice(body)[0] == "fetch":
        return FETCH
    return {Kind.CALL: CALL, Kind.REMOTE: REMOTE}.get(kind, ("",))


backend_registry.register_backend(BACKEND, FaultyOptions, make_faulty_agent)
rpc.BackendType = backend_registry.BackendType  # the package's own was the type of before

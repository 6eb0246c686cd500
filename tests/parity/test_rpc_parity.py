"""One body with torch.distributed.rpc and with weft.rpc: the same values, errors, texts and RRefs.

The bodies that the other tests run with weft run here with torch: what they ask for is what torch does.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
from torch.distributed import rpc as torch_rpc

import weft
from tests.rpc_bodies import async_functions, calls, errors, lifetimes, payloads, rrefs, timeouts
from tests.rpc_bodies.crew import Crew
from tests.rpc_bodies.running import RANKS, TORCH, WEFT, Body
from tests.rpc_bodies.twins import Seen, see_all
from weft import rpc

pytestmark = pytest.mark.full

BODIES = [
    *calls.BODIES,
    *calls.ON_PROCESSES,
    *payloads.BODIES,
    *errors.BODIES,
    timeouts.a_calls_own_timeout,
    timeouts.to_here_in_time,
    *rrefs.BODIES,
    *lifetimes.BODIES,
    *async_functions.BODIES,
]


@pytest.fixture(scope="module")
def twins() -> tuple[Seen, Seen]:
    """What torch and weft showed, on processes of their own: torch's RPC begins only once in a process."""
    return see(TORCH, BODIES), see(WEFT, [])


def see(lib: str, bodies: Sequence[Body]) -> Seen:
    with Crew(RANKS) as crew:
        stores = [crew.meeting(), crew.meeting()]
        looking = [
            member.begin(see_all, lib, bodies, rank, stores) for rank, member in enumerate(crew.members)
        ]
        errors = [error for future in looking if (error := future.exception(120)) is not None]
        if errors:
            raise ExceptionGroup(f"with {lib}", errors)
        return looking[0].result()


def test_the_same_values(twins: tuple[Seen, Seen]) -> None:
    torchs, wefts = twins
    names = [name for name, (_, words) in torchs.items() if words is None]
    assert len(names) > 20
    differ = {name: (torchs[name][0], wefts[name][0]) for name in names if torchs[name][0] != wefts[name][0]}
    assert differ == {}


def test_the_same_errors(twins: tuple[Seen, Seen]) -> None:
    torchs, wefts = twins
    problems: list[str] = []
    for name, (theirs, words) in torchs.items():
        if words is None:
            continue
        ours = wefts[name][0]
        if not theirs.kinds or theirs.kinds[0] not in ours.kinds:
            problems.append(
                f"{name}: torch raises {theirs.kinds[:1]} ({theirs.text[:80]}), weft {ours.kinds[:2]}"
            )
        problems += [
            f"{name}: {words!r} is not in {lib}'s {seen.text[:200]!r}"
            for lib, seen in [("torch", theirs), ("weft", ours)]
            if words not in seen.text
        ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    "name", ["init_rpc", "shutdown", "rpc_sync", "rpc_async", "remote", "get_worker_info"]
)
def test_the_same_signatures(name: str) -> None:
    def parameters(function: Any) -> list[tuple[str, Any, Any]]:
        signature = inspect.signature(function)
        return [(each.name, each.kind, each.default) for each in signature.parameters.values()]

    assert parameters(getattr(rpc, name)) == parameters(getattr(torch_rpc, name))


def test_the_options_have_the_same_names() -> None:
    theirs = inspect.signature(torch_rpc.TensorPipeRpcBackendOptions).parameters
    ours = inspect.signature(rpc.TensorPipeRpcBackendOptions).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert set(ours) - set(theirs) == {"secret", "listen", "allow", "max_in_flight"}
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default
        assert ours[name].kind is inspect.Parameter.KEYWORD_ONLY
    made, torchs = rpc.TensorPipeRpcBackendOptions(), torch_rpc.TensorPipeRpcBackendOptions()
    for name in ["rpc_timeout", "init_method", "num_worker_threads", "device_maps", "devices"]:
        assert getattr(made, name) == getattr(torchs, name)
    assert rpc.RpcBackendOptions().rpc_timeout == torch_rpc.RpcBackendOptions().rpc_timeout


def test_names_are_there() -> None:
    functions = ["init_rpc", "shutdown", "rpc_sync", "rpc_async", "remote", "get_worker_info", "is_available"]
    names = [*functions, "RRef", "PyRRef", "WorkerInfo", "BackendType", "RpcBackendOptions"]
    names += [
        "TensorPipeRpcBackendOptions",
        "get_rpc_timeout",
        "_set_rpc_timeout",
        "functions",
        "constants",
        "api",
    ]
    names += ["backend_registry"]
    for name in names:
        assert hasattr(rpc, name), name
        assert hasattr(torch_rpc, name) or name == "constants", name
    for name in ["_wait_all", "_all_gather", "_barrier", "_wait_all_workers", "shutdown", "rpc_sync"]:
        assert hasattr(rpc.api, name), name
    numbers = ["DEFAULT_RPC_TIMEOUT_SEC", "DEFAULT_NUM_WORKER_THREADS", "UNSET_RPC_TIMEOUT"]
    for name in [*numbers, "DEFAULT_INIT_METHOD"]:
        assert getattr(rpc.constants, name) == getattr(torch_rpc.constants, name)
    assert rpc.RRef is rpc.PyRRef
    assert rpc.BackendType.TENSORPIPE.name == "TENSORPIPE"
    assert repr(rpc.BackendType.TENSORPIPE) == repr(torch_rpc.BackendType.TENSORPIPE)
    assert rpc.backend_registry.backend_registered("TENSORPIPE")
    assert not rpc.backend_registry.backend_registered("nothing such")
    assert weft.rpc is rpc


def test_methods_of_rrefs_are_there() -> None:
    theirs = {name for name in dir(torch_rpc.PyRRef) if not name.startswith("__")}
    public = {name for name in theirs if not name.startswith("_")} | {"_get_type", "_get_future"}
    assert public <= set(dir(rpc.RRef))

"""The same with torch.distributed.rpc and with weft.rpc: values, errors, texts and RRefs.

Tests of a worker, which the other files run with weft, run here with torch: what they ask for is what torch
does. Acts are done with both. Their outcome is a value, or an error: its types and its text. Of an error the
two must share the type (ours may be more special) and the words in the table.
"""

from __future__ import annotations

import inspect
import pickle
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc as torch_rpc
from torch.distributed.rpc import constants as torch_constants

import weft
from tests.rpc import (
    remote_functions,
    test_async_functions,
    test_calls,
    test_errors,
    test_payloads,
    test_rref_lifetimes,
    test_rrefs,
    test_timeouts,
)
from tests.rpc.crew import Crew
from tests.rpc.remote_functions import (
    Counter,
    StubbornError,
    add,
    fail_with,
    give,
    nothing,
    open_gate,
    pass_gate,
    tensor_facts,
)
from tests.rpc.test_payloads import shapes
from tests.rpc.workers import RANKS, TORCH, WEFT, Body, Worker, find_bodies_for_torch, joined, run_each
from weft import rpc

pytestmark = pytest.mark.full

BODIES = find_bodies_for_torch(
    [
        test_calls,
        test_payloads,
        test_errors,
        test_timeouts,
        test_rrefs,
        test_rref_lifetimes,
        test_async_functions,
    ]
)


@dataclass(frozen=True)
class Outcome:
    """`value`, or the names of the error's types and its text."""

    value: Any
    kinds: tuple[str, ...] = ()
    text: str = ""


def outcome(act: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(act())
    except Exception as error:
        return Outcome(None, tuple(kind.__name__ for kind in type(error).__mro__), str(error))


Seen = dict[str, tuple[Outcome, str | None]]


def values(worker: Worker) -> dict[str, Callable[[], Any]]:
    """Acts that return, each with something plain."""
    rpc, to = worker.rpc, worker.next
    x = torch.ones(3, requires_grad=True)
    linear = nn.Linear(2, 2)
    acts: dict[str, Callable[[], Any]] = {
        "str of a worker": lambda: str(rpc.get_worker_info(to)),
        "a leaf that requires grad": lambda: rpc.rpc_sync(to, tensor_facts, (x,)),
        "a result of operators": lambda: rpc.rpc_sync(to, tensor_facts, (x * 2,)),
        "a detached one": lambda: rpc.rpc_sync(to, tensor_facts, (x.detach(),)),
        "a parameter": lambda: rpc.rpc_sync(to, tensor_facts, (linear.weight,)),
        "a parameter's data": lambda: rpc.rpc_sync(to, tensor_facts, (linear.weight.data,)),
        "a leaf there and back": lambda: tensor_facts(rpc.rpc_sync(to, give, (x,))),
        "an operator of one": lambda: tensor_facts(rpc.rpc_sync(to, torch.mul, (x, 2))),
        "a sum": lambda: rpc.rpc_sync(to, torch.add, (torch.ones(2), 1)).tolist(),
        "promoted": lambda: str(rpc.rpc_sync(to, torch.add, (torch.ones(2, dtype=torch.int8), 1.5)).dtype),
        "a future's value": lambda: rpc.rpc_async(to, add, (1, 2)).then(lambda f: f.value() + 1).wait(),
        "an RRef's names": lambda: rref_names(worker),
        "default timeout": rpc.get_rpc_timeout,
        "nothing": lambda: rpc.rpc_sync(to, nothing),
        "args as a list": lambda: rpc.rpc_sync(to, add, [1, 2]),
    }
    for i, tensor in enumerate(shapes()):
        acts[f"facts of shape {i}"] = lambda tensor=tensor: rpc.rpc_sync(to, tensor_facts, (tensor,))
    return acts


def rref_names(worker: Worker) -> list[Any]:
    theirs, mine = worker.rpc.remote(worker.next, Counter, (5,)), worker.rpc.RRef(3)
    facts = [theirs.owner_name(), theirs.is_owner(), theirs.to_here().value, theirs._get_type().__name__]
    facts += [
        mine.owner_name(),
        mine.is_owner(),
        mine.to_here(),
        mine.local_value(),
        mine.confirmed_by_owner(),
    ]
    return [*facts, str(theirs).split("(")[0], str(mine).split("(")[0]]


def errors(worker: Worker) -> dict[str, tuple[Callable[[], Any], str]]:
    """Acts that raise, each with the words that both libraries must use."""
    rpc, to = worker.rpc, worker.next
    user = rpc.remote(to, Counter, (5,))
    user.to_here()
    return {
        "an unknown name": (lambda: rpc.rpc_sync("nobody", nothing), "nobody"),
        "no worker at all": (lambda: rpc.rpc_sync(None, nothing), "Cannot get WorkerInfo from name None"),
        "no function": (lambda: rpc.rpc_sync(to, 3), "function should be callable."),
        "too few arguments": (lambda: rpc.rpc_sync(to, add), "missing 2 required positional arguments"),
        "sizes that don't fit": (
            lambda: rpc.rpc_sync(to, torch.add, (torch.ones(2), torch.ones(3))),
            "size of tensor",
        ),
        "an error": (lambda: rpc.rpc_sync(to, fail_with, (ValueError, "some text")), "some text"),
        "an error in a future": (lambda: rpc.rpc_async(to, fail_with, (ValueError, "text")).wait(), "text"),
        "an error of a value": (lambda: rpc.remote(to, fail_with, (ValueError, "text")).to_here(), "text"),
        "a stubborn error": (
            lambda: rpc.rpc_sync(to, fail_with, (StubbornError, True, "stubborn")),
            "Failed to create original exception type.",
        ),
        "no lock": (lambda: rpc.rpc_sync(to, give, (remote_functions._lock,)), "cannot pickle"),
        "a future as argument": (
            lambda: rpc.rpc_sync(to, give, (torch.futures.Future(),)),
            "Can not pickle torch.futures.Future",
        ),
        "local value of a user": (user.local_value, "can't call localValue() on user"),
        "pickle of an RRef": (
            lambda: pickle.dumps(user),
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC",
        ),
        "no such method": (lambda: user.rpc_sync().no_such_method(), "no_such_method"),
        "backward of a user": (user.backward, "User RRefs require 'dist_autograd_ctx_id' to be specified"),
        "backward of a text": (
            lambda: rpc.RRef("foo").backward(),
            "RRef should contain a tensor for .backward()",
        ),
        "a hint": (lambda: rpc.RRef(3, type_hint=int), "type_hint should only be specified when the RRef"),
        "a bad name": (lambda: rpc.WorkerInfo("a b", 1), "Worker name must match ^[A-Za-z0-9-_:]*$"),
        "a timeout": (
            lambda: time_out(worker),
            "RPC ran for more than set timeout (250 ms) and will now be marked",
        ),
        "init again": (lambda: init_again(worker), "RPC is already initialized"),
        "a function that the callee lacks": (lambda: call_unknown(worker), "RPC pickler does not serialize"),
    }


def init_again(worker: Worker) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = worker.rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store")
        worker.rpc.init_rpc("worker9", rank=0, world_size=1, rpc_backend_options=options)


def time_out(worker: Worker) -> None:
    try:
        worker.rpc.rpc_sync(worker.next, pass_gate, (worker.lib, "twins"), timeout=0.25)
    finally:
        worker.rpc.rpc_sync(worker.next, open_gate, (worker.lib, "twins"))


def call_unknown(worker: Worker) -> None:
    def only_here() -> None: ...

    only_here.__module__, only_here.__qualname__ = remote_functions.__name__, "only_here"
    module: Any = remote_functions
    module.only_here = only_here
    try:
        worker.rpc.rpc_sync(worker.next, only_here)
    finally:
        del module.only_here


AFTER: dict[str, tuple[Callable[[Any], Any], str]] = {
    "call after": (lambda rpc: rpc.rpc_sync("worker0", nothing), "RPC has not been initialized. Call"),
    "remote after": (lambda rpc: rpc.remote("worker0", nothing), "RPC has not been initialized. Call"),
    "info after": (lambda rpc: rpc.get_worker_info(), "RPC has not been initialized. Call"),
    "shutdown after": (lambda rpc: rpc.shutdown(), "RPC has not been initialized. Call"),
}


def see_all(lib: str, bodies: Sequence[Body], rank: int, stores: Sequence[str]) -> Seen:
    """Run the bodies; then, on the first worker, every act: its outcome and the words it must have.

    Of the two stores one is for the process group that the bodies' barriers need, one for RPC.
    """
    seen: Seen = {}
    dist.init_process_group("gloo", init_method=stores[0], rank=rank, world_size=RANKS)
    with joined(lib, init_method=stores[1]) as worker:
        run_each(worker, bodies)
        if worker.rank == 0:
            seen |= {name: (outcome(act), None) for name, act in values(worker).items()}
            seen |= {
                name: (outcome(lambda a=act: repr(a())), words)
                for name, (act, words) in errors(worker).items()
            }
        dist.barrier()
    for name, (act, words) in AFTER.items():
        seen[name] = outcome(lambda act=act, rpc=worker.rpc: act(rpc)), words
    dist.destroy_process_group()
    return seen


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


@pytest.mark.processes
def test_the_same_values(twins: tuple[Seen, Seen]) -> None:
    torchs, wefts = twins
    names = [name for name, (_, words) in torchs.items() if words is None]
    assert len(names) > 20
    differ = {name: (torchs[name][0], wefts[name][0]) for name in names if torchs[name][0] != wefts[name][0]}
    assert differ == {}


@pytest.mark.processes
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
        assert getattr(rpc.constants, name) == getattr(torch_constants, name)
    assert rpc.RRef is rpc.PyRRef
    assert rpc.BackendType.TENSORPIPE.name == "TENSORPIPE"
    assert repr(rpc.BackendType.TENSORPIPE) == repr(torch_rpc.BackendType.TENSORPIPE)  # type: ignore[attr-defined]
    assert rpc.backend_registry.backend_registered("TENSORPIPE")
    assert not rpc.backend_registry.backend_registered("nothing such")
    assert weft.rpc is rpc


def test_methods_of_rrefs_are_there() -> None:
    theirs = {name for name in dir(torch_rpc.PyRRef) if not name.startswith("__")}
    public = {name for name in theirs if not name.startswith("_")} | {"_get_type", "_get_future"}
    assert public <= set(dir(rpc.RRef))

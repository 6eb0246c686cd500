"""What one body sees with torch.distributed.rpc and with weft.rpc, to be compared.

An outcome is a value, or an error: its types and its text. Of an error the twins must share the type (ours
may be more special) and the words in the table.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.rpc.remote_functions import StubbornError, fail_with
from tests.rpc_bodies import places
from tests.rpc_bodies.payloads import shapes
from tests.rpc_bodies.places import Counter, add, give, nothing, open_gate, pass_gate, tensor_facts
from tests.rpc_bodies.running import RANKS, Body, Worker, joined, run_each


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


def values(w: Worker) -> dict[str, Callable[[], Any]]:
    """Acts that return, each with something plain."""
    rpc, to = w.rpc, w.next
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
        "an RRef's names": lambda: rref_names(w),
        "default timeout": rpc.get_rpc_timeout,
        "nothing": lambda: rpc.rpc_sync(to, nothing),
        "args as a list": lambda: rpc.rpc_sync(to, add, [1, 2]),
    }
    for i, tensor in enumerate(shapes()):
        acts[f"facts of shape {i}"] = lambda tensor=tensor: rpc.rpc_sync(to, tensor_facts, (tensor,))
    return acts


def rref_names(w: Worker) -> list[Any]:
    theirs, mine = w.rpc.remote(w.next, Counter, (5,)), w.rpc.RRef(3)
    facts = [theirs.owner_name(), theirs.is_owner(), theirs.to_here().value, theirs._get_type().__name__]
    facts += [
        mine.owner_name(),
        mine.is_owner(),
        mine.to_here(),
        mine.local_value(),
        mine.confirmed_by_owner(),
    ]
    return [*facts, str(theirs).split("(")[0], str(mine).split("(")[0]]


def errors(w: Worker) -> dict[str, tuple[Callable[[], Any], str]]:
    """Acts that raise, each with the words that both libraries must use."""
    rpc, to = w.rpc, w.next
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
        "no lock": (lambda: rpc.rpc_sync(to, give, (places._lock,)), "cannot pickle"),
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
            lambda: time_out(w),
            "RPC ran for more than set timeout (250 ms) and will now be marked",
        ),
        "init again": (lambda: init_again(w), "RPC is already initialized"),
        "a function that the callee lacks": (lambda: call_unknown(w), "RPC pickler does not serialize"),
    }


def init_again(w: Worker) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = w.rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store")
        w.rpc.init_rpc("worker9", rank=0, world_size=1, rpc_backend_options=options)


def time_out(w: Worker) -> None:
    try:
        w.rpc.rpc_sync(w.next, pass_gate, (w.lib, "twins"), timeout=0.25)
    finally:
        w.rpc.rpc_sync(w.next, open_gate, (w.lib, "twins"))


def call_unknown(w: Worker) -> None:
    def only_here() -> None: ...

    only_here.__module__, only_here.__qualname__ = places.__name__, "only_here"
    places.only_here = only_here
    try:
        w.rpc.rpc_sync(w.next, only_here)
    finally:
        del places.only_here


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

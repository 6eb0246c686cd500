"""RRefs: whose value it is, how it is reached from each worker, and how errors surface."""

from __future__ import annotations

import pickle
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.ranks import run_on
from tests.rpc.remote_functions import (
    Counter,
    OwnError,
    add,
    drop,
    fail_with,
    give,
    keep,
    kept,
    me,
    open_gate,
    pass_gate,
    spot,
)
from tests.rpc.workers import Worker, wait_until, weft_only

pytestmark = [
    run_on(threads=3, timeout=90, collective_timeout=60),
    run_on(weft=3, timeout=90, collective_timeout=60, full=True),
]


def test_values_stay_with_the_owner(worker: Worker) -> None:
    """Each use works on one object, which never leaves its worker; to_here copies."""
    rref = worker.rpc.remote(worker.next, Counter, (5,))
    assert worker.rpc.rpc_sync(worker.next, bump_local, (rref, 2)) == 7
    assert rref.rpc_sync().bump(3) == 10
    copy = rref.to_here()
    assert copy.value == 10
    copy.bump(100)
    assert rref.to_here().value == 10
    assert rref.rpc_sync().address()[0] == worker.pids[worker.next_rank]
    assert rref.rpc_sync().address() == rref.rpc_sync().address()
    assert rref.rpc_sync().address() != copy.address()


def bump_local(rref: Any, by: int) -> int:
    return rref.local_value().bump(by)


def test_everyone_knows_the_owner(worker: Worker) -> None:
    rref = worker.rpc.remote(worker.next, add, (1, 2))
    assert rref.owner() == worker.rpc.get_worker_info(worker.next)
    assert rref.owner_name() == worker.next
    assert not rref.is_owner()
    assert rref.to_here() == 3
    with pytest.raises(RuntimeError, match=r"can't call localValue\(\) on user"):
        rref.local_value()
    # Where it comes to its owner it is the owner's.
    assert worker.rpc.rpc_sync(worker.next, facts_of, (worker.lib, rref)) == (worker.next, True, 3)
    assert worker.rpc.rpc_sync(worker.after_next, facts_of, (worker.lib, rref)) == (worker.next, False, 3)
    assert str(rref).startswith("UserRRef(")


def facts_of(lib: str, rref: Any) -> tuple[str, bool, Any]:
    assert isinstance(rref, import_module(lib).PyRRef)
    assert rref.is_owner() == (rref.owner_name() == me(lib))
    return rref.owner_name(), rref.is_owner(), rref.to_here()


def test_own_rrefs_hold_the_value_itself(worker: Worker) -> None:
    value = Counter(1)
    rref = worker.rpc.RRef(value)
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.owner() == worker.rpc.get_worker_info()
    assert rref.local_value() is value
    assert rref.to_here() is value
    assert isinstance(rref, worker.rpc.PyRRef)
    assert str(rref).startswith("OwnerRRef(")
    # Others change it through the owner, not through a copy.
    worker.rpc.rpc_sync(worker.next, bump_at_owner, (worker.lib, rref))
    assert value.value == 2


def bump_at_owner(lib: str, rref: Any) -> None:
    import_module(lib).rpc_sync(rref.owner(), bump_local, (rref, 1))


def test_remote_to_oneself_is_the_owners(worker: Worker) -> None:
    rref = worker.rpc.remote(worker.name, Counter, (5,))
    assert rref.is_owner()
    assert rref.owner_name() == worker.name
    assert rref.to_here().value == 5
    assert rref.local_value() is rref.local_value()
    assert rref.rpc_sync().bump() == 6
    assert rref.local_value().value == 6


def test_rrefs_travel_within_things(worker: Worker) -> None:
    rref = worker.rpc.remote(worker.next, Counter, (5,))
    holder = Holder(rref)
    for thing in [[rref], {"a": (rref,)}, holder, [[{"x": [rref, rref]}]]]:
        for to in [worker.next, worker.after_next, worker.name]:
            found = worker.rpc.rpc_sync(to, find_and_read, (thing,))
            assert set(found) == {5}
    there = worker.rpc.rpc_sync(worker.after_next, give, ([holder, {"k": rref}],))
    assert there[0].rref.to_here().value == 5
    assert there[1]["k"].rpc_sync().get() == 5


class Holder:
    def __init__(self, rref: Any) -> None:
        self.rref = rref


def find_and_read(thing: Any) -> list[int]:
    if isinstance(thing, dict):
        thing = list(thing.values())
    if isinstance(thing, list | tuple):
        return [value for part in thing for value in find_and_read(part)]
    return [(thing.rref if isinstance(thing, Holder) else thing).to_here().value]


def test_rrefs_are_returned(worker: Worker) -> None:
    # Of the callee's own, of a third worker's, of the caller's own.
    rref = worker.rpc.rpc_sync(worker.next, make_own, (worker.lib, 4))
    assert (rref.owner_name(), rref.is_owner(), rref.to_here().value) == (worker.next, False, 4)
    rref = worker.rpc.rpc_sync(worker.next, make_remote, (worker.lib, worker.after_next, 5))
    assert (rref.owner_name(), rref.is_owner(), rref.to_here().value) == (worker.after_next, False, 5)
    rref = worker.rpc.rpc_sync(worker.next, make_remote, (worker.lib, worker.name, 6))
    assert (rref.owner_name(), rref.is_owner(), rref.local_value().value) == (worker.name, True, 6)
    mine = worker.rpc.RRef(Counter(7))
    back = worker.rpc.rpc_sync(worker.next, give, (mine,))
    assert back.local_value() is mine.local_value()


def make_own(lib: str, start: int) -> Any:
    return import_module(lib).RRef(Counter(start))


def make_remote(lib: str, to: str, start: int) -> Any:
    return import_module(lib).remote(to, Counter, (start,))


def test_rrefs_hold_rrefs(worker: Worker) -> None:
    outer = worker.rpc.remote(worker.next, make_remote, (worker.lib, worker.after_next, 5))
    inner = outer.to_here()
    assert (outer.owner_name(), inner.owner_name()) == (worker.next, worker.after_next)
    assert inner.to_here().value == 5


def test_workers_share_what_one_was_sent(worker: Worker) -> None:
    """A worker keeps what it was sent; the sender may forget it."""
    rref = worker.rpc.remote(worker.next, Counter, (5,))
    worker.rpc.rpc_sync(worker.after_next, keep, (worker.lib, f"shared by {worker.name}", rref))
    del rref
    assert worker.rpc.rpc_sync(worker.after_next, bump_kept, (worker.lib, f"shared by {worker.name}")) == 6
    again = worker.rpc.rpc_sync(worker.after_next, kept, (worker.lib, f"shared by {worker.name}"))
    assert again.rpc_sync().get() == 6
    worker.rpc.rpc_sync(worker.after_next, drop, (worker.lib, f"shared by {worker.name}"))
    assert again.rpc_sync().get() == 6


def bump_kept(lib: str, key: str) -> int:
    return kept(lib, key).rpc_sync().bump()


def test_values_may_be_arguments_before_they_are_made(worker: Worker) -> None:
    """An RRef may be sent on while its value is still being made."""
    rref = worker.rpc.remote(worker.next, pass_gate, (worker.lib, f"later {worker.name}", 5))
    at_third = worker.rpc.rpc_async(worker.after_next, read, (rref,))
    at_owner = worker.rpc.rpc_async(worker.next, read, (rref,))
    assert not at_third.done()
    worker.rpc.rpc_sync(worker.next, open_gate, (worker.lib, f"later {worker.name}"))
    assert (at_third.wait(), at_owner.wait(), rref.to_here()) == (5, 5, 5)


def read(rref: Any) -> Any:
    return rref.to_here()


def test_owners_confirm(worker: Worker) -> None:
    rref = worker.rpc.remote(worker.next, add, (1, 2))
    assert rref.to_here() == 3
    wait_until(rref.confirmed_by_owner, "confirmed by the owner")


def test_proxies_call_methods(worker: Worker) -> None:
    rref = worker.rpc.remote(worker.next, Counter, (5,))
    assert rref.rpc_sync().bump() == 6
    assert rref.rpc_sync().bump(by=4) == 10
    assert rref.rpc_async().bump(10).wait() == 20
    made = rref.remote().bump(5)
    assert made.owner_name() == worker.next
    assert made.to_here() == 25
    assert rref.rpc_sync().make(3).value == 3
    assert rref.rpc_sync().scale(3, 4) == 12
    tensors = worker.rpc.remote(worker.next, give, (torch.ones(2),))
    assert tensors.rpc_sync().add(1).tolist() == [2.0, 2.0]
    assert tensors.rpc_sync().size() == (2,)
    for use in [rref.rpc_sync, rref.remote]:
        with pytest.raises(AttributeError, match="no_such_method"):
            use().no_such_method()
    with pytest.raises(Exception, match="no_such_method"):
        rref.rpc_async().no_such_method().wait()
    with pytest.raises(ValueError, match="from the method"):
        rref.rpc_sync().fail("from the method")
    with pytest.raises(ValueError, match="from the method"):
        rref.rpc_async().fail("from the method").wait()
    with pytest.raises(ValueError, match="from the method"):
        rref.remote().fail("from the method").to_here()
    mine = worker.rpc.RRef(Counter(1))
    assert mine.rpc_sync().bump() == 2
    assert mine.local_value().value == 2


def test_types_are_known(worker: Worker) -> None:
    rref = worker.rpc.remote(worker.next, Counter, (5,))
    assert rref._get_type() is Counter
    fresh = worker.rpc.remote(worker.next, Counter, (5,))
    assert fresh._get_type(timeout=20, blocking=False).wait() is Counter
    assert worker.rpc.RRef([1])._get_type() is list
    rref._get_future().wait()


def test_errors_surface(worker: Worker) -> None:
    """remote() returns at once; who reads the value gets the error, everywhere and each time."""
    rref = worker.rpc.remote(worker.next, fail_with, (OwnError, "no value"))
    for _ in range(2):
        with pytest.raises(ValueError, match="no value"):
            rref.to_here()
    with pytest.raises(Exception, match="no value"):
        worker.rpc.rpc_sync(worker.after_next, read, (rref,))
    with pytest.raises(Exception, match="no value"):
        rref.rpc_sync().anything()
    assert worker.rpc.rpc_sync(worker.next, add, (1, 2)) == 3


def test_pickle_refuses_them(worker: Worker) -> None:
    rref = worker.rpc.remote(worker.next, add, (1, 2))
    for thing in [rref, worker.rpc.RRef(3), [rref]]:
        with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler, rref can only"):
            pickle.dumps(thing)
    assert rref.to_here() == 3


def test_backward_runs_on_the_owner(worker: Worker) -> None:
    x = torch.ones(3, requires_grad=True)
    worker.rpc.RRef((x * 2).sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(RuntimeError, match=r"RRef should contain a tensor for \.backward\(\)"):
        worker.rpc.RRef("foo").backward()
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        worker.rpc.RRef(torch.rand(10, requires_grad=True)).backward()
    with pytest.raises(RuntimeError, match="does not require grad and does not have a grad_fn"):
        worker.rpc.RRef(torch.rand(10)).backward()
    user = worker.rpc.remote(worker.next, give, (torch.ones(1),))
    with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id' to be specified"):
        user.backward()
    user.to_here()


@weft_only  # torch takes no notice of retain_graph on the owner
def test_graphs_may_be_kept(worker: Worker) -> None:
    x = torch.ones(3, requires_grad=True)
    rref = worker.rpc.RRef(x.square().sum())
    rref.backward(retain_graph=True)
    rref.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 4.0, 4.0]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        rref.backward()


def test_methods_run_where_the_value_is(worker: Worker) -> None:
    rref = worker.rpc.remote(worker.next, Anchored, (worker.lib,))
    for seen in [rref.rpc_sync().where(), rref.rpc_async().where().wait(), rref.remote().where().to_here()]:
        assert (seen.worker, seen.pid) == (worker.next, worker.pids[worker.next_rank])
    born = rref.rpc_sync().birthplace()
    assert (born.worker, born.pid) == (worker.next, worker.pids[worker.next_rank])


class Anchored:
    def __init__(self, lib: str) -> None:
        self.lib, self.born = lib, spot(lib)

    def where(self) -> Any:
        return spot(self.lib)

    def birthplace(self) -> Any:
        return self.born


def call_method(method: Any, rref: Any, *args: Any) -> Any:
    """The way that training scripts write it: an unbound method, and the RRef of its object."""
    return method(rref.local_value(), *args)


def remote_method(lib: str, method: Any, rref: Any, *args: Any) -> Any:
    return import_module(lib).rpc_async(rref.owner(), call_method, (method, rref, *args))


class Layer(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(factor))
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return (x * self.weight).detach()

    def calls(self) -> int:
        return self.num_calls


class Trainer:
    """Made on each trainer, with RRefs to layers that are elsewhere."""

    def __init__(self, lib: str, layers: list[Any]) -> None:
        self.lib, self.layers = lib, layers

    def train(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = remote_method(self.lib, Layer.forward, layer, x).wait()
        return x


def test_trainers_use_layers_elsewhere(worker: Worker) -> None:
    """One master has layers made on two workers and trainers on all, and the trainers use the layers."""
    if worker.rank == 0:
        layers = [
            worker.rpc.remote(worker.next, Layer, (2.0,)),
            worker.rpc.remote(worker.after_next, Layer, (3.0,)),
        ]
        names = [f"worker{rank}" for rank in range(worker.size)]
        trainers = [worker.rpc.remote(name, Trainer, (worker.lib, layers)) for name in names]
        for step in range(3):
            x = torch.full((4,), float(step + 1))
            futures = [remote_method(worker.lib, Trainer.train, trainer, x) for trainer in trainers]
            for future in futures:
                assert torch.equal(future.wait(), x * 6)
        for layer in layers:
            assert remote_method(worker.lib, Layer.calls, layer).wait() == 3 * worker.size

"""RRefs: whose value it is, how it is reached from each worker, and how errors surface."""

from __future__ import annotations

import pickle
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.rpc.remote_functions import OwnError, fail_with
from tests.rpc_bodies.places import Counter, add, drop, give, keep, kept, me, open_gate, pass_gate, spot
from tests.rpc_bodies.running import Worker, wait_until


def values_stay_with_the_owner(w: Worker) -> None:
    """Each use works on one object, which never leaves its worker; to_here copies."""
    rref = w.rpc.remote(w.next, Counter, (5,))
    assert w.rpc.rpc_sync(w.next, bump_local, (rref, 2)) == 7
    assert rref.rpc_sync().bump(3) == 10
    copy = rref.to_here()
    assert copy.value == 10
    copy.bump(100)
    assert rref.to_here().value == 10
    assert rref.rpc_sync().address()[0] == w.pids[w.next_rank]
    assert rref.rpc_sync().address() == rref.rpc_sync().address()
    assert rref.rpc_sync().address() != copy.address()


def bump_local(rref: Any, by: int) -> int:
    return rref.local_value().bump(by)


def owners(w: Worker) -> None:
    rref = w.rpc.remote(w.next, add, (1, 2))
    assert rref.owner() == w.rpc.get_worker_info(w.next)
    assert rref.owner_name() == w.next
    assert not rref.is_owner()
    assert rref.to_here() == 3
    with pytest.raises(RuntimeError, match=r"can't call localValue\(\) on user"):
        rref.local_value()
    # Where it comes to its owner it is the owner's.
    assert w.rpc.rpc_sync(w.next, facts_of, (w.lib, rref)) == (w.next, True, 3)
    assert w.rpc.rpc_sync(w.after_next, facts_of, (w.lib, rref)) == (w.next, False, 3)
    assert str(rref).startswith("UserRRef(")


def facts_of(lib: str, rref: Any) -> tuple[str, bool, Any]:
    assert isinstance(rref, import_module(lib).PyRRef)
    assert rref.is_owner() == (rref.owner_name() == me(lib))
    return rref.owner_name(), rref.is_owner(), rref.to_here()


def own_rrefs(w: Worker) -> None:
    value = Counter(1)
    rref = w.rpc.RRef(value)
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.owner() == w.rpc.get_worker_info()
    assert rref.local_value() is value
    assert rref.to_here() is value
    assert isinstance(rref, w.rpc.PyRRef)
    assert str(rref).startswith("OwnerRRef(")
    # Others change it through the owner, not through a copy.
    w.rpc.rpc_sync(w.next, bump_at_owner, (w.lib, rref))
    assert value.value == 2


def bump_at_owner(lib: str, rref: Any) -> None:
    import_module(lib).rpc_sync(rref.owner(), bump_local, (rref, 1))


def remote_to_oneself(w: Worker) -> None:
    rref = w.rpc.remote(w.name, Counter, (5,))
    assert rref.is_owner()
    assert rref.owner_name() == w.name
    assert rref.to_here().value == 5
    assert rref.local_value() is rref.local_value()
    assert rref.rpc_sync().bump() == 6
    assert rref.local_value().value == 6


def rrefs_within_things(w: Worker) -> None:
    rref = w.rpc.remote(w.next, Counter, (5,))
    holder = Holder(rref)
    for thing in [[rref], {"a": (rref,)}, holder, [[{"x": [rref, rref]}]]]:
        for to in [w.next, w.after_next, w.name]:
            found = w.rpc.rpc_sync(to, find_and_read, (thing,))
            assert set(found) == {5}
    there = w.rpc.rpc_sync(w.after_next, give, ([holder, {"k": rref}],))
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


def rrefs_returned(w: Worker) -> None:
    # Of the callee's own, of a third worker's, of the caller's own.
    rref = w.rpc.rpc_sync(w.next, make_own, (w.lib, 4))
    assert (rref.owner_name(), rref.is_owner(), rref.to_here().value) == (w.next, False, 4)
    rref = w.rpc.rpc_sync(w.next, make_remote, (w.lib, w.after_next, 5))
    assert (rref.owner_name(), rref.is_owner(), rref.to_here().value) == (w.after_next, False, 5)
    rref = w.rpc.rpc_sync(w.next, make_remote, (w.lib, w.name, 6))
    assert (rref.owner_name(), rref.is_owner(), rref.local_value().value) == (w.name, True, 6)
    mine = w.rpc.RRef(Counter(7))
    back = w.rpc.rpc_sync(w.next, give, (mine,))
    assert back.local_value() is mine.local_value()


def make_own(lib: str, start: int) -> Any:
    return import_module(lib).RRef(Counter(start))


def make_remote(lib: str, to: str, start: int) -> Any:
    return import_module(lib).remote(to, Counter, (start,))


def rrefs_of_rrefs(w: Worker) -> None:
    outer = w.rpc.remote(w.next, make_remote, (w.lib, w.after_next, 5))
    inner = outer.to_here()
    assert (outer.owner_name(), inner.owner_name()) == (w.next, w.after_next)
    assert inner.to_here().value == 5


def shared_between_workers(w: Worker) -> None:
    """A worker keeps what it was sent; the sender may forget it."""
    rref = w.rpc.remote(w.next, Counter, (5,))
    w.rpc.rpc_sync(w.after_next, keep, (w.lib, f"shared by {w.name}", rref))
    del rref
    assert w.rpc.rpc_sync(w.after_next, bump_kept, (w.lib, f"shared by {w.name}")) == 6
    again = w.rpc.rpc_sync(w.after_next, kept, (w.lib, f"shared by {w.name}"))
    assert again.rpc_sync().get() == 6
    w.rpc.rpc_sync(w.after_next, drop, (w.lib, f"shared by {w.name}"))
    assert again.rpc_sync().get() == 6


def bump_kept(lib: str, key: str) -> int:
    return kept(lib, key).rpc_sync().bump()


def arguments_before_they_are_made(w: Worker) -> None:
    """An RRef may be sent on while its value is still being made."""
    rref = w.rpc.remote(w.next, pass_gate, (w.lib, f"later {w.name}", 5))
    at_third = w.rpc.rpc_async(w.after_next, read, (rref,))
    at_owner = w.rpc.rpc_async(w.next, read, (rref,))
    assert not at_third.done()
    w.rpc.rpc_sync(w.next, open_gate, (w.lib, f"later {w.name}"))
    assert (at_third.wait(), at_owner.wait(), rref.to_here()) == (5, 5, 5)


def read(rref: Any) -> Any:
    return rref.to_here()


def confirmations(w: Worker) -> None:
    rref = w.rpc.remote(w.next, add, (1, 2))
    assert rref.to_here() == 3
    wait_until(rref.confirmed_by_owner, "confirmed by the owner")


def proxies(w: Worker) -> None:
    rref = w.rpc.remote(w.next, Counter, (5,))
    assert rref.rpc_sync().bump() == 6
    assert rref.rpc_sync().bump(by=4) == 10
    assert rref.rpc_async().bump(10).wait() == 20
    made = rref.remote().bump(5)
    assert made.owner_name() == w.next
    assert made.to_here() == 25
    assert rref.rpc_sync().make(3).value == 3
    assert rref.rpc_sync().scale(3, 4) == 12
    tensors = w.rpc.remote(w.next, give, (torch.ones(2),))
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
    mine = w.rpc.RRef(Counter(1))
    assert mine.rpc_sync().bump() == 2
    assert mine.local_value().value == 2


def types(w: Worker) -> None:
    rref = w.rpc.remote(w.next, Counter, (5,))
    assert rref._get_type() is Counter
    fresh = w.rpc.remote(w.next, Counter, (5,))
    assert fresh._get_type(timeout=20, blocking=False).wait() is Counter
    assert w.rpc.RRef([1])._get_type() is list
    rref._get_future().wait()


def errors_surface(w: Worker) -> None:
    """remote() returns at once; who reads the value gets the error, everywhere and each time."""
    rref = w.rpc.remote(w.next, fail_with, (OwnError, "no value"))
    for _ in range(2):
        with pytest.raises(ValueError, match="no value"):
            rref.to_here()
    with pytest.raises(Exception, match="no value"):
        w.rpc.rpc_sync(w.after_next, read, (rref,))
    with pytest.raises(Exception, match="no value"):
        rref.rpc_sync().anything()
    assert w.rpc.rpc_sync(w.next, add, (1, 2)) == 3


def not_through_pickle(w: Worker) -> None:
    rref = w.rpc.remote(w.next, add, (1, 2))
    for thing in [rref, w.rpc.RRef(3), [rref]]:
        with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler, rref can only"):
            pickle.dumps(thing)
    assert rref.to_here() == 3


def backward_on_the_owner(w: Worker) -> None:
    x = torch.ones(3, requires_grad=True)
    w.rpc.RRef((x * 2).sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(RuntimeError, match=r"RRef should contain a tensor for \.backward\(\)"):
        w.rpc.RRef("foo").backward()
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        w.rpc.RRef(torch.rand(10, requires_grad=True)).backward()
    with pytest.raises(RuntimeError, match="does not require grad and does not have a grad_fn"):
        w.rpc.RRef(torch.rand(10)).backward()
    user = w.rpc.remote(w.next, give, (torch.ones(1),))
    with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id' to be specified"):
        user.backward()
    user.to_here()


def graphs_may_be_kept(w: Worker) -> None:
    x = torch.ones(3, requires_grad=True)
    rref = w.rpc.RRef(x.square().sum())
    rref.backward(retain_graph=True)
    rref.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, 4.0, 4.0]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        rref.backward()


def where_methods_run(w: Worker) -> None:
    rref = w.rpc.remote(w.next, Anchored, (w.lib,))
    for seen in [rref.rpc_sync().where(), rref.rpc_async().where().wait(), rref.remote().where().to_here()]:
        assert (seen.worker, seen.pid) == (w.next, w.pids[w.next_rank])
    born = rref.rpc_sync().birthplace()
    assert (born.worker, born.pid) == (w.next, w.pids[w.next_rank])


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


def trainers_and_layers(w: Worker) -> None:
    """One master has layers made on two workers and trainers on all, and the trainers use the layers."""
    if w.rank == 0:
        layers = [w.rpc.remote(w.next, Layer, (2.0,)), w.rpc.remote(w.after_next, Layer, (3.0,))]
        names = [f"worker{rank}" for rank in range(w.size)]
        trainers = [w.rpc.remote(name, Trainer, (w.lib, layers)) for name in names]
        for step in range(3):
            x = torch.full((4,), float(step + 1))
            futures = [remote_method(w.lib, Trainer.train, trainer, x) for trainer in trainers]
            for future in futures:
                assert torch.equal(future.wait(), x * 6)
        for layer in layers:
            assert remote_method(w.lib, Layer.calls, layer).wait() == 3 * w.size


BODIES = [
    values_stay_with_the_owner,
    owners,
    own_rrefs,
    remote_to_oneself,
    rrefs_within_things,
    rrefs_returned,
    rrefs_of_rrefs,
    shared_between_workers,
    arguments_before_they_are_made,
    confirmations,
    proxies,
    types,
    errors_surface,
    not_through_pickle,
    backward_on_the_owner,
    where_methods_run,
    trainers_and_layers,
]
WEFT_ONLY = [graphs_may_be_kept]  # torch takes no notice of retain_graph on the owner

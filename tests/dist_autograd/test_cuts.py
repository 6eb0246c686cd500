"""Where the graph is cut: every way in which a tensor comes from one worker to another, and back."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from tests.dist_autograd.leaves import (
    Planted,
    added,
    autograd,
    check,
    leaf,
    own,
    plant,
    quarters,
    scale,
)
from tests.ranks import run_on
from tests.rpc.remote_functions import count, deferred, give, keep, open_gate, pass_gate, visits
from tests.rpc.workers import TORCH, WEFT, Worker, wait_until

pytestmark = [
    run_on(threads=3, timeout=90, collective_timeout=60),
    run_on(weft=3, timeout=90, collective_timeout=60, full=True),
]
EVERYDAY = run_on(threads=3, weft=3, timeout=90, collective_timeout=60)


REMOTE_MODULES = {WEFT: "weft", TORCH: "torch.distributed.nn"}


def product(x: Tensor, p: Tensor) -> Tensor:
    return (x * p).sum()


@EVERYDAY
def test_every_way_to_call(worker: Worker) -> None:
    """Arguments and results of each are cut and sewn; so is a call to oneself."""
    for to in [worker.next, worker.name]:
        for way in [call_sync, call_async, call_remote, call_by_proxy]:
            x, theirs = leaf(1, 3), plant(worker, to, 2, 3, name=way.__name__)
            with autograd(worker.lib).context() as context_id:
                y = way(worker, to, theirs.key, x)
                assert y.requires_grad
                assert not y.is_leaf
                autograd(worker.lib).backward(context_id, [y.sum()])
                check(worker, context_id, product, x, theirs)
            assert worker.rpc.rpc_sync(to, visits, (worker.lib, f"scale {theirs.key}")) == 1


def call_sync(w: Worker, to: str, key: str, x: Tensor) -> Tensor:
    return w.rpc.rpc_sync(to, scale, (w.lib, key, x))


def call_async(w: Worker, to: str, key: str, x: Tensor) -> Tensor:
    return w.rpc.rpc_async(to, scale, (w.lib, key, x)).wait()


def call_remote(w: Worker, to: str, key: str, x: Tensor) -> Tensor:
    return w.rpc.remote(to, scale, (w.lib, key, x)).to_here()


def call_by_proxy(w: Worker, to: str, key: str, x: Tensor) -> Tensor:
    return w.rpc.remote(to, Scaler, (w.lib, key)).rpc_sync().scale(x)


class Scaler:
    """A value that stays with its owner; its methods are called."""

    def __init__(self, lib: str, key: str) -> None:
        self.lib, self.key = lib, key

    def scale(self, x: Tensor) -> Tensor:
        return scale(self.lib, self.key, x)


def test_every_proxy(worker: Worker) -> None:
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    scaler = worker.rpc.remote(worker.next, Scaler, (worker.lib, theirs.key))
    with autograd(worker.lib).context() as context_id:
        first = scaler.rpc_sync().scale(x)
        second = scaler.rpc_async().scale(first).wait()
        third = scaler.remote().scale(second).to_here()
        autograd(worker.lib).backward(context_id, [third.sum()])
        check(worker, context_id, lambda x, p: (x * p * p * p).sum(), x, theirs)


def test_keyword_arguments(worker: Worker) -> None:
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, kwargs={"lib": worker.lib, "key": theirs.key, "x": x})
        autograd(worker.lib).backward(context_id, [y.sum()])
        check(worker, context_id, product, x, theirs)


def test_leaves_of_the_callee(worker: Worker) -> None:
    """Nothing that needs a gradient goes there, and something comes back."""
    theirs = plant(worker, worker.next, 2, 3)
    for way in ["sync", "to_here"]:
        with autograd(worker.lib).context() as context_id:
            if way == "sync":
                p = worker.rpc.rpc_sync(worker.next, own, (worker.lib, theirs.key))
            else:
                p = worker.rpc.remote(worker.next, own, (worker.lib, theirs.key)).to_here()
            assert not p.is_leaf
            assert type(p) is Tensor
            autograd(worker.lib).backward(context_id, [(p * p).sum()])
            check(worker, context_id, lambda p: (p * p).sum(), theirs)


def test_leaves_from_an_rref_of_old(worker: Worker) -> None:
    """An RRef that was made before the context: its value is fetched inside, by two workers."""
    rref = worker.rpc.remote(worker.next, leaf, (5, 3))
    rref.to_here()
    with autograd(worker.lib).context() as context_id:
        y = rref.to_here() * 2
        z = worker.rpc.rpc_sync(worker.after_next, fetch_and_double, (rref,)) * 3
        own_way = worker.rpc.rpc_sync(worker.next, fetch_and_double, (rref,))
        autograd(worker.lib).backward(context_id, [(y + z + own_way).sum()])
        found = worker.rpc.rpc_sync(worker.next, gradient_of_rref, (worker.lib, context_id, rref))
        assert torch.equal(found, torch.full((3,), 10.0).double())


def fetch_and_double(rref: Any) -> Tensor:
    return rref.to_here() * 2


def gradient_of_rref(lib: str, context_id: int, rref: Any) -> Tensor:
    return autograd(lib).get_gradients(context_id)[rref.local_value()]


def test_an_rref_of_mine(worker: Worker) -> None:
    """Another worker fetches it from here, within the call that it is the argument of."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, fetch_and_scale, (worker.lib, theirs.key, worker.rpc.RRef(x)))
        autograd(worker.lib).backward(context_id, [y.sum()])
        check(worker, context_id, product, x, theirs)


def fetch_and_scale(lib: str, key: str, rref: Any) -> Tensor:
    return scale(lib, key, rref.to_here())


@EVERYDAY
def test_nested_calls(worker: Worker) -> None:
    """There, on to the third, and back; each has a leaf of its own in it."""
    x = leaf(1, 3)
    second, third = plant(worker, worker.next, 2, 3), plant(worker, worker.after_next, 3, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(
            worker.next, scale_on_the_way, (worker.lib, second.key, third.worker, third.key, x)
        )
        autograd(worker.lib).backward(context_id, [y.sum()])
        check(worker, context_id, lambda x, p, q: ((x * p * q) * p).sum(), x, second, third)


def scale_on_the_way(lib: str, key: str, to: str, its_key: str, x: Tensor) -> Tensor:
    there = import_module(lib).rpc_sync(to, scale, (lib, its_key, scale(lib, key, x)))
    return scale(lib, key, there)


def test_calls_back_to_the_caller(worker: Worker) -> None:
    """A leaf of the caller is used in a call that its callee makes back; a deep ring comes home at last."""
    keep(worker.lib, f"home {worker.name}", leaf(7, 3))
    home = Planted(worker.name, f"home {worker.name}", leaf(7, 3))
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(
            worker.next, scale_on_the_way, (worker.lib, theirs.key, worker.name, home.key, x)
        )
        autograd(worker.lib).backward(context_id, [y.sum()])
        check(worker, context_id, lambda x, p, h: (x * p * h * p).sum(), x, theirs, home)
    hops = [worker.next, worker.name, worker.after_next, worker.next, worker.after_next, worker.name]
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(hops[0], ring, (worker.lib, hops[1:], x))
        autograd(worker.lib).backward(context_id, [y.sum()])
        check(worker, context_id, lambda x: (x * 2 ** len(hops)).sum(), x)


def ring(lib: str, hops: list[str], x: Tensor) -> Tensor:
    return import_module(lib).rpc_sync(hops[0], ring, (lib, hops[1:], x * 2)) if hops else x * 2


def test_one_tensor_for_many_workers(worker: Worker) -> None:
    """It is used here and by every worker, several times; what comes back of it is one sum."""
    x = leaf(1, 3)
    second, third = plant(worker, worker.next, 2, 3), plant(worker, worker.after_next, 3, 3)
    with autograd(worker.lib).context() as context_id:
        y = x * 2
        parts = [
            worker.rpc.rpc_sync(each.worker, scale, (worker.lib, each.key, y))
            for each in [second, third, second]
        ]
        autograd(worker.lib).backward(context_id, [(sum(parts) * y + y).sum()])
        check(worker, context_id, lambda x, p, q: ((4 * x * x) * (2 * p + q) + 2 * x).sum(), x, second, third)


def test_many_calls_in_flight(worker: Worker) -> None:
    """All have left before one is answered."""
    x, key = leaf(1, 4), f"many {worker.name}"
    targets = [
        plant(worker, to, 2 + i, 4, name="many")
        for i, to in enumerate([worker.next, worker.after_next, worker.name])
    ]
    with autograd(worker.lib).context() as context_id:
        futures = [
            worker.rpc.rpc_async(each.worker, scale_at_gate, (worker.lib, key, each.key, x * (i + 1)))
            for i, each in enumerate(targets * 3)
        ]
        for to in {each.worker for each in targets}:
            wait_until(
                lambda to=to: worker.rpc.rpc_sync(to, visits, (worker.lib, f"at gate {key}")) == 3, "at gate"
            )
            worker.rpc.rpc_sync(to, open_gate, (worker.lib, key))
        total = added(future.wait() for future in futures)
        autograd(worker.lib).backward(context_id, [total.sum()])

        def loss_of(x: Tensor, *leaves: Tensor) -> Tensor:
            return added((i + 1) * x * each for i, each in enumerate(list(leaves) * 3)).sum()

        check(worker, context_id, loss_of, x, *targets)


def scale_at_gate(lib: str, gate: str, key: str, x: Tensor) -> Tensor:
    pass_gate(lib, gate)
    return scale(lib, key, x)


class Bag:
    """A thing of the user's own that has tensors in it."""

    def __init__(self, first: Tensor, rest: dict[str, Any]) -> None:
        self.first, self.rest = first, rest


def test_tensors_inside_things(worker: Worker) -> None:
    """Deep inside lists, tuples, dicts, objects of the user's; there and back."""
    x, y, z = leaf(1, 3), leaf(2, 3), leaf(3, 3)
    still = quarters(4, 3)
    with autograd(worker.lib).context() as context_id:
        bag = Bag(x, {"a": [y, (z, {"b": still, "n": 3, "again": x})], "none": None})
        there = worker.rpc.rpc_sync(worker.next, rebag, (worker.lib, bag, [("text", x)]))
        assert there.first.requires_grad
        a, (b, c) = there.rest["a"], there.rest["b"]
        assert not there.rest["still"].requires_grad
        autograd(worker.lib).backward(context_id, [(there.first * a + b * c).sum()])
        check(worker, context_id, lambda x, y, z: (2 * x * y * y + z * still * (x + x)).sum(), x, y, z)
    assert worker.rpc.rpc_sync(worker.next, visits, (worker.lib, "rebag")) == 1


def rebag(lib: str, bag: Bag, more: list[tuple[str, Tensor]]) -> Bag:
    count(lib, "rebag")
    y, (z, rest) = bag.rest["a"]
    b = (z * rest["b"], rest["again"] + more[0][1])
    return Bag(bag.first * y, {"a": y * 2, "b": b, "still": rest["b"] + 1})


def test_one_tensor_twice_in_a_message(worker: Worker) -> None:
    """It, and a view of it, and it again."""
    x = leaf(1, 2, 3)
    with autograd(worker.lib).context() as context_id:
        y = x * 3
        z = worker.rpc.rpc_sync(worker.next, sum_of_products, ([y, y], y.view(6)))
        autograd(worker.lib).backward(context_id, [z])
        check(worker, context_id, lambda x: (27 * x * x * x).sum(), x)


def sum_of_products(pair: list[Tensor], flat: Tensor) -> Tensor:
    return (pair[0] * pair[1] * flat.view(2, 3)).sum()


def test_there_and_straight_back(worker: Worker) -> None:
    """What a call gives back is its argument, and goes out again."""
    x = leaf(1, 3)
    with autograd(worker.lib).context() as context_id:
        y = x
        for to in [worker.next, worker.after_next, worker.name, worker.next]:
            y = worker.rpc.rpc_sync(to, give, (y,))
        autograd(worker.lib).backward(context_id, [(y * x).sum()])
        check(worker, context_id, lambda x: (x * x).sum(), x)


def test_tensors_that_need_no_gradient_arrive_as_they_are(worker: Worker) -> None:
    """Beside those that do; a call of such ones only records nothing."""
    x, still, whole = leaf(1, 3), quarters(2, 3), torch.arange(3)
    with autograd(worker.lib).context() as context_id:
        plain = worker.rpc.rpc_sync(worker.next, torch.add, (still, 1))
        assert plain.is_leaf
        assert not plain.requires_grad
        y, seen = worker.rpc.rpc_sync(worker.next, mix, (x, still, whole))
        assert seen == [(True, False), (False, True), (False, True)]
        autograd(worker.lib).backward(context_id, [y.sum()])
        check(worker, context_id, lambda x: (x * still + whole).sum(), x)


def mix(x: Tensor, still: Tensor, whole: Tensor) -> tuple[Tensor, list[tuple[bool, bool]]]:
    facts = [(each.requires_grad, each.is_leaf) for each in (x, still, whole)]
    return x * still + whole, facts


def test_nothing_is_recorded_under_no_grad(worker: Worker) -> None:
    """The other calls of the context are recorded."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        with torch.no_grad():
            y = worker.rpc.rpc_sync(worker.next, torch.mul, (x, 3))
        assert y.is_leaf
        context = autograd(worker.lib)._current_context()
        assert (len(context._send_functions()), len(context._recv_functions())) == (0, 0)
        z = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x))
        autograd(worker.lib).backward(context_id, [(z * y.detach()).sum()])
        check(worker, context_id, lambda x, p: (x * p * 3 * x.detach()).sum(), x, theirs)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale_without_grad, (worker.lib, theirs.key, quarters(3, 3)))
        assert not y.requires_grad


def scale_without_grad(lib: str, key: str, x: Tensor) -> Tensor:
    with torch.no_grad():
        return scale(lib, key, x)


def test_detached_on_the_way(worker: Worker) -> None:
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x.detach()))
        autograd(worker.lib).backward(context_id, [(y * x).sum()])
        check(worker, context_id, lambda x, p: (x.detach() * p * x).sum(), x, theirs)


def test_a_remote_module(worker: Worker) -> None:
    """Its parameters have their gradients with their owner."""
    module = import_module(REMOTE_MODULES[worker.lib]).RemoteModule(f"{worker.next}/cpu", nn.Linear, (3, 2))
    x = leaf(1, 4, 3).detach().float().requires_grad_()
    with torch.no_grad():
        for rref, seed in zip(module.remote_parameters(), [2, 3], strict=True):
            worker.rpc.rpc_sync(worker.next, fill, (rref, seed))
    weight, bias = quarters(2, 2, 3).float(), quarters(3, 2).float()
    with autograd(worker.lib).context() as context_id:
        y = module.forward(module.forward(x) @ torch.ones(2, 3))
        autograd(worker.lib).backward(context_id, [(y * y).sum()])
        leaves = [each.requires_grad_() for each in (x.detach().clone(), weight, bias)]
        local = nn.functional.linear(
            nn.functional.linear(leaves[0], weight, bias) @ torch.ones(2, 3), weight, bias
        )
        expected = torch.autograd.grad((local * local).sum(), leaves)
        found = [autograd(worker.lib).get_gradients(context_id)[x]]
        found += [
            worker.rpc.rpc_sync(worker.next, gradient_of_rref, (worker.lib, context_id, rref))
            for rref in module.remote_parameters()
        ]
        assert [torch.equal(*pair) for pair in zip(found, expected, strict=True)] == [True] * 3


def fill(rref: Any, seed: int) -> None:
    with torch.no_grad():
        parameter = rref.local_value()
        parameter.copy_(quarters(seed, *parameter.shape))


def test_an_answer_that_comes_later(worker: Worker) -> None:
    """A handler that gives a future: what that gets is cut as any result is."""
    x, theirs = leaf(1, 3), plant(worker, worker.after_next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale_later, (worker.lib, theirs.worker, theirs.key, x))
        autograd(worker.lib).backward(context_id, [y.sum()])
        check(worker, context_id, product, x, theirs)


@deferred
def scale_later(lib: str, to: str, key: str, x: Tensor) -> Any:
    return import_module(lib).rpc_async(to, scale, (lib, key, x))

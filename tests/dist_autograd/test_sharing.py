"""Many contexts at once over one parameter of a server: each has its own gradients, and they are right."""

from __future__ import annotations

import random
import threading
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tests.dist_autograd.leaves import (
    autograd,
    debug_counts,
    everyone,
    held,
    leaf,
    make_leaf,
    pass_on,
    quarters,
    scale,
)
from tests.ranks import run_on
from tests.rpc.remote_functions import kept
from tests.rpc.workers import WEFT, Worker, wait_until, weft_only

pytestmark = [
    run_on(threads=3, timeout=90, collective_timeout=60),
    run_on(weft=3, timeout=90, collective_timeout=60, full=True),
]
ON_PROCESSES = run_on(weft=3, timeout=90, collective_timeout=60)


SERVER = "worker0"
KEY = "the server's"
NUM_CALLS = 6  # of each worker to each, all at once
NUM_THREADS = 8


def found_and_expected(lib: str, context_id: int, x: Tensor, times: int) -> tuple[list[Any], list[Any]]:
    """Of one context: what it holds here and at the server, and what it should."""
    seen = import_module(lib).rpc_sync(SERVER, held, (lib, context_id, [KEY]))
    p = leaf(50, 4).detach()
    mine = autograd(lib).get_gradients(context_id)[x]
    found = [mine.tolist(), seen.gradients[0].tolist(), seen.grads]
    v = x.detach()
    expected = [(times * 2 * v * p * p).tolist(), (times * 2 * v * v * p).tolist(), [None]]
    return found, expected


def passes_of_one(lib: str, seed: int) -> list[Any]:
    """Three contexts after each other, with calls of a kind that chance picks; what was wrong."""
    rpc, chance, wrong = import_module(lib), random.Random(seed), []
    for round_ in range(3):
        x = leaf(seed * 10 + round_, 4)
        with autograd(lib).context() as context_id:
            y = one_call(lib, rpc, chance, x)
            loss, times = (y * y).sum(), chance.choice([1, 2])
            for i in range(times):
                options = {"exact": chance.random() < 0.5} if lib == WEFT else {}
                autograd(lib).backward(context_id, [loss], retain_graph=i + 1 < times, **options)
            found, expected = found_and_expected(lib, context_id, x, times)
            if found != expected:
                wrong.append((seed, round_, found, expected))
    return wrong


def one_call(lib: str, rpc: Any, chance: random.Random, x: Tensor) -> Tensor:
    kind = chance.choice(["sync", "async", "remote", "nested"])
    if kind == "sync":
        return rpc.rpc_sync(SERVER, scale, (lib, KEY, x))
    if kind == "async":
        return rpc.rpc_async(SERVER, scale, (lib, KEY, x)).wait()
    if kind == "remote":
        return rpc.remote(SERVER, scale, (lib, KEY, x)).to_here()
    via = f"worker{chance.randrange(3)}"
    return rpc.rpc_sync(via, pass_on, (lib, SERVER, scale, lib, KEY, x))


def set_up(w: Worker) -> None:
    """Whoever comes first makes it; it is the same one again for those who come later."""
    if w.name == SERVER:
        make_leaf(w.lib, KEY, 50, (4,))
    wait_until(lambda: w.rpc.rpc_sync(SERVER, is_there, (w.lib,)), "the server's parameter")


def is_there(lib: str) -> bool:
    try:
        kept(lib, KEY)
    except KeyError:
        return False
    return True


def wait_empty(w: Worker) -> None:
    """No worker has a context or a pass left, once all have done their work."""
    for worker in everyone(w):
        wait_until(
            lambda worker=worker: w.rpc.rpc_sync(worker, debug_counts, (w.lib,)) == (0, 0),
            f"no context is left on {worker}",
        )


@weft_only
def test_handlers_at_once(worker: Worker) -> None:
    """Each worker has several handlers running, each with a context of its own."""
    set_up(worker)
    seeds = range(worker.rank * 1000, worker.rank * 1000 + NUM_CALLS * worker.size)
    calls = [
        worker.rpc.rpc_async(f"worker{seed % worker.size}", passes_of_one, (worker.lib, seed))
        for seed in seeds
    ]
    wrong = [each for call in calls for each in call.wait()]
    assert not wrong, wrong[:2]
    wait_empty(worker)


@ON_PROCESSES
def test_threads_at_once(worker: Worker) -> None:
    """Threads of the user's, of every worker."""
    set_up(worker)
    wrong: list[Any] = []

    def work(number: int) -> None:
        try:
            wrong.extend(passes_of_one(worker.lib, worker.rank * 1000 + number))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:2]
    wait_empty(worker)


@weft_only
@ON_PROCESSES
def test_passes_of_one_context_at_once(worker: Worker) -> None:
    """Two threads run a backward each in the same context: the sum is that of both."""
    set_up(worker)
    x = leaf(1, 4)
    errors: list[BaseException] = []
    with autograd(worker.lib).context() as context_id:
        losses = [(worker.rpc.rpc_sync(SERVER, scale, (worker.lib, KEY, x)) ** 2).sum() for _ in range(2)]

        def work(loss: Tensor) -> None:
            try:
                autograd(worker.lib).backward(context_id, [loss], exact=True)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(loss,)) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        found, expected = found_and_expected(worker.lib, context_id, x, 2)
        assert found == expected


@weft_only
def test_plain_passes_meanwhile(worker: Worker) -> None:
    """loss.backward() on the server's parameter, while contexts of all workers go over it."""
    set_up(worker)
    seeds = range(worker.rank * 100, worker.rank * 100 + 9)
    calls = [
        worker.rpc.rpc_async(f"worker{seed % worker.size}", passes_of_one, (worker.lib, seed))
        for seed in seeds
    ]
    if worker.name == SERVER:
        parameter, q, num_plain = kept(worker.lib, KEY), quarters(7, 4), 0
        while not all(call.done() for call in calls):
            (parameter * q).sum().backward()
            num_plain += 1
        assert torch.equal(parameter.grad, num_plain * q), (parameter.grad, num_plain * q)
    problems = [each for call in calls for each in call.wait()]
    # Only .grad is another: the server's own.
    wrong = [each for each in problems if each[2][:2] != each[3][:2]]
    assert not wrong, wrong[:2]


@weft_only
def test_contexts_that_do_nothing(worker: Worker) -> None:
    """Opened, used for calls, and left, many times: nothing is left over."""
    set_up(worker)
    x = leaf(1, 4)
    futures: list[Any] = []
    for i in range(30):
        with autograd(worker.lib).context():
            futures += [worker.rpc.rpc_async(to, torch.mul, (x, i)) for to in everyone(worker)]
            if i % 3:
                torch.futures.wait_all(futures)
    torch.futures.wait_all(futures)
    wait_empty(worker)

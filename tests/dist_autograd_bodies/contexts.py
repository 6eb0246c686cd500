"""Contexts: whose they are, where they are known, and when they end."""

from __future__ import annotations

import threading
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist_autograd_bodies.sewing import (
    autograd,
    check,
    current_id,
    has_context,
    leaf,
    pass_on,
    plant,
    scale,
    wait_released,
)
from tests.rpc_bodies.places import give, open_gate, pass_gate, visits
from tests.rpc_bodies.running import Worker, wait_until


def one_a_thread(w: Worker) -> None:
    lib = autograd(w.lib)
    assert current_id(w.lib) is None
    with lib.context() as context_id:
        assert isinstance(context_id, int)
        assert current_id(w.lib) == context_id
        with (
            pytest.raises(RuntimeError, match="Already have an autograd context id for this thread"),
            lib.context(),
        ):
            pass
        assert current_id(w.lib) == context_id
        assert has_context(w.lib, context_id)
    assert current_id(w.lib) is None
    assert not has_context(w.lib, context_id)
    with lib.context() as again:
        assert again != context_id


def ids_are_unique(w: Worker) -> None:
    """Over all workers, and over all times."""
    mine: list[int] = []
    for _ in range(5):
        with autograd(w.lib).context() as context_id:
            mine.append(context_id)
            assert context_id <= autograd(w.lib)._get_max_id()
    everyones: list[Any] = [None] * w.size
    dist.all_gather_object(everyones, mine)
    assert len({context_id for ids in everyones for context_id in ids}) == 5 * w.size


def handlers_have_the_callers(w: Worker) -> None:
    """For their own time, and nested calls carry it on. A thread of the pool forgets it with the call."""
    x = leaf(1, 2)
    with autograd(w.lib).context() as context_id:
        for to in [w.next, w.name]:
            assert w.rpc.rpc_sync(to, see_context, (w.lib, x))[0] == context_id
            assert w.rpc.rpc_async(to, see_context, (w.lib, x)).wait()[0] == context_id
            assert w.rpc.remote(to, see_context, (w.lib, x)).to_here()[0] == context_id
        nested = w.rpc.rpc_sync(w.next, pass_on, (w.lib, w.after_next, see_context, w.lib, x))
        assert nested[0] == context_id
        back = w.rpc.rpc_sync(w.next, pass_on, (w.lib, w.name, see_context, w.lib, x))
        assert back[0] == context_id
    futures = [w.rpc.rpc_async(w.next, current_id, (w.lib,)) for _ in range(50)]
    assert {future.wait() for future in futures} == {None}
    assert w.rpc.rpc_sync(w.next, pass_on, (w.lib, w.after_next, current_id, w.lib)) is None


def see_context(lib: str, x: Tensor) -> tuple[int | None, Tensor]:
    return current_id(lib), x * 2


def a_handler_has_one_already(w: Worker) -> None:
    """A call inside a context can't open a second; one from outside opens its own."""
    key = plant(w, w.next, 3, 2)
    wanted = "Already have an autograd context id for this thread"
    with autograd(w.lib).context(), pytest.raises(RuntimeError, match=wanted):
        w.rpc.rpc_sync(w.next, open_one, (w.lib, key.key))
    theirs = w.rpc.rpc_sync(w.next, open_one, (w.lib, key.key))
    wait_released(w, theirs)


def open_one(lib: str, key: str) -> int:
    """A whole pass of the callee's own."""
    rpc = import_module(lib)
    x = leaf(1, 2)
    with autograd(lib).context() as context_id:
        loss = rpc.rpc_sync(rpc.get_worker_info().name, scale, (lib, key, x)).sum()
        autograd(lib).backward(context_id, [loss])
        assert len(autograd(lib).get_gradients(context_id)) == 2
        return context_id


def handlers_work_in_theirs(w: Worker) -> None:
    """A handler of a call from outside has its own context, and its calls are recorded in that."""
    theirs = plant(w, w.after_next, 4, 2)
    found = w.rpc.rpc_sync(w.next, pass_for_another, (w.lib, theirs.worker, theirs.key))
    assert torch.equal(found, theirs.value.detach())
    assert current_id(w.lib) is None


def pass_for_another(lib: str, to: str, key: str) -> Tensor:
    x = leaf(1, 2)
    with autograd(lib).context() as context_id:
        autograd(lib).backward(context_id, [import_module(lib).rpc_sync(to, scale, (lib, key, x)).sum()])
        return autograd(lib).get_gradients(context_id)[x]


def threads_have_none(w: Worker) -> None:
    """A thread that one starts inside a context is outside, and its calls are not recorded."""
    seen: list[Any] = []
    x = leaf(1, 2)

    def work() -> None:
        seen.append(current_id(w.lib))
        seen.append(w.rpc.rpc_sync(w.next, current_id, (w.lib,)))
        seen.append(w.rpc.rpc_sync(w.next, torch.mul, (x, 2)).is_leaf)

    with autograd(w.lib).context() as context_id:
        run_thread(work)
        assert seen == [None, None, True]
        y = w.rpc.rpc_sync(w.next, torch.mul, (x, 2))
        autograd(w.lib).backward(context_id, [y.sum()])
        check(w, context_id, lambda x: (x * 2).sum(), x)


def run_thread(work: Any) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def threads_are_independent(w: Worker) -> None:
    """Each has its context, at the same time; one leaf has a gradient in each."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    both_are_in = threading.Barrier(3)
    errors: list[BaseException] = []

    def work(times: int) -> None:
        try:
            with autograd(w.lib).context() as context_id:
                both_are_in.wait(20)
                assert current_id(w.lib) == context_id
                y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x)) * times
                both_are_in.wait(20)
                autograd(w.lib).backward(context_id, [y.sum()])
                both_are_in.wait(20)
                check(w, context_id, lambda x, p: (x * p * times).sum(), x, theirs)
                both_are_in.wait(20)
        except BaseException as error:
            both_are_in.abort()
            errors.append(error)

    threads = [threading.Thread(target=work, args=(times,)) for times in [2, 3, 5]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def backward_on_another_thread(w: Worker) -> None:
    """Who has the id may run it."""
    x, theirs = leaf(1, 3), plant(w, w.next, 2, 3)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, scale, (w.lib, theirs.key, x)).sum()
        run_thread(lambda: autograd(w.lib).backward(context_id, [y]))
        check(w, context_id, lambda x, p: (x * p).sum(), x, theirs)


def released_everywhere(w: Worker) -> None:
    """Also on a worker that only a nested call reached, and after an error in the block."""
    x = leaf(1, 2)
    with autograd(w.lib).context() as context_id:
        w.rpc.rpc_sync(w.next, pass_on, (w.lib, w.after_next, torch.mul, x, 2))
        assert w.rpc.rpc_sync(w.next, has_context, (w.lib, context_id))
        assert w.rpc.rpc_sync(w.after_next, has_context, (w.lib, context_id))
    assert not has_context(w.lib, context_id)
    wait_released(w, context_id)
    with pytest.raises(ValueError, match="meant"), autograd(w.lib).context() as context_id:
        w.rpc.rpc_sync(w.next, fail_after_call, (w.lib, w.after_next, x))
    assert not has_context(w.lib, context_id)
    wait_released(w, context_id)


def fail_after_call(lib: str, to: str, x: Tensor) -> None:
    import_module(lib).rpc_sync(to, torch.mul, (x, 2))
    raise ValueError("meant")


def released_after_a_backward(w: Worker) -> None:
    x, theirs = leaf(1, 3), plant(w, w.after_next, 2, 3)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, pass_on, (w.lib, w.after_next, scale, w.lib, theirs.key, x))
        autograd(w.lib).backward(context_id, [y.sum()])
        check(w, context_id, lambda x, p: (x * p).sum(), x, theirs)
    wait_released(w, context_id)
    for use in [autograd(w.lib).get_gradients, autograd(w.lib)._retrieve_context]:
        with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
            use(context_id)
    with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
        autograd(w.lib).backward(context_id, [y.sum()])


def released_by_hand(w: Worker) -> None:
    """What the block does, with its two functions."""
    lib = autograd(w.lib)
    made = lib._new_context()
    context_id = made._context_id()
    assert isinstance(made, lib.DistAutogradContext)
    assert lib._current_context()._context_id() == context_id
    assert lib._retrieve_context(context_id)._context_id() == context_id
    lib._is_valid_context(context_id)
    x = leaf(1, 2)
    w.rpc.rpc_sync(w.next, torch.mul, (x, 2))
    lib._release_context(context_id)
    wait_released(w, context_id)
    assert current_id(w.lib) is None
    for use in [lib._release_context, lib._is_valid_context, lib._retrieve_context, lib.get_gradients]:
        with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
            use(context_id)


def released_with_calls_in_flight(w: Worker) -> None:
    """They come to an end, one way or the other, and no worker has the context afterwards."""
    x, key = leaf(1, 2), f"flight {w.name}"
    with autograd(w.lib).context() as context_id:
        future = w.rpc.rpc_async(w.next, pass_gate, (w.lib, key, x))
        rref = w.rpc.remote(w.next, pass_gate, (w.lib, key, x))
        nested = w.rpc.rpc_async(w.after_next, pass_on, (w.lib, w.next, pass_gate, w.lib, key, x))
        wait_until(
            lambda: w.rpc.rpc_sync(w.next, visits, (w.lib, f"at gate {key}")) == 3, "three at the gate"
        )
    w.rpc.rpc_sync(w.next, open_gate, (w.lib, key))
    for wait in [future.wait, rref.to_here, nested.wait]:
        try:
            assert torch.equal(wait().detach(), x.detach())
        except RuntimeError as error:
            if "autograd context" not in str(error):
                raise
    wait_released(w, context_id)
    with autograd(w.lib).context() as context_id:
        autograd(w.lib).backward(context_id, [w.rpc.rpc_sync(w.next, give, (x,)).sum()])
        check(w, context_id, lambda x: x.sum(), x)


def unknown_where_it_never_was(w: Worker) -> None:
    """A context is known where a call of it has been, and its gradients are each worker's own."""
    x = leaf(1, 2)
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, torch.mul, (x, 2)).sum()
        autograd(w.lib).backward(context_id, [y])
        assert w.rpc.rpc_sync(w.next, num_gradients, (w.lib, context_id)) == 0
        wanted = f"Could not find autograd context with id: {context_id + 1}"
        with pytest.raises(RuntimeError, match=wanted):
            autograd(w.lib).get_gradients(context_id + 1)


def num_gradients(lib: str, context_id: int) -> int:
    return len(autograd(lib).get_gradients(context_id))


def what_it_knows(w: Worker) -> None:
    """A context's functions, where they lead, and whom it has called."""
    x, y = leaf(1, 2), leaf(2, 2)
    with autograd(w.lib).context():
        z = w.rpc.rpc_sync(w.next, torch.add, (x, y))
        context = autograd(w.lib)._current_context()
        (send,) = context._send_functions().values()
        (receive,) = context._recv_functions().values()
        assert [
            function.variable is each for (function, _), each in zip(send.next_functions, [x, y], strict=True)
        ] == [True, True]
        assert z.grad_fn == receive
        assert w.rpc.get_worker_info(w.next).id in context._known_worker_ids()
        assert w.rpc.get_worker_info(w.after_next).id not in context._known_worker_ids()
        there = w.rpc.rpc_sync(w.next, function_names, (w.lib,))
        assert there == (1, 1, "AddBackward")
        w.rpc.rpc_sync(w.after_next, torch.add, (x, y))
        assert len(context._send_functions()) == 2
        assert len(context._recv_functions()) == 2
        assert w.rpc.get_worker_info(w.after_next).id in context._known_worker_ids()


def function_names(lib: str) -> tuple[int, int, str]:
    """How many this worker has; and of its one send, what it leads to."""
    context = autograd(lib)._current_context()
    sends = list(context._send_functions().values())
    ((function, _),) = sends[0].next_functions
    return len(sends), len(context._recv_functions()), function.name().rstrip("0123456789")


BODIES = [
    one_a_thread,
    ids_are_unique,
    handlers_have_the_callers,
    a_handler_has_one_already,
    handlers_work_in_theirs,
    released_everywhere,
    released_after_a_backward,
    released_by_hand,
    released_with_calls_in_flight,
    unknown_where_it_never_was,
    what_it_knows,
]
ON_PROCESSES = [threads_have_none, threads_are_independent, backward_on_another_thread]

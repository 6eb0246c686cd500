"""Contexts: whose they are, where they are known, and when they end."""

from __future__ import annotations

import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist_autograd.leaves import (
    autograd,
    check,
    current_id,
    has_context,
    leaf,
    pass_on,
    plant,
    run_thread,
    scale,
    wait_released,
)
from tests.ranks import run_on
from tests.rpc.remote_functions import give, open_gate, pass_gate, visits
from tests.rpc.workers import Worker, wait_until

pytestmark = [
    run_on(threads=3, timeout=90, collective_timeout=60),
    run_on(weft=3, timeout=90, collective_timeout=60, full=True),
]
EVERYDAY = run_on(threads=3, weft=3, timeout=90, collective_timeout=60)
ON_PROCESSES = run_on(weft=3, timeout=90, collective_timeout=60)


@run_on(threads=1, timeout=90, collective_timeout=60, also=True)  # one worker is a world, too
def test_a_thread_has_one_context(worker: Worker) -> None:
    lib = autograd(worker.lib)
    assert current_id(worker.lib) is None
    with lib.context() as context_id:
        assert isinstance(context_id, int)
        assert current_id(worker.lib) == context_id
        with (
            pytest.raises(RuntimeError, match="Already have an autograd context id for this thread"),
            lib.context(),
        ):
            pass
        assert current_id(worker.lib) == context_id
        assert has_context(worker.lib, context_id)
    assert current_id(worker.lib) is None
    assert not has_context(worker.lib, context_id)
    with lib.context() as again:
        assert again != context_id


def test_ids_are_unique(worker: Worker) -> None:
    """Over all workers, and over all times."""
    mine: list[int] = []
    for _ in range(5):
        with autograd(worker.lib).context() as context_id:
            mine.append(context_id)
            assert context_id <= autograd(worker.lib)._get_max_id()
    everyones: list[Any] = [None] * worker.size
    dist.all_gather_object(everyones, mine)
    assert len({context_id for ids in everyones for context_id in ids}) == 5 * worker.size


def test_handlers_have_the_callers_context(worker: Worker) -> None:
    """For their own time, and nested calls carry it on. A thread of the pool forgets it with the call."""
    x = leaf(1, 2)
    with autograd(worker.lib).context() as context_id:
        for to in [worker.next, worker.name]:
            assert worker.rpc.rpc_sync(to, see_context, (worker.lib, x))[0] == context_id
            assert worker.rpc.rpc_async(to, see_context, (worker.lib, x)).wait()[0] == context_id
            assert worker.rpc.remote(to, see_context, (worker.lib, x)).to_here()[0] == context_id
        nested = worker.rpc.rpc_sync(
            worker.next, pass_on, (worker.lib, worker.after_next, see_context, worker.lib, x)
        )
        assert nested[0] == context_id
        back = worker.rpc.rpc_sync(
            worker.next, pass_on, (worker.lib, worker.name, see_context, worker.lib, x)
        )
        assert back[0] == context_id
    futures = [worker.rpc.rpc_async(worker.next, current_id, (worker.lib,)) for _ in range(50)]
    assert {future.wait() for future in futures} == {None}
    assert (
        worker.rpc.rpc_sync(worker.next, pass_on, (worker.lib, worker.after_next, current_id, worker.lib))
        is None
    )


def see_context(lib: str, x: Tensor) -> tuple[int | None, Tensor]:
    return current_id(lib), x * 2


def test_a_handler_of_a_call_in_a_context_cannot_open_another(worker: Worker) -> None:
    """A handler of a call from outside opens its own."""
    key = plant(worker, worker.next, 3, 2)
    wanted = "Already have an autograd context id for this thread"
    with autograd(worker.lib).context(), pytest.raises(RuntimeError, match=wanted):
        worker.rpc.rpc_sync(worker.next, open_one, (worker.lib, key.key))
    theirs = worker.rpc.rpc_sync(worker.next, open_one, (worker.lib, key.key))
    wait_released(worker, theirs)


def open_one(lib: str, key: str) -> int:
    """A whole pass of the callee's own."""
    rpc = import_module(lib)
    x = leaf(1, 2)
    with autograd(lib).context() as context_id:
        loss = rpc.rpc_sync(rpc.get_worker_info().name, scale, (lib, key, x)).sum()
        autograd(lib).backward(context_id, [loss])
        assert len(autograd(lib).get_gradients(context_id)) == 2
        return context_id


def test_handlers_work_in_contexts_of_their_own(worker: Worker) -> None:
    """A handler of a call from outside has its own context, and its calls are recorded in that."""
    theirs = plant(worker, worker.after_next, 4, 2)
    found = worker.rpc.rpc_sync(worker.next, pass_for_another, (worker.lib, theirs.worker, theirs.key))
    assert torch.equal(found, theirs.value.detach())
    assert current_id(worker.lib) is None


def pass_for_another(lib: str, to: str, key: str) -> Tensor:
    x = leaf(1, 2)
    with autograd(lib).context() as context_id:
        autograd(lib).backward(context_id, [import_module(lib).rpc_sync(to, scale, (lib, key, x)).sum()])
        return autograd(lib).get_gradients(context_id)[x]


@ON_PROCESSES
def test_threads_that_are_started_in_a_context_are_outside(worker: Worker) -> None:
    """Their calls are not recorded."""
    seen: list[Any] = []
    x = leaf(1, 2)

    def work() -> None:
        seen.append(current_id(worker.lib))
        seen.append(worker.rpc.rpc_sync(worker.next, current_id, (worker.lib,)))
        seen.append(worker.rpc.rpc_sync(worker.next, torch.mul, (x, 2)).is_leaf)

    with autograd(worker.lib).context() as context_id:
        run_thread(work)
        assert seen == [None, None, True]
        y = worker.rpc.rpc_sync(worker.next, torch.mul, (x, 2))
        autograd(worker.lib).backward(context_id, [y.sum()])
        check(worker, context_id, lambda x: (x * 2).sum(), x)


@ON_PROCESSES
def test_threads_have_a_context_each(worker: Worker) -> None:
    """At the same time; one leaf has a gradient in each."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    both_are_in = threading.Barrier(3)
    errors: list[BaseException] = []

    def work(times: int) -> None:
        try:
            with autograd(worker.lib).context() as context_id:
                both_are_in.wait(20)
                assert current_id(worker.lib) == context_id
                y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x)) * times
                both_are_in.wait(20)
                autograd(worker.lib).backward(context_id, [y.sum()])
                both_are_in.wait(20)
                check(worker, context_id, lambda x, p: (x * p * times).sum(), x, theirs)
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


@ON_PROCESSES
def test_backward_runs_on_another_thread(worker: Worker) -> None:
    """Who has the id may run it."""
    x, theirs = leaf(1, 3), plant(worker, worker.next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, scale, (worker.lib, theirs.key, x)).sum()
        run_thread(lambda: autograd(worker.lib).backward(context_id, [y]))
        check(worker, context_id, lambda x, p: (x * p).sum(), x, theirs)


@EVERYDAY
def test_a_context_is_released_everywhere(worker: Worker) -> None:
    """Also on a worker that only a nested call reached, and after an error in the block."""
    x = leaf(1, 2)
    with autograd(worker.lib).context() as context_id:
        worker.rpc.rpc_sync(worker.next, pass_on, (worker.lib, worker.after_next, torch.mul, x, 2))
        assert worker.rpc.rpc_sync(worker.next, has_context, (worker.lib, context_id))
        assert worker.rpc.rpc_sync(worker.after_next, has_context, (worker.lib, context_id))
    assert not has_context(worker.lib, context_id)
    wait_released(worker, context_id)
    with pytest.raises(ValueError, match="meant"), autograd(worker.lib).context() as context_id:
        worker.rpc.rpc_sync(worker.next, fail_after_call, (worker.lib, worker.after_next, x))
    assert not has_context(worker.lib, context_id)
    wait_released(worker, context_id)


def fail_after_call(lib: str, to: str, x: Tensor) -> None:
    import_module(lib).rpc_sync(to, torch.mul, (x, 2))
    raise ValueError("meant")


def test_a_context_is_released_after_a_backward(worker: Worker) -> None:
    x, theirs = leaf(1, 3), plant(worker, worker.after_next, 2, 3)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(
            worker.next, pass_on, (worker.lib, worker.after_next, scale, worker.lib, theirs.key, x)
        )
        autograd(worker.lib).backward(context_id, [y.sum()])
        check(worker, context_id, lambda x, p: (x * p).sum(), x, theirs)
    wait_released(worker, context_id)
    for use in [autograd(worker.lib).get_gradients, autograd(worker.lib)._retrieve_context]:
        with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
            use(context_id)
    with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
        autograd(worker.lib).backward(context_id, [y.sum()])


def test_a_context_can_be_released_by_hand(worker: Worker) -> None:
    """What the block does, with its two functions."""
    lib = autograd(worker.lib)
    made = lib._new_context()
    context_id = made._context_id()
    assert isinstance(made, lib.DistAutogradContext)
    assert lib._current_context()._context_id() == context_id
    assert lib._retrieve_context(context_id)._context_id() == context_id
    lib._is_valid_context(context_id)
    x = leaf(1, 2)
    worker.rpc.rpc_sync(worker.next, torch.mul, (x, 2))
    lib._release_context(context_id)
    wait_released(worker, context_id)
    assert current_id(worker.lib) is None
    for use in [lib._release_context, lib._is_valid_context, lib._retrieve_context, lib.get_gradients]:
        with pytest.raises(RuntimeError, match=f"Could not find autograd context with id: {context_id}"):
            use(context_id)


def test_a_context_is_released_with_calls_in_flight(worker: Worker) -> None:
    """They come to an end, one way or the other, and no worker has the context afterwards."""
    x, key = leaf(1, 2), f"flight {worker.name}"
    with autograd(worker.lib).context() as context_id:
        future = worker.rpc.rpc_async(worker.next, pass_gate, (worker.lib, key, x))
        rref = worker.rpc.remote(worker.next, pass_gate, (worker.lib, key, x))
        nested = worker.rpc.rpc_async(
            worker.after_next, pass_on, (worker.lib, worker.next, pass_gate, worker.lib, key, x)
        )
        wait_until(
            lambda: worker.rpc.rpc_sync(worker.next, visits, (worker.lib, f"at gate {key}")) == 3,
            "three at the gate",
        )
    worker.rpc.rpc_sync(worker.next, open_gate, (worker.lib, key))
    for wait in [future.wait, rref.to_here, nested.wait]:
        try:
            assert torch.equal(wait().detach(), x.detach())
        except RuntimeError as error:
            if "autograd context" not in str(error):
                raise
    wait_released(worker, context_id)
    with autograd(worker.lib).context() as context_id:
        autograd(worker.lib).backward(context_id, [worker.rpc.rpc_sync(worker.next, give, (x,)).sum()])
        check(worker, context_id, lambda x: x.sum(), x)


def test_a_context_is_unknown_where_it_never_was(worker: Worker) -> None:
    """A context is known where a call of it has been, and its gradients are each worker's own."""
    x = leaf(1, 2)
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, torch.mul, (x, 2)).sum()
        autograd(worker.lib).backward(context_id, [y])
        assert worker.rpc.rpc_sync(worker.next, num_gradients, (worker.lib, context_id)) == 0
        wanted = f"Could not find autograd context with id: {context_id + 1}"
        with pytest.raises(RuntimeError, match=wanted):
            autograd(worker.lib).get_gradients(context_id + 1)


def num_gradients(lib: str, context_id: int) -> int:
    return len(autograd(lib).get_gradients(context_id))


def test_what_a_context_knows(worker: Worker) -> None:
    """A context's functions, where they lead, and whom it has called."""
    x, y = leaf(1, 2), leaf(2, 2)
    with autograd(worker.lib).context():
        z = worker.rpc.rpc_sync(worker.next, torch.add, (x, y))
        context = autograd(worker.lib)._current_context()
        (send,) = context._send_functions().values()
        (receive,) = context._recv_functions().values()
        assert [
            function.variable is each for (function, _), each in zip(send.next_functions, [x, y], strict=True)
        ] == [True, True]
        assert z.grad_fn == receive
        assert worker.rpc.get_worker_info(worker.next).id in context._known_worker_ids()
        assert worker.rpc.get_worker_info(worker.after_next).id not in context._known_worker_ids()
        there = worker.rpc.rpc_sync(worker.next, function_names, (worker.lib,))
        assert there == (1, 1, "AddBackward")
        worker.rpc.rpc_sync(worker.after_next, torch.add, (x, y))
        assert len(context._send_functions()) == 2
        assert len(context._recv_functions()) == 2
        assert worker.rpc.get_worker_info(worker.after_next).id in context._known_worker_ids()


def function_names(lib: str) -> tuple[int, int, str]:
    """How many this worker has; and of its one send, what it leads to."""
    context = autograd(lib)._current_context()
    sends = list(context._send_functions().values())
    ((function, _),) = sends[0].next_functions
    return len(sends), len(context._recv_functions()), function.name().rstrip("0123456789")


LOADED_LATE = """
import weft
from weft import rpc

def double(x):
    return x * 2

def main():
    import torch
    rank = torch.distributed.get_rank()
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        from weft import dist_autograd
        x = torch.ones(2, requires_grad=True)
        with dist_autograd.context() as context_id:
            y = rpc.rpc_sync("worker1", double, (x,))
            dist_autograd.backward(context_id, [y.sum()])
            assert dist_autograd.get_gradients(context_id)[x].tolist() == [2.0, 2.0]
    rpc.shutdown()

weft.launch(main, ranks=2)
"""


@run_on()
@pytest.mark.processes
def test_it_may_be_imported_after_rpc_was_initialized(tmp_path: Path) -> None:
    """On one worker, too: the others needn't know of it."""
    (tmp_path / "late.py").write_text(LOADED_LATE)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "late.py")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr

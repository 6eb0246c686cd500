"""Calls that torch's RPC refuses: functions by value, more builtins, torch functions of many results."""

from __future__ import annotations

import functools
import math
import operator
import threading
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.ranks import run_on
from tests.rpc import remote_functions
from tests.rpc.remote_functions import Spot, add, give, spot
from tests.rpc.workers import MODES, Worker, call, check_spot

pytestmark = run_on(threads=3, weft=3, timeout=90, collective_timeout=60)


def test_lambdas_and_closures_run_there(worker: Worker) -> None:
    lib, rank = worker.lib, worker.rank

    def where() -> Spot:
        return spot(lib)

    for mode in MODES:
        assert call(worker, mode, worker.next, lambda x: x * 2, (4,)) == 8
        assert call(worker, mode, worker.next, lambda: rank) == rank
        check_spot(worker, call(worker, mode, worker.next, where), worker.next_rank)
        check_spot(worker, call(worker, mode, worker.next, lambda: spot(lib)), worker.next_rank)


def test_functions_are_arguments_and_results(worker: Worker) -> None:
    assert worker.rpc.rpc_sync(worker.next, give, (lambda x: x + 1,))(4) == 5
    adder = worker.rpc.rpc_sync(worker.next, make_adder, (10,))
    assert adder(5) == 15
    assert worker.rpc.rpc_sync(worker.next, functools.partial(add, 3), (4,)) == 7


def make_adder(by: int):
    return lambda x: x + by


def test_classes_of_a_function_travel(worker: Worker) -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

        def doubled(self) -> int:
            return self.value * 2

    assert worker.rpc.rpc_sync(worker.next, Local(4).doubled) == 8
    rref = worker.rpc.remote(worker.next, Local, (6,))
    assert rref.rpc_sync().doubled() == 12
    assert rref.to_here().value == 6


def test_all_builtins_run_there(worker: Worker) -> None:
    for mode in MODES:
        assert call(worker, mode, worker.next, divmod, (7, 2)) == (3, 1)
        assert call(worker, mode, worker.next, sorted, ([3, 1, 2],), {"reverse": True}) == [3, 2, 1]
        assert call(worker, mode, worker.next, dict, ([("a", 1)],), {"b": 2}) == {"a": 1, "b": 2}
        assert call(worker, mode, worker.next, math.hypot, (3, 4)) == 5.0
        assert call(worker, mode, worker.next, operator.itemgetter(1), ("abc",)) == "b"
        assert call(worker, mode, worker.next, int.bit_length, (255,)) == 8


def test_torch_functions_of_all_kinds_run_there(worker: Worker) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    for mode in MODES:
        values, indices = call(worker, mode, worker.next, torch.max, (x, 1))
        assert values.tolist() == [2.0, 5.0]
        assert indices.tolist() == [2, 2]
        assert call(worker, mode, worker.next, torch.max, (x,)).item() == 5.0
        assert torch.equal(call(worker, mode, worker.next, torch.zeros, (2, 3)), torch.zeros(2, 3))
        assert call(worker, mode, worker.next, torch.nn.Linear, (3, 2)).weight.shape == (2, 3)
        with pytest.raises(Exception, match="size of tensor a"):
            call(worker, mode, worker.next, torch.add, (torch.ones(2), torch.ones(3)))


def test_tensors_to_oneself_are_copies(worker: Worker) -> None:
    for numel in [3, 1_000_000]:
        mine = torch.ones(numel)
        for mode in MODES:
            got = call(worker, mode, worker.name, fill_with_seven, (mine,))
            assert got.unique().tolist() == [7.0]
            assert mine.unique().tolist() == [1.0]


def fill_with_seven(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(7.0)


def test_workers_are_keys(worker: Worker) -> None:
    """Worker infos are values: they hash, and pickle outside RPC too."""
    import pickle

    mine = worker.rpc.get_worker_info()
    again = worker.rpc.WorkerInfo(worker.name, worker.rank)
    assert {mine: 1}[again] == 1
    assert pickle.loads(pickle.dumps(mine)) == mine
    assert repr(mine) == str(mine)


def threads_of_a_handler(lib: str) -> list[str]:
    """A thread that a handler starts is its worker's too, where the process has just this one."""
    names: list[str] = []

    def work() -> None:
        names.append(import_module(lib).get_worker_info().name)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return names


@run_on(weft=3, timeout=90, collective_timeout=60)
def test_threads_of_handlers_are_their_workers(worker: Worker) -> None:
    assert worker.rpc.rpc_sync(worker.next, threads_of_a_handler, (worker.lib,)) == [worker.next]


@run_on(weft=3, timeout=90, collective_timeout=60)
def test_a_name_that_the_callee_lacks_is_named(worker: Worker) -> None:
    """The function is in the caller's module, and not in the callee's."""
    if worker.rank == 0:

        def only_here() -> None: ...

        only_here.__module__, only_here.__qualname__ = remote_functions.__name__, "only_here"
        module: Any = remote_functions
        module.only_here = only_here
        try:
            with pytest.raises(
                AttributeError, match="RPC pickler does not serialize function code"
            ) as caught:
                worker.rpc.rpc_sync(worker.next, only_here)
        finally:
            del module.only_here
        assert "only_here" in str(caught.value)
    assert worker.rpc.rpc_sync(worker.next, add, (1, 2)) == 3

"""Calls that torch's RPC refuses: functions by value, more builtins, torch functions of many results."""

from __future__ import annotations

import functools
import math
import operator
import threading
from importlib import import_module

import pytest
import torch

from tests.rpc.workers import MODES, call
from tests.rpc_bodies import places
from tests.rpc_bodies.calls import check_spot
from tests.rpc_bodies.places import Spot, add, spot
from tests.rpc_bodies.running import Worker


def lambdas_and_closures(w: Worker) -> None:
    lib, rank = w.lib, w.rank

    def where() -> Spot:
        return spot(lib)

    for mode in MODES:
        assert call(w, mode, w.next, lambda x: x * 2, (4,)) == 8
        assert call(w, mode, w.next, lambda: rank) == rank
        check_spot(w, call(w, mode, w.next, where), w.next_rank)
        check_spot(w, call(w, mode, w.next, lambda: spot(lib)), w.next_rank)


def functions_as_arguments_and_results(w: Worker) -> None:
    assert w.rpc.rpc_sync(w.next, places.give, (lambda x: x + 1,))(4) == 5
    adder = w.rpc.rpc_sync(w.next, make_adder, (10,))
    assert adder(5) == 15
    assert w.rpc.rpc_sync(w.next, functools.partial(add, 3), (4,)) == 7


def make_adder(by: int):
    return lambda x: x + by


def classes_of_a_function(w: Worker) -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

        def doubled(self) -> int:
            return self.value * 2

    assert w.rpc.rpc_sync(w.next, Local(4).doubled) == 8
    rref = w.rpc.remote(w.next, Local, (6,))
    assert rref.rpc_sync().doubled() == 12
    assert rref.to_here().value == 6


def more_builtins(w: Worker) -> None:
    for mode in MODES:
        assert call(w, mode, w.next, divmod, (7, 2)) == (3, 1)
        assert call(w, mode, w.next, sorted, ([3, 1, 2],), {"reverse": True}) == [3, 2, 1]
        assert call(w, mode, w.next, dict, ([("a", 1)],), {"b": 2}) == {"a": 1, "b": 2}
        assert call(w, mode, w.next, math.hypot, (3, 4)) == 5.0
        assert call(w, mode, w.next, operator.itemgetter(1), ("abc",)) == "b"
        assert call(w, mode, w.next, int.bit_length, (255,)) == 8


def more_torch_functions(w: Worker) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    for mode in MODES:
        values, indices = call(w, mode, w.next, torch.max, (x, 1))
        assert values.tolist() == [2.0, 5.0]
        assert indices.tolist() == [2, 2]
        assert call(w, mode, w.next, torch.max, (x,)).item() == 5.0
        assert torch.equal(call(w, mode, w.next, torch.zeros, (2, 3)), torch.zeros(2, 3))
        assert call(w, mode, w.next, torch.nn.Linear, (3, 2)).weight.shape == (2, 3)
        with pytest.raises(Exception, match="size of tensor a"):
            call(w, mode, w.next, torch.add, (torch.ones(2), torch.ones(3)))


def tensors_to_oneself_are_copies(w: Worker) -> None:
    for numel in [3, 1_000_000]:
        mine = torch.ones(numel)
        for mode in MODES:
            got = call(w, mode, w.name, fill_with_seven, (mine,))
            assert got.unique().tolist() == [7.0]
            assert mine.unique().tolist() == [1.0]


def fill_with_seven(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(7.0)


def workers_as_keys(w: Worker) -> None:
    """Worker infos are values: they hash, and pickle outside RPC too."""
    import pickle

    mine = w.rpc.get_worker_info()
    again = w.rpc.WorkerInfo(w.name, w.rank)
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


def threads_of_handlers(w: Worker) -> None:
    assert w.rpc.rpc_sync(w.next, threads_of_a_handler, (w.lib,)) == [w.next]


def a_name_that_the_callee_lacks(w: Worker) -> None:
    """The function is in the caller's module, and not in the callee's."""
    if w.rank == 0:

        def only_here() -> None: ...

        only_here.__module__, only_here.__qualname__ = places.__name__, "only_here"
        places.only_here = only_here
        try:
            with pytest.raises(
                AttributeError, match="RPC pickler does not serialize function code"
            ) as caught:
                w.rpc.rpc_sync(w.next, only_here)
        finally:
            del places.only_here
        assert "only_here" in str(caught.value)
    assert w.rpc.rpc_sync(w.next, add, (1, 2)) == 3


WEFT_ONLY = [
    lambdas_and_closures,
    functions_as_arguments_and_results,
    classes_of_a_function,
    more_builtins,
    more_torch_functions,
    tensors_to_oneself_are_copies,
    workers_as_keys,
]
PROCESSES_ONLY = [threads_of_handlers, a_name_that_the_callee_lacks]

"""How long an owner keeps a value: exactly as long as somebody can reach it.

Tracked values say when they are freed. "Not before" is shown by use: many calls after the last thing that
could have freed it, the value is still there.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from tests.ranks import run_on
from tests.rpc import test_rrefs
from tests.rpc.remote_functions import (
    OwnError,
    Tracked,
    drop,
    is_freed,
    keep,
    kept,
    key_of,
    local_key_of,
    make_tracked_at_gate,
    make_tracked_rref,
    nothing,
    open_gate,
    pass_gate,
)
from tests.rpc.workers import Worker, run_each, wait_until, weft_only

pytestmark = [
    run_on(threads=3, timeout=90, collective_timeout=60),
    run_on(weft=3, timeout=90, collective_timeout=60, full=True),
]

FREED_SECS = 10.0


def check_freed(worker: Worker, owner: str, key: str) -> None:
    wait_until(
        lambda: worker.rpc.rpc_sync(owner, is_freed, (worker.lib, key)),
        f"{key} is freed on {owner}",
        FREED_SECS,
    )


def check_kept(worker: Worker, owner: str, key: str) -> None:
    for rank in [*range(worker.size)] * 5:
        worker.rpc.rpc_sync(rank, nothing)
    assert not worker.rpc.rpc_sync(owner, is_freed, (worker.lib, key)), (
        f"{key} was freed on {owner}, and is in use"
    )


def test_a_value_goes_with_its_only_holder(worker: Worker) -> None:
    key = f"only {worker.name}"
    rref = worker.rpc.remote(worker.next, Tracked, (worker.lib, key))
    assert rref.to_here().key == key
    check_kept(worker, worker.next, key)
    del rref
    check_freed(worker, worker.next, key)


def test_values_dropped_at_once_go(worker: Worker) -> None:
    for i in range(20):
        worker.rpc.remote(worker.next, Tracked, (worker.lib, f"at once {i} {worker.name}"))
    for i in range(20):
        check_freed(worker, worker.next, f"at once {i} {worker.name}")


def test_a_value_dropped_before_it_was_made_goes(worker: Worker) -> None:
    key = f"early {worker.name}"
    rref = worker.rpc.remote(worker.next, make_tracked_at_gate, (worker.lib, key))
    del rref
    worker.rpc.rpc_sync(worker.next, open_gate, (worker.lib, key))
    check_freed(worker, worker.next, key)


def test_a_third_worker_keeps_a_value(worker: Worker) -> None:
    for key in [f"third {i} {worker.name}" for i in range(5)]:
        rref = worker.rpc.remote(worker.next, Tracked, (worker.lib, key))
        worker.rpc.rpc_sync(worker.after_next, keep, (worker.lib, key, {"deep": [rref]}))
        del rref
        check_kept(worker, worker.next, key)
        assert worker.rpc.rpc_sync(worker.after_next, key_of_kept, (worker.lib, key)) == key
        worker.rpc.rpc_sync(worker.after_next, drop, (worker.lib, key))
        check_freed(worker, worker.next, key)


def key_of_kept(lib: str, key: str) -> str:
    return key_of(kept(lib, key)["deep"][0])


def test_a_value_passed_on_while_it_is_made_stays(worker: Worker) -> None:
    """Sent to a third worker and forgotten, before the owner has made it."""
    key = f"passed {worker.name}"
    rref = worker.rpc.remote(worker.next, make_tracked_at_gate, (worker.lib, key))
    sending = worker.rpc.rpc_async(worker.after_next, keep, (worker.lib, key, {"deep": [rref]}))
    del rref
    worker.rpc.rpc_sync(worker.next, open_gate, (worker.lib, key))
    sending.wait()
    check_kept(worker, worker.next, key)
    assert worker.rpc.rpc_sync(worker.after_next, key_of_kept, (worker.lib, key)) == key
    worker.rpc.rpc_sync(worker.after_next, drop, (worker.lib, key))
    check_freed(worker, worker.next, key)


def test_use_by_others_keeps_nothing(worker: Worker) -> None:
    key = f"used {worker.name}"
    rref = worker.rpc.remote(worker.next, Tracked, (worker.lib, key))
    for _ in range(20):
        assert worker.rpc.rpc_sync(worker.after_next, key_of, (rref,)) == key
        assert worker.rpc.rpc_sync(worker.next, local_key_of, (rref,)) == key
        assert rref.rpc_sync().get() == key
    check_kept(worker, worker.next, key)
    del rref
    check_freed(worker, worker.next, key)


def test_the_owners_own_is_kept_by_others(worker: Worker) -> None:
    key = f"own {worker.name}"
    rref = worker.rpc.RRef(Tracked(worker.lib, key))
    check_kept(worker, worker.name, key)
    del rref
    check_freed(worker, worker.name, key)
    key = f"own lent {worker.name}"
    rref = worker.rpc.RRef(Tracked(worker.lib, key))
    worker.rpc.rpc_sync(worker.next, keep, (worker.lib, key, {"deep": [rref]}))
    del rref
    check_kept(worker, worker.name, key)
    assert worker.rpc.rpc_sync(worker.next, key_of_kept, (worker.lib, key)) == key
    worker.rpc.rpc_sync(worker.next, drop, (worker.lib, key))
    check_freed(worker, worker.name, key)


def test_remote_to_oneself_is_kept(worker: Worker) -> None:
    key = f"self {worker.name}"
    rref = worker.rpc.remote(worker.name, Tracked, (worker.lib, key))
    assert rref.local_value().key == key
    check_kept(worker, worker.name, key)
    del rref
    check_freed(worker, worker.name, key)


def test_the_owner_keeps_nothing_of_what_it_returns(worker: Worker) -> None:
    """Nothing stays at the owner but what the caller holds."""
    for i in range(5):
        key = f"returned {i} {worker.name}"
        rref = worker.rpc.rpc_sync(worker.next, make_tracked_rref, (worker.lib, key))
        check_kept(worker, worker.next, key)
        assert rref.to_here().key == key
        del rref
        check_freed(worker, worker.next, key)
    rref = worker.rpc.remote(worker.next, make_tracked_rref, (worker.lib, f"outer {worker.name}"))
    inner = rref.to_here()
    del rref
    check_kept(worker, worker.next, f"outer {worker.name}")
    assert inner.to_here().key == f"outer {worker.name}"
    del inner
    check_freed(worker, worker.next, f"outer {worker.name}")


@weft_only
def test_calls_that_fail_keep_nothing(worker: Worker) -> None:
    """Neither an error's traceback nor its report keeps the argument."""
    key = f"failing {worker.name}"
    rref = worker.rpc.remote(worker.next, Tracked, (worker.lib, key))
    for to in [worker.next, worker.after_next]:
        with pytest.raises(ValueError, match=key):
            worker.rpc.rpc_sync(to, fail_holding, (rref, key))
    future = worker.rpc.rpc_async(worker.next, fail_holding, (rref, key))
    with pytest.raises(ValueError, match=key):
        future.wait()
    check_kept(worker, worker.next, key)
    del rref, future
    check_freed(worker, worker.next, key)


def fail_holding(rref: Any, text: str) -> None:
    here = rref.to_here()
    raise OwnError(f"{text} {here.key}")


@weft_only
def test_messages_that_cant_be_pickled_keep_nothing(worker: Worker) -> None:
    """The RRef was already in the message when the rest of it could not be pickled."""
    key = f"unsent {worker.name}"
    rref = worker.rpc.remote(worker.next, Tracked, (worker.lib, key))
    for way in [worker.rpc.rpc_sync, worker.rpc.rpc_async, worker.rpc.remote]:
        for to in [worker.next, worker.after_next]:
            with pytest.raises(TypeError, match="cannot pickle"):
                way(to, nothing, (rref, [rref], threading.Lock()))
    own = worker.rpc.RRef(Tracked(worker.lib, f"own {key}"))
    with pytest.raises(TypeError, match="cannot pickle"):
        worker.rpc.rpc_sync(worker.next, nothing, (own, threading.Lock()))
    check_kept(worker, worker.next, key)
    del rref, own
    check_freed(worker, worker.next, key)
    check_freed(worker, worker.name, f"own {key}")


@weft_only
def test_results_that_cant_be_pickled_keep_nothing(worker: Worker) -> None:
    key = f"unreturned {worker.name}"
    with pytest.raises((TypeError, RuntimeError), match="cannot pickle"):
        worker.rpc.rpc_sync(worker.next, make_rref_and_lock, (worker.lib, key))
    check_freed(worker, worker.next, key)


def make_rref_and_lock(lib: str, key: str) -> Any:
    return [make_tracked_rref(lib, key), threading.Lock()]


@weft_only
def test_answers_that_come_too_late_keep_nothing(worker: Worker) -> None:
    """The answer has an RRef in it, and nobody waits for it any more."""
    key = f"late {worker.name}"
    with pytest.raises(RuntimeError, match="timeout"):
        worker.rpc.rpc_sync(worker.next, make_tracked_rref_at_gate, (worker.lib, key), timeout=0.1)
    worker.rpc.rpc_sync(worker.next, open_gate, (worker.lib, key))
    check_freed(worker, worker.next, key)


def make_tracked_rref_at_gate(lib: str, key: str) -> Any:
    pass_gate(lib, key)
    return make_tracked_rref(lib, key)


@weft_only
def test_calls_that_time_out_keep_nothing(worker: Worker) -> None:
    key = f"timed out {worker.name}"
    rref = worker.rpc.remote(worker.next, Tracked, (worker.lib, key))
    with pytest.raises(RuntimeError, match="timeout"):
        worker.rpc.rpc_sync(worker.after_next, pass_gate, (worker.lib, key, [rref]), timeout=0.1)
    del rref
    worker.rpc.rpc_sync(worker.after_next, open_gate, (worker.lib, key))
    check_freed(worker, worker.next, key)


def test_futures_hold_results(worker: Worker) -> None:
    key = f"in a future {worker.name}"
    future = worker.rpc.rpc_async(worker.next, make_tracked_rref, (worker.lib, key))
    future.wait()
    check_kept(worker, worker.next, key)
    assert future.wait().to_here().key == key
    del future
    check_freed(worker, worker.next, key)


def test_cycles_are_collected(worker: Worker) -> None:
    key = f"cycle {worker.name}"
    rref = worker.rpc.remote(worker.next, Tracked, (worker.lib, key))
    knot: list[Any] = [rref]
    knot.append(knot)
    del rref
    check_kept(worker, worker.next, key)
    del knot
    # Not once: while another thread collects, a call does nothing.
    wait_until(
        lambda: gc.collect() > 0 or worker.rpc.rpc_sync(worker.next, is_freed, (worker.lib, key)), "collected"
    )
    check_freed(worker, worker.next, key)


def test_a_handler_keeps_its_arguments(worker: Worker) -> None:
    """While a handler runs it has its arguments, though the caller has let go."""
    key = f"handler {worker.name}"
    rref = worker.rpc.remote(worker.next, Tracked, (worker.lib, key))
    running = worker.rpc.rpc_async(worker.after_next, key_behind_gate, (worker.lib, key, rref))
    del rref
    check_kept(worker, worker.next, key)
    worker.rpc.rpc_sync(worker.after_next, open_gate, (worker.lib, key))
    assert running.wait() == key
    check_freed(worker, worker.next, key)


def key_behind_gate(lib: str, key: str, rref: Any) -> str:
    pass_gate(lib, key)
    return key_of(rref)


def test_copies_by_to_here_dont_count(worker: Worker) -> None:
    key = f"copy {worker.name}"
    rref = worker.rpc.remote(worker.next, Tracked, (worker.lib, key))
    copy = rref.to_here()
    del rref
    check_freed(worker, worker.next, key)
    assert copy.key == key


@weft_only
def test_many_hands_keep_a_value(worker: Worker) -> None:
    """Every worker keeps one that every other made, lets go in an order of its own, and all are freed."""
    key = f"hands {worker.name}"
    rref = worker.rpc.RRef(Tracked(worker.lib, key))
    others = [worker.next, worker.after_next]
    for i in range(10):
        for to in others:
            worker.rpc.rpc_sync(to, keep, (worker.lib, f"{key} {i}", rref))
    del rref
    for i in range(10):
        for to in others if i % 2 else others[::-1]:
            assert not worker.rpc.rpc_sync(worker.name, is_freed, (worker.lib, key))
            worker.rpc.rpc_sync(to, drop, (worker.lib, f"{key} {i}"))
    check_freed(worker, worker.name, key)


@weft_only
@run_on(weft=3, timeout=90, collective_timeout=60)
def test_sharing_and_forgetting_at_the_same_moment(worker: Worker) -> None:
    """Again and again: a race shows when it is run often."""
    often = [
        test_rrefs.test_workers_share_what_one_was_sent,
        test_rrefs.test_rrefs_are_returned,
        test_many_hands_keep_a_value,
    ]
    run_each(worker, often * 10)

"""How long an owner keeps a value: exactly as long as somebody can reach it.

Tracked values say when they are freed. "Not before" is shown by use: many calls after the last thing that
could have freed it, the value is still there.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from tests.rpc.remote_functions import OwnError
from tests.rpc_bodies.places import (
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
from tests.rpc_bodies.running import Worker, wait_until

FREED_SECS = 10.0


def check_freed(w: Worker, owner: str, key: str) -> None:
    wait_until(
        lambda: w.rpc.rpc_sync(owner, is_freed, (w.lib, key)), f"{key} is freed on {owner}", FREED_SECS
    )


def check_kept(w: Worker, owner: str, key: str) -> None:
    for rank in [*range(w.size)] * 5:
        w.rpc.rpc_sync(rank, nothing)
    assert not w.rpc.rpc_sync(owner, is_freed, (w.lib, key)), f"{key} was freed on {owner}, and is in use"


def the_only_holder_goes(w: Worker) -> None:
    key = f"only {w.name}"
    rref = w.rpc.remote(w.next, Tracked, (w.lib, key))
    assert rref.to_here().key == key
    check_kept(w, w.next, key)
    del rref
    check_freed(w, w.next, key)


def dropped_at_once(w: Worker) -> None:
    for i in range(20):
        w.rpc.remote(w.next, Tracked, (w.lib, f"at once {i} {w.name}"))
    for i in range(20):
        check_freed(w, w.next, f"at once {i} {w.name}")


def dropped_before_it_was_made(w: Worker) -> None:
    key = f"early {w.name}"
    rref = w.rpc.remote(w.next, make_tracked_at_gate, (w.lib, key))
    del rref
    w.rpc.rpc_sync(w.next, open_gate, (w.lib, key))
    check_freed(w, w.next, key)


def a_third_worker_holds_it(w: Worker) -> None:
    for key in [f"third {i} {w.name}" for i in range(5)]:
        rref = w.rpc.remote(w.next, Tracked, (w.lib, key))
        w.rpc.rpc_sync(w.after_next, keep, (w.lib, key, {"deep": [rref]}))
        del rref
        check_kept(w, w.next, key)
        assert w.rpc.rpc_sync(w.after_next, key_of_kept, (w.lib, key)) == key
        w.rpc.rpc_sync(w.after_next, drop, (w.lib, key))
        check_freed(w, w.next, key)


def key_of_kept(lib: str, key: str) -> str:
    return key_of(kept(lib, key)["deep"][0])


def passed_on_while_it_is_made(w: Worker) -> None:
    """Sent to a third worker and forgotten, before the owner has made it."""
    key = f"passed {w.name}"
    rref = w.rpc.remote(w.next, make_tracked_at_gate, (w.lib, key))
    sending = w.rpc.rpc_async(w.after_next, keep, (w.lib, key, {"deep": [rref]}))
    del rref
    w.rpc.rpc_sync(w.next, open_gate, (w.lib, key))
    sending.wait()
    check_kept(w, w.next, key)
    assert w.rpc.rpc_sync(w.after_next, key_of_kept, (w.lib, key)) == key
    w.rpc.rpc_sync(w.after_next, drop, (w.lib, key))
    check_freed(w, w.next, key)


def used_and_forgotten_by_others(w: Worker) -> None:
    key = f"used {w.name}"
    rref = w.rpc.remote(w.next, Tracked, (w.lib, key))
    for _ in range(20):
        assert w.rpc.rpc_sync(w.after_next, key_of, (rref,)) == key
        assert w.rpc.rpc_sync(w.next, local_key_of, (rref,)) == key
        assert rref.rpc_sync().get() == key
    check_kept(w, w.next, key)
    del rref
    check_freed(w, w.next, key)


def the_owners_own(w: Worker) -> None:
    key = f"own {w.name}"
    rref = w.rpc.RRef(Tracked(w.lib, key))
    check_kept(w, w.name, key)
    del rref
    check_freed(w, w.name, key)
    key = f"own lent {w.name}"
    rref = w.rpc.RRef(Tracked(w.lib, key))
    w.rpc.rpc_sync(w.next, keep, (w.lib, key, {"deep": [rref]}))
    del rref
    check_kept(w, w.name, key)
    assert w.rpc.rpc_sync(w.next, key_of_kept, (w.lib, key)) == key
    w.rpc.rpc_sync(w.next, drop, (w.lib, key))
    check_freed(w, w.name, key)


def remote_to_oneself(w: Worker) -> None:
    key = f"self {w.name}"
    rref = w.rpc.remote(w.name, Tracked, (w.lib, key))
    assert rref.local_value().key == key
    check_kept(w, w.name, key)
    del rref
    check_freed(w, w.name, key)


def returned_by_the_owner(w: Worker) -> None:
    """Nothing stays at the owner but what the caller holds."""
    for i in range(5):
        key = f"returned {i} {w.name}"
        rref = w.rpc.rpc_sync(w.next, make_tracked_rref, (w.lib, key))
        check_kept(w, w.next, key)
        assert rref.to_here().key == key
        del rref
        check_freed(w, w.next, key)
    rref = w.rpc.remote(w.next, make_tracked_rref, (w.lib, f"outer {w.name}"))
    inner = rref.to_here()
    del rref
    check_kept(w, w.next, f"outer {w.name}")
    assert inner.to_here().key == f"outer {w.name}"
    del inner
    check_freed(w, w.next, f"outer {w.name}")


def calls_that_fail(w: Worker) -> None:
    """Neither an error's traceback nor its report keeps the argument."""
    key = f"failing {w.name}"
    rref = w.rpc.remote(w.next, Tracked, (w.lib, key))
    for to in [w.next, w.after_next]:
        with pytest.raises(ValueError, match=key):
            w.rpc.rpc_sync(to, fail_holding, (rref, key))
    future = w.rpc.rpc_async(w.next, fail_holding, (rref, key))
    with pytest.raises(ValueError, match=key):
        future.wait()
    check_kept(w, w.next, key)
    del rref, future
    check_freed(w, w.next, key)


def fail_holding(rref: Any, text: str) -> None:
    here = rref.to_here()
    raise OwnError(f"{text} {here.key}")


def messages_that_cant_be_pickled(w: Worker) -> None:
    """The RRef was already in the message when the rest of it could not be pickled."""
    key = f"unsent {w.name}"
    rref = w.rpc.remote(w.next, Tracked, (w.lib, key))
    for way in [w.rpc.rpc_sync, w.rpc.rpc_async, w.rpc.remote]:
        for to in [w.next, w.after_next]:
            with pytest.raises(TypeError, match="cannot pickle"):
                way(to, nothing, (rref, [rref], threading.Lock()))
    own = w.rpc.RRef(Tracked(w.lib, f"own {key}"))
    with pytest.raises(TypeError, match="cannot pickle"):
        w.rpc.rpc_sync(w.next, nothing, (own, threading.Lock()))
    check_kept(w, w.next, key)
    del rref, own
    check_freed(w, w.next, key)
    check_freed(w, w.name, f"own {key}")


def results_that_cant_be_pickled(w: Worker) -> None:
    key = f"unreturned {w.name}"
    with pytest.raises((TypeError, RuntimeError), match="cannot pickle"):
        w.rpc.rpc_sync(w.next, make_rref_and_lock, (w.lib, key))
    check_freed(w, w.next, key)


def make_rref_and_lock(lib: str, key: str) -> Any:
    return [make_tracked_rref(lib, key), threading.Lock()]


def answers_that_come_too_late(w: Worker) -> None:
    """The answer has an RRef in it, and nobody waits for it any more."""
    key = f"late {w.name}"
    with pytest.raises(RuntimeError, match="timeout"):
        w.rpc.rpc_sync(w.next, make_tracked_rref_at_gate, (w.lib, key), timeout=0.1)
    w.rpc.rpc_sync(w.next, open_gate, (w.lib, key))
    check_freed(w, w.next, key)


def make_tracked_rref_at_gate(lib: str, key: str) -> Any:
    pass_gate(lib, key)
    return make_tracked_rref(lib, key)


def arguments_of_calls_that_time_out(w: Worker) -> None:
    key = f"timed out {w.name}"
    rref = w.rpc.remote(w.next, Tracked, (w.lib, key))
    with pytest.raises(RuntimeError, match="timeout"):
        w.rpc.rpc_sync(w.after_next, pass_gate, (w.lib, key, [rref]), timeout=0.1)
    del rref
    w.rpc.rpc_sync(w.after_next, open_gate, (w.lib, key))
    check_freed(w, w.next, key)


def futures_hold_results(w: Worker) -> None:
    key = f"in a future {w.name}"
    future = w.rpc.rpc_async(w.next, make_tracked_rref, (w.lib, key))
    future.wait()
    check_kept(w, w.next, key)
    assert future.wait().to_here().key == key
    del future
    check_freed(w, w.next, key)


def cycles(w: Worker) -> None:
    key = f"cycle {w.name}"
    rref = w.rpc.remote(w.next, Tracked, (w.lib, key))
    knot: list[Any] = [rref]
    knot.append(knot)
    del rref
    check_kept(w, w.next, key)
    del knot
    # Not once: while another thread collects, a call does nothing.
    wait_until(lambda: gc.collect() > 0 or w.rpc.rpc_sync(w.next, is_freed, (w.lib, key)), "collected")
    check_freed(w, w.next, key)


def held_by_a_handler(w: Worker) -> None:
    """While a handler runs it has its arguments, though the caller has let go."""
    key = f"handler {w.name}"
    rref = w.rpc.remote(w.next, Tracked, (w.lib, key))
    running = w.rpc.rpc_async(w.after_next, key_behind_gate, (w.lib, key, rref))
    del rref
    check_kept(w, w.next, key)
    w.rpc.rpc_sync(w.after_next, open_gate, (w.lib, key))
    assert running.wait() == key
    check_freed(w, w.next, key)


def key_behind_gate(lib: str, key: str, rref: Any) -> str:
    pass_gate(lib, key)
    return key_of(rref)


def copies_by_to_here_dont_count(w: Worker) -> None:
    key = f"copy {w.name}"
    rref = w.rpc.remote(w.next, Tracked, (w.lib, key))
    copy = rref.to_here()
    del rref
    check_freed(w, w.next, key)
    assert copy.key == key


def many_hands(w: Worker) -> None:
    """Every worker keeps one that every other made, lets go in an order of its own, and all are freed."""
    key = f"hands {w.name}"
    rref = w.rpc.RRef(Tracked(w.lib, key))
    others = [w.next, w.after_next]
    for i in range(10):
        for to in others:
            w.rpc.rpc_sync(to, keep, (w.lib, f"{key} {i}", rref))
    del rref
    for i in range(10):
        for to in others if i % 2 else others[::-1]:
            assert not w.rpc.rpc_sync(w.name, is_freed, (w.lib, key))
            w.rpc.rpc_sync(to, drop, (w.lib, f"{key} {i}"))
    check_freed(w, w.name, key)


BODIES = [
    the_only_holder_goes,
    dropped_at_once,
    dropped_before_it_was_made,
    a_third_worker_holds_it,
    passed_on_while_it_is_made,
    used_and_forgotten_by_others,
    the_owners_own,
    remote_to_oneself,
    returned_by_the_owner,
    futures_hold_results,
    cycles,
    held_by_a_handler,
    copies_by_to_here_dont_count,
]
WEFT_ONLY = [
    calls_that_fail,
    messages_that_cant_be_pickled,
    results_that_cant_be_pickled,
    answers_that_come_too_late,
    arguments_of_calls_that_time_out,
    many_hands,
]

"""Timeouts: a call's own, the default, and none."""

from __future__ import annotations

import pytest

import weft
from tests.rpc.workers import call
from tests.rpc_bodies.places import Counter, add, open_gate, pass_gate
from tests.rpc_bodies.running import Worker, takes

TIMED_OUT = r"RPC ran for more than set timeout \({} ms\) and will now be marked with an error"
SLACK_SECS = 5.0


def hang(w: Worker, mode: str, key: str, **more: float) -> None:
    call(w, mode, w.next, pass_gate, (w.lib, f"{key} {w.name}"), **more)


def let_go(w: Worker, key: str) -> None:
    """Let the handler end: a graceful shutdown waits for it."""
    w.rpc.rpc_sync(w.next, open_gate, (w.lib, f"{key} {w.name}"))


def a_calls_own_timeout(w: Worker) -> None:
    for mode in ["sync", "async"]:
        with takes(0.25, 0.25 + SLACK_SECS), pytest.raises(RuntimeError, match=TIMED_OUT.format(250)):
            hang(w, mode, f"own {mode}", timeout=0.25)
        let_go(w, f"own {mode}")
    assert w.rpc.rpc_sync(w.next, add, (1, 2), timeout=20) == 3


def the_default_timeout(w: Worker) -> None:
    before = w.rpc.get_rpc_timeout()
    w.rpc._set_rpc_timeout(0.25)
    try:
        assert w.rpc.get_rpc_timeout() == pytest.approx(0.25)
        for mode in ["sync", "async"]:
            with takes(0.25, 0.25 + SLACK_SECS), pytest.raises(RuntimeError, match=TIMED_OUT.format(250)):
                hang(w, mode, f"default {mode}")
        # Zero is for ever, and a call's own goes before the default.
        forever = w.rpc.rpc_async(w.next, pass_gate, (w.lib, f"forever {w.name}", 7), timeout=0)
        longer = w.rpc.rpc_async(w.next, pass_gate, (w.lib, f"forever {w.name}", 8), timeout=30)
        with pytest.raises(RuntimeError, match=TIMED_OUT.format(250)):
            hang(w, "sync", "default sync")
        assert not forever.done()
        assert not longer.done()
    finally:
        w.rpc._set_rpc_timeout(before)
    for key in ["default sync", "default async", "forever"]:
        let_go(w, key)
    assert (forever.wait(), longer.wait()) == (7, 8)
    assert w.rpc.get_rpc_timeout() == before


def the_default_is_the_options(w: Worker) -> None:
    """With rpc_timeout=0.25."""
    assert w.rpc.get_rpc_timeout() == 0.25
    with takes(0.25, 0.25 + SLACK_SECS), pytest.raises(RuntimeError, match=TIMED_OUT.format(250)):
        hang(w, "sync", "options")
    w.rpc.rpc_sync(w.next, open_gate, (w.lib, f"options {w.name}"), timeout=20)


def a_default_of_zero_is_none(w: Worker) -> None:
    before = w.rpc.get_rpc_timeout()
    w.rpc._set_rpc_timeout(0)
    try:
        future = w.rpc.rpc_async(w.next, pass_gate, (w.lib, f"zero {w.name}", 7))
        with pytest.raises(RuntimeError, match=TIMED_OUT.format(100)):
            hang(w, "sync", "zero", timeout=0.1)
        assert not future.done()
        let_go(w, "zero")
        assert future.wait() == 7
    finally:
        w.rpc._set_rpc_timeout(before)


def to_here_in_time(w: Worker) -> None:
    slow = w.rpc.remote(w.next, pass_gate, (w.lib, f"slow {w.name}", 5))
    with takes(0.2, 0.2 + SLACK_SECS), pytest.raises(RuntimeError, match=TIMED_OUT.format(200)):
        slow.to_here(timeout=0.2)
    let_go(w, "slow")
    assert slow.to_here() == 5  # the value is there; only the question had timed out


def proxies_in_time(w: Worker) -> None:
    rref = w.rpc.remote(w.next, Counter, (5,))
    rref.to_here()
    key = f"proxy {w.name}"
    uses = [
        lambda: rref.rpc_sync(timeout=0.2).pass_gate(w.lib, key),
        lambda: rref.rpc_async(timeout=0.2).pass_gate(w.lib, key).wait(),
        lambda: rref.remote(timeout=0.2).pass_gate(w.lib, key).to_here(timeout=0.2),
    ]
    for use in uses:
        with takes(0.2, 0.2 + SLACK_SECS), pytest.raises(RuntimeError, match=r"set timeout|RRef creation"):
            use()
    let_go(w, "proxy")
    assert rref.rpc_sync(timeout=20).pass_gate(w.lib, f"proxy {w.name}") == 5


def an_error_that_says_what(w: Worker) -> None:
    """It is a PeerError too, of the worker that did not answer, and says which function."""
    key = f"says {w.name}"
    uses = {
        "sync": lambda: hang(w, "sync", "says", timeout=0.2),
        "async": lambda: hang(w, "async", "says", timeout=0.2),
        "remote": lambda: w.rpc.remote(w.next, pass_gate, (w.lib, key)).to_here(timeout=0.2),
    }
    for mode, use in uses.items():
        with pytest.raises(weft.PeerTimeoutError, match=TIMED_OUT.format(200)) as caught:
            use()
        assert isinstance(caught.value, TimeoutError)
        assert w.next in str(caught.value)
        assert caught.value.ranks == (w.next_rank,)
        if mode != "remote":
            assert "pass_gate" in str(caught.value)
    let_go(w, "says")


def late_answers_do_no_harm(w: Worker) -> None:
    """What comes after the timeout is nobody's, and the next calls get their own answers."""
    for i in range(10):
        with pytest.raises(weft.PeerTimeoutError):
            hang(w, "async", f"late {i}", timeout=0.02)
    for i in range(10):
        let_go(w, f"late {i}")
        assert w.rpc.rpc_sync(w.next, add, (i, i)) == 2 * i


BODIES = [
    a_calls_own_timeout,
    the_default_timeout,
    a_default_of_zero_is_none,
    to_here_in_time,
    proxies_in_time,
]
WEFT_ONLY = [an_error_that_says_what, late_answers_do_no_harm]

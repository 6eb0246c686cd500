"""Timeouts: a call's own, the default, and none; what is refused as one."""

from __future__ import annotations

import math
from typing import Any

import pytest

import weft
from tests.ranks import run_on
from tests.rpc.remote_functions import Counter, add, open_gate, pass_gate
from tests.rpc.workers import Worker, call, takes, weft_only, with_options
from weft import rpc
from weft.errors import ConfigError, ConfigTypeError
from weft.rpc.options import check_secs, resolve_options

pytestmark = [
    run_on(threads=3, timeout=90, collective_timeout=60),
    run_on(weft=3, timeout=90, collective_timeout=60, full=True),
]

TIMED_OUT = r"RPC ran for more than set timeout \({} ms\) and will now be marked with an error"
SLACK_SECS = 5.0


def hang(worker: Worker, mode: str, key: str, **more: float) -> None:
    call(worker, mode, worker.next, pass_gate, (worker.lib, f"{key} {worker.name}"), **more)


def let_go(worker: Worker, key: str) -> None:
    """Let the handler end: a graceful shutdown waits for it."""
    worker.rpc.rpc_sync(worker.next, open_gate, (worker.lib, f"{key} {worker.name}"))


def test_a_calls_own_timeout_holds(worker: Worker) -> None:
    for mode in ["sync", "async"]:
        with takes(0.25, 0.25 + SLACK_SECS), pytest.raises(RuntimeError, match=TIMED_OUT.format(250)):
            hang(worker, mode, f"own {mode}", timeout=0.25)
        let_go(worker, f"own {mode}")
    assert worker.rpc.rpc_sync(worker.next, add, (1, 2), timeout=20) == 3


def test_the_default_timeout_holds(worker: Worker) -> None:
    before = worker.rpc.get_rpc_timeout()
    worker.rpc._set_rpc_timeout(0.25)
    try:
        assert worker.rpc.get_rpc_timeout() == pytest.approx(0.25)
        for mode in ["sync", "async"]:
            with takes(0.25, 0.25 + SLACK_SECS), pytest.raises(RuntimeError, match=TIMED_OUT.format(250)):
                hang(worker, mode, f"default {mode}")
        # Zero is for ever, and a call's own goes before the default.
        forever = worker.rpc.rpc_async(
            worker.next, pass_gate, (worker.lib, f"forever {worker.name}", 7), timeout=0
        )
        longer = worker.rpc.rpc_async(
            worker.next, pass_gate, (worker.lib, f"forever {worker.name}", 8), timeout=30
        )
        with pytest.raises(RuntimeError, match=TIMED_OUT.format(250)):
            hang(worker, "sync", "default sync")
        assert not forever.done()
        assert not longer.done()
    finally:
        worker.rpc._set_rpc_timeout(before)
    for key in ["default sync", "default async", "forever"]:
        let_go(worker, key)
    assert (forever.wait(), longer.wait()) == (7, 8)
    assert worker.rpc.get_rpc_timeout() == before


@with_options(rpc_timeout=0.25)
def test_the_default_is_the_options(worker: Worker) -> None:
    assert worker.rpc.get_rpc_timeout() == 0.25
    with takes(0.25, 0.25 + SLACK_SECS), pytest.raises(RuntimeError, match=TIMED_OUT.format(250)):
        hang(worker, "sync", "options")
    worker.rpc.rpc_sync(worker.next, open_gate, (worker.lib, f"options {worker.name}"), timeout=20)


def test_a_default_of_zero_is_none(worker: Worker) -> None:
    before = worker.rpc.get_rpc_timeout()
    worker.rpc._set_rpc_timeout(0)
    try:
        future = worker.rpc.rpc_async(worker.next, pass_gate, (worker.lib, f"zero {worker.name}", 7))
        with pytest.raises(RuntimeError, match=TIMED_OUT.format(100)):
            hang(worker, "sync", "zero", timeout=0.1)
        assert not future.done()
        let_go(worker, "zero")
        assert future.wait() == 7
    finally:
        worker.rpc._set_rpc_timeout(before)


def test_to_here_gives_up_in_time(worker: Worker) -> None:
    slow = worker.rpc.remote(worker.next, pass_gate, (worker.lib, f"slow {worker.name}", 5))
    with takes(0.2, 0.2 + SLACK_SECS), pytest.raises(RuntimeError, match=TIMED_OUT.format(200)):
        slow.to_here(timeout=0.2)
    let_go(worker, "slow")
    assert slow.to_here() == 5  # the value is there; only the question had timed out


def test_proxies_give_up_in_time(worker: Worker) -> None:
    rref = worker.rpc.remote(worker.next, Counter, (5,))
    rref.to_here()
    key = f"proxy {worker.name}"
    uses = [
        lambda: rref.rpc_sync(timeout=0.2).pass_gate(worker.lib, key),
        lambda: rref.rpc_async(timeout=0.2).pass_gate(worker.lib, key).wait(),
        lambda: rref.remote(timeout=0.2).pass_gate(worker.lib, key).to_here(timeout=0.2),
    ]
    for use in uses:
        with takes(0.2, 0.2 + SLACK_SECS), pytest.raises(RuntimeError, match=r"set timeout|RRef creation"):
            use()
    let_go(worker, "proxy")
    assert rref.rpc_sync(timeout=20).pass_gate(worker.lib, f"proxy {worker.name}") == 5


@weft_only
def test_the_error_says_what_and_who(worker: Worker) -> None:
    """It is a PeerError too, of the worker that did not answer, and says which function."""
    key = f"says {worker.name}"
    uses = {
        "sync": lambda: hang(worker, "sync", "says", timeout=0.2),
        "async": lambda: hang(worker, "async", "says", timeout=0.2),
        "remote": lambda: worker.rpc.remote(worker.next, pass_gate, (worker.lib, key)).to_here(timeout=0.2),
    }
    for mode, use in uses.items():
        with pytest.raises(weft.PeerTimeoutError, match=TIMED_OUT.format(200)) as caught:
            use()
        assert isinstance(caught.value, TimeoutError)
        assert worker.next in str(caught.value)
        assert caught.value.ranks == (worker.next_rank,)
        if mode != "remote":
            assert "pass_gate" in str(caught.value)
    let_go(worker, "says")


@weft_only
def test_late_answers_do_no_harm(worker: Worker) -> None:
    """What comes after the timeout is nobody's, and the next calls get their own answers."""
    for i in range(10):
        with pytest.raises(weft.PeerTimeoutError):
            hang(worker, "async", f"late {i}", timeout=0.02)
    for i in range(10):
        let_go(worker, f"late {i}")
        assert worker.rpc.rpc_sync(worker.next, add, (i, i)) == 2 * i


# -- numbers of seconds that users give: finite, 0 or more; anything else is named ---------------------

NO_NUMBERS = ["5", None, True, [1], b"1", 1j]
NO_TIMES = [math.inf, -math.inf, math.nan, -1, -0.5, 1e300, 10**400]


@run_on()
@pytest.mark.parametrize("secs", NO_NUMBERS, ids=repr)
def test_a_timeout_of_another_type_is_refused(secs: Any) -> None:
    with pytest.raises(ConfigTypeError, match=r"shutdown: timeout must be a number of seconds"):
        check_secs(secs, "shutdown: timeout")
    with pytest.raises(ConfigTypeError, match="rpc_timeout"):
        rpc.TensorPipeRpcBackendOptions(rpc_timeout=secs)


@run_on()
@pytest.mark.parametrize("secs", NO_TIMES, ids=lambda secs: str(secs)[:8])
def test_a_timeout_out_of_range_is_refused(secs: Any) -> None:
    with pytest.raises(ConfigError, match=r"rpc_timeout must be 0 \(none\) or more seconds"):
        rpc.TensorPipeRpcBackendOptions(rpc_timeout=secs)


@run_on()
@pytest.mark.parametrize("secs", [0, 0.0, 1, 2.5, 1e9])
def test_valid_timeouts_pass(secs: float) -> None:
    assert rpc.TensorPipeRpcBackendOptions(rpc_timeout=secs).rpc_timeout == secs
    assert type(check_secs(secs, "x")) is float


@run_on()
def test_an_option_that_is_set_later_is_checked_too() -> None:
    options = rpc.TensorPipeRpcBackendOptions()
    options.rpc_timeout = math.inf
    with pytest.raises(ConfigError, match="rpc_timeout"):
        resolve_options(options)


@run_on()
@pytest.mark.parametrize("name", ["num_worker_threads", "max_in_flight"])
def test_counts_are_ints(name: str) -> None:
    for value in ("5", 2.0, None):
        with pytest.raises(ConfigTypeError, match=name):
            rpc.TensorPipeRpcBackendOptions(**{name: value})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=name):
        rpc.TensorPipeRpcBackendOptions(**{name: 0})

"""The end: it waits for what is unfinished, or doesn't; nothing stays; one may begin again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.rpc import acts
from tests.rpc.acts import call, count_at
from tests.rpc.crew import Crew
from tests.rpc.remote_functions import Counter, add, count, gate_of, give, open_gate, pass_gate
from tests.rpc.workers import WEFT, wait_until
from weft import rpc

pytestmark = pytest.mark.processes

NOT_A_WORKER = "RPC has not been initialized. Call weft.rpc.init_rpc first."


def test_it_waits_for_everyone() -> None:
    with Crew(3) as crew:
        crew.join()
        early = [crew[rank].begin(acts.leave) for rank in (0, 1)]
        # The late one still works, with those who wait too.
        for _ in range(20):
            assert crew[2].do(call, "worker0", add, 1, 2) == 3
            assert crew[2].do(call, "worker1", call_on, "worker0") == 7
        assert not any(future.done() for future in early)
        crew[2].do(acts.leave)
        for future in early:
            future.result(20)


def test_it_waits_for_unfinished_calls() -> None:
    """Also for those of which the answer is nobody's, and which the callee was only sent."""
    with Crew(3) as crew:
        crew.join()
        crew[0].do(begin_and_forget, "worker2", "gate")
        wait_until(lambda: crew[2].do(count_at, "worker2", "at gate gate") == 2, "both have begun")
        leaving = [crew[rank].begin(acts.leave) for rank in (0, 1, 2)]
        with pytest.raises(TimeoutError):
            leaving[0].result(0.5)
        assert not any(future.done() for future in leaving)
        crew[2].do(open_here, "worker2", "gate")
        for future in leaving:
            future.result(20)
        assert crew[2].do(count_at, "worker2", "after gate") == 2


def test_handlers_that_call_on_are_waited_for() -> None:
    """Work that makes work: a chain is under way while all wait in shutdown."""
    with Crew(3) as crew:
        crew.join()
        crew[0].do(begin_chain, ["worker1", "worker2", "worker0"] * 20)
        crew.every(acts.leave)
        assert sum(crew[rank].do(count_at, f"worker{rank}", "hop") for rank in range(3)) == 60


@pytest.mark.full
def test_not_graceful_waits_for_nobody() -> None:
    with Crew(3) as crew:
        crew.join()
        waiting = crew[0].begin(acts.see, "sync", "worker1", "gate")
        wait_until(lambda: crew[1].do(count_at, "worker1", "at gate gate") == 1, "it has begun")
        crew[1].do(acts.leave, graceful=False)
        seen = waiting.result(20)
        assert seen.is_peer_error, seen
        assert "worker1" in seen.text
        assert seen.ranks == (1,)
        with pytest.raises(weft.PeerError, match="worker1"):
            crew[2].do(call, "worker1", add, 1, 2)
        assert crew[0].do(call, "worker2", add, 1, 2) == 3
        assert crew[1].do(acts.calls_after_shutdown)[0] == NOT_A_WORKER


def test_a_call_of_ones_own_ends_with_the_worker() -> None:
    with Crew(2) as crew:
        crew.join()
        waiting = crew[0].begin(call, "worker1", pass_gate, WEFT, "gate")
        wait_until(lambda: crew[1].do(count_at, "worker1", "at gate gate") == 1, "it has begun")
        crew[0].do(acts.leave, graceful=False)
        with pytest.raises(RuntimeError):
            waiting.result(20)
        crew[1].do(call, "worker1", open_gate, WEFT, "gate")
        assert crew[1].do(call, "worker1", add, 1, 2) == 3


def test_twice() -> None:
    with Crew(2) as crew:
        crew.join()
        crew.every(acts.leave)
        for graceful in [True, False]:
            with pytest.raises(weft.StateError, match="RPC has not been initialized"):
                crew[0].do(acts.leave, graceful)
        texts = crew[0].do(acts.calls_after_shutdown)
        assert set(texts[:5]) == {NOT_A_WORKER}
        assert "returned" not in texts


def test_before_it_began() -> None:
    with Crew(1) as crew:
        texts = crew[0].do(acts.calls_after_shutdown)
        assert set(texts[:5]) == {NOT_A_WORKER}
        assert "returned" not in texts


def test_init_twice() -> None:
    with Crew(1) as crew:
        crew.join()
        with pytest.raises(RuntimeError, match="RPC is already initialized"):
            crew[0].do(acts.join, "other", 0, 1, crew.meeting())
        assert crew[0].do(call, "worker0", add, 1, 2) == 3
        crew[0].do(acts.leave)


def test_its_timeout() -> None:
    """Who waits longer than that for the others says for whom."""
    with Crew(2) as crew:
        crew.join()
        seen = crew[0].do(acts.see, "shutdown", 0.5)
        assert seen.error == "PeerTimeoutError", seen
        assert seen.ranks == (1,), seen
        assert "worker1" in seen.text, seen
        assert 0.45 < seen.raised_secs - seen.entered_secs < 4
        # The worker has ended all the same, as torch's has.
        assert crew[0].do(acts.calls_after_shutdown)[0] == NOT_A_WORKER
        assert crew[0].do(acts.python_threads) == []


def test_again_and_again_and_nothing_stays() -> None:
    """Each time other names and sizes, calls, RRefs and large tensors; then no thread, file or memory."""
    with Crew(3) as crew:
        files = crew[0].do(acts.open_files)
        paths: set[str] = set()
        num_threads: list[int] = []
        for turn in range(4):
            ranks = [0, 1, 2] if turn % 2 == 0 else [2, 0]
            init_method = crew.meeting()
            joining = [
                crew[member].begin(acts.join, f"turn{turn}-{new}", new, len(ranks), init_method)
                for new, member in enumerate(ranks)
            ]
            for future in joining:
                future.result(20)
            for new, member in enumerate(ranks):
                crew[member].do(use_all, f"turn{turn}-{(new + 1) % len(ranks)}")
                paths |= set(crew[member].do(socket_paths))
            for future in [crew[member].begin(acts.leave) for member in ranks]:
                future.result(20)
            for member in ranks:
                assert crew[member].do(acts.python_threads) == []
            num_threads.append(crew[0].do(acts.native_threads, num_threads[0] if num_threads else 0))
        assert crew[0].do(acts.shared_mappings) == []
        # One descriptor of 32 bytes stays: where this process shares its secret as long as it lives.
        assert crew[0].do(acts.open_files) == {**files, "/memfd": files.get("/memfd", 0) + 1}
        assert not any(os.path.exists(path) for path in paths)
        assert num_threads[-1] <= num_threads[0]  # the operators' own stay, and there are no more


STOPPED_SECS = 1.0
BOUND_SECS = STOPPED_SECS + 6.0  # and what a machine takes that has other things to do


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_worker_that_is_stopped_is_named_in_time(stopped: int) -> None:
    with Crew(3) as crew:
        crew.join()
        crew[stopped].signal(signal.SIGSTOP)
        others = [rank for rank in range(3) if rank != stopped]
        leaving = [crew[rank].begin(acts.see, "shutdown", STOPPED_SECS) for rank in others]
        for future in leaving:
            seen = future.result(20)
            assert seen.error == "PeerTimeoutError", seen
            assert seen.ranks == (stopped,), seen
            assert seen.raised_secs - seen.entered_secs < BOUND_SECS, seen
        for rank in others:
            assert crew[rank].do(acts.python_threads) == []


def test_a_stopped_store_does_not_block_shutdown() -> None:
    """The worker that is stopped hosts what the members of a dynamic group are listed in."""
    with Crew(2) as crew:
        init_method = crew.meeting("tcp")
        for rank in range(2):
            crew[rank].do(acts.join, f"worker{rank}", rank, None, init_method)
        assert crew[1].do(call, "worker0", add, 1, 2) == 3
        crew[0].signal(signal.SIGSTOP)
        seen = crew[1].begin(acts.see, "shutdown", STOPPED_SECS).result(20)
        assert seen.error == "PeerTimeoutError", seen
        assert "store" in seen.text
        assert "worker0" in seen.text
        assert seen.ranks == (0,), seen
        assert seen.raised_secs - seen.entered_secs < BOUND_SECS, seen


@pytest.mark.parametrize("timeout", ["5", float("inf"), float("nan"), -2, None], ids=repr)
def test_an_invalid_timeout_is_refused(timeout: Any) -> None:
    """Named wherever one is given, and the worker goes on."""
    with Crew(1) as crew:
        crew.join()
        for kind, text in crew[0].do(give_timeout, timeout):
            assert kind == ("ConfigError" if isinstance(timeout, int | float) else "ConfigTypeError"), text
            assert "timeout" in text, text
        assert crew[0].do(call, "worker0", add, 1, 2) == 3
        crew[0].do(acts.leave)


# -- what workers do around a shutdown ------------------------------------------------------------------


def call_on(to: str) -> int:
    return rpc.rpc_sync(to, add, (3, 4))


def begin_and_forget(to: str, key: str) -> None:
    """Two calls whose answers nobody waits for."""
    rpc.rpc_async(to, pass_gate_and_count, (key,))
    rpc.remote(to, pass_gate_and_count, (key,))


def pass_gate_and_count(key: str) -> None:
    pass_gate(WEFT, key)
    count(WEFT, "after gate")


def open_here(worker: str, key: str) -> None:
    """From outside: this thread runs no call."""
    gate_of(worker, key).set()


def begin_chain(hops: list[str]) -> None:
    rpc.rpc_async(hops[0], hop_on, (hops[1:],))


def hop_on(hops: list[str]) -> None:
    count(WEFT, "hop")
    if hops:
        rpc.rpc_async(hops[0], hop_on, (hops[1:],))


def use_all(to: str) -> None:
    """Calls, RRefs that are never dropped, large tensors both ways, an error, a timeout."""
    large = torch.ones(500_000)
    assert torch.equal(rpc.rpc_sync(to, give, (large,)), large)
    rref = rpc.remote(to, Counter, (1,))
    assert rref.rpc_sync().bump() == 2
    _kept.append(rref)
    _kept.append(rpc.RRef(large))
    futures = [rpc.rpc_async(to, add, (i, 1)) for i in range(100)]
    assert [future.wait() for future in futures] == list(range(1, 101))
    try:
        rpc.rpc_sync(to, rpc.rpc_sync, (to, no_such_luck))
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError("no error came")


_kept: list[object] = []


def no_such_luck() -> float:
    return 1 / 0


def socket_paths() -> list[str]:
    """The socket files that this process listens on."""
    own: set[str] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            own.add(target[8:-1])
    found: list[str] = []
    for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]:
        parts = line.split()
        if len(parts) > 7 and parts[6] in own and not parts[7].startswith("@"):
            found.append(parts[7])
    return found


def give_timeout(timeout: Any) -> list[tuple[str, str]]:
    """The errors of all that takes a timeout, by type and text."""
    rref = rpc.remote("worker0", add, (1, 2))
    takers: list[Callable[[], object]] = [
        lambda: rpc.rpc_sync("worker0", add, (1, 2), timeout=timeout),
        lambda: rpc.rpc_async("worker0", add, (1, 2), timeout=timeout),
        lambda: rpc.remote("worker0", add, (1, 2), timeout=timeout),
        lambda: rref.to_here(timeout=timeout),
        lambda: rref.rpc_sync(timeout=timeout).bit_length(),
        lambda: rref.rpc_async(timeout=timeout).bit_length(),
        lambda: rref.remote(timeout=timeout).bit_length(),
        lambda: rpc.shutdown(timeout=timeout),
        lambda: rpc._set_rpc_timeout(timeout),
        lambda: rpc.api._all_gather(None, timeout=timeout),
    ]
    seen: list[tuple[str, str]] = []
    for take in takers:
        try:
            take()
        except Exception as error:
            seen.append((type(error).__name__, str(error)))
        else:
            seen.append(("nothing", "was taken"))
    return seen

"""What members of a crew are told to do while one of them is killed in the middle of a pass."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor

import weft
from tests.dist_autograd.leaves import debug_counts, leaf, make_leaf, pass_on, scale
from tests.rpc.remote_functions import gate_of, kept, pass_gate
from tests.rpc.workers import WEFT
from weft import dist_autograd, rpc

KEY = "the leaf"
GATE = "in a pass"
PASS_SECS = 20.0  # one that takes this long hangs


def plant_here(seed: int) -> None:
    make_leaf(WEFT, KEY, seed, (3,))


def gate_here() -> None:
    """The leaf's gradient waits at a gate, in the middle of the pass."""
    kept(WEFT, KEY).register_hook(lambda gradient: pass_gate(WEFT, GATE, gradient))


def open_here(worker: str, gate: str = GATE) -> None:
    gate_of(worker, gate).set()


def counts_here() -> tuple[int, int]:
    return debug_counts(WEFT)


def scale_along(hops: list[str], x: Tensor) -> Tensor:
    """Here, then on the next, within this call, and so on."""
    y = scale(WEFT, KEY, x)
    return rpc.rpc_sync(hops[0], scale_along, (hops[1:], y), timeout=PASS_SECS) if hops else y


@dataclass(frozen=True)
class End:
    """How a pass ended: the type's name and the text of its error, whom it blames, and when."""

    error: str
    is_peer_error: bool
    ranks: tuple[int, ...]
    text: str
    ended_secs: float


def run_pass(hops: list[str], nested: bool, exact: bool, forward_done: str | None = None) -> End:
    """A whole pass over these workers' leaves, here its root; how it ended. A wrong gradient raises.

    With `forward_done` it waits between forward and backward until the gate of that name is open.
    """
    x = leaf(1, 3)
    try:
        with dist_autograd.context() as context_id:
            if nested:
                y = rpc.rpc_sync(hops[0], scale_along, (hops[1:], x), timeout=PASS_SECS)
            else:
                y = x
                for to in hops:
                    y = rpc.rpc_sync(to, scale, (WEFT, KEY, y), timeout=PASS_SECS)
            if forward_done is not None:
                pass_gate(WEFT, forward_done)
            dist_autograd.backward(context_id, [y.sum()], exact=exact)
            check_mine(dist_autograd.get_gradients(context_id)[x], hops)
    except RuntimeError as error:
        return End(
            type(error).__name__,
            isinstance(error, weft.PeerError),
            tuple(getattr(error, "ranks", ())),
            str(error),
            time.monotonic(),
        )
    return End("", False, (), "", time.monotonic())


def check_mine(gradient: Tensor, hops: list[str]) -> None:
    expected = torch.ones(3).double()
    for to in hops:
        expected = expected * leaf(int(to.removeprefix("worker")), 3).detach()
    assert torch.equal(gradient, expected), f"{gradient}, not {expected}"


def call_in_context(to: str) -> End:
    """A call that waits at the callee's gate; only the call may fail, not the end of the block."""
    try:
        with dist_autograd.context():
            rpc.rpc_sync(to, pass_gate, (WEFT, GATE, leaf(1, 3)), timeout=PASS_SECS)
    except weft.PeerError as error:
        return End(type(error).__name__, True, error.ranks, str(error), time.monotonic())
    return End("", False, (), "", time.monotonic())


def storm(workers: list[str], seed: int) -> tuple[int, End]:
    """Passes over workers that chance picks, until one fails: how many were right, and how that one ended."""
    chance = random.Random(seed)
    num_right = 0
    while True:
        hops = [chance.choice(workers) for _ in range(chance.randint(1, 4))]
        end = run_pass(hops, chance.random() < 0.5, chance.random() < 0.5)
        if end.error:
            return num_right, end
        num_right += 1


def pass_through(via: str, to: str) -> None:
    """A pass of two hops, the second from the first, with its gradient checked."""
    x = leaf(1, 3)
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync(via, pass_on, (WEFT, to, scale, WEFT, KEY, x))
        dist_autograd.backward(context_id, [y.sum()])
        check_mine(dist_autograd.get_gradients(context_id)[x], [to])

"""Leaves here and on other workers, functions that use them, and what a context holds of their gradients.

All numbers are quarters of small whole numbers, in float64: their sums and products are exact, in any order.
So a gradient is that of the same computation on one worker, to the bit, or it is wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.distributed import autograd as torch_autograd

from tests.rpc.remote_functions import count, keep, kept, pass_gate
from tests.rpc.workers import TORCH, WEFT, Worker, wait_until
from weft import dist_autograd

# Modules: weft's must be there before RPC begins.
AUTOGRAD = {WEFT: dist_autograd, TORCH: torch_autograd}
OPTIMIZERS = {WEFT: "weft", TORCH: "torch.distributed.optim"}


def autograd(lib: str) -> Any:
    return AUTOGRAD[lib]


def quarters(seed: int, *shape: int) -> Tensor:
    """Exact numbers between -2 and 2, the same on every worker."""
    made = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed))
    return made.double() / 4


def leaf(seed: int, *shape: int) -> Tensor:
    return quarters(seed, *shape).requires_grad_()


def added(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum(0)


@dataclass(frozen=True, eq=False)
class Planted:
    """A leaf that lives on another worker; `value` is the same one here, for the local computation."""

    worker: str
    key: str
    value: Tensor


def plant(w: Worker, to: str, seed: int, *shape: int, name: str = "leaf") -> Planted:
    """Have a worker make a leaf and keep it for this one."""
    key = f"{name} {seed} of {w.name}"
    w.rpc.rpc_sync(to, make_leaf, (w.lib, key, seed, shape))
    return Planted(to, key, leaf(seed, *shape))


def make_leaf(lib: str, key: str, seed: int, shape: Sequence[int]) -> None:
    keep(lib, key, leaf(seed, *shape))


def scale(lib: str, key: str, x: Tensor) -> Tensor:
    """Runs only where the leaf is kept, and says how often it ran."""
    count(lib, f"scale {key}")
    return x * kept(lib, key)


def shift(lib: str, key: str, x: Tensor) -> Tensor:
    return x + kept(lib, key)


def slow_down(lib: str, key: str, gate: str) -> None:
    """The leaf's gradient comes to a gate first."""
    kept(lib, key).register_hook(lambda gradient: pass_gate(lib, gate, gradient))


def own(lib: str, key: str) -> Tensor:
    """The leaf itself: what the caller gets of it is cut from it."""
    return kept(lib, key)


def pass_on(lib: str, to: str, function: Callable[..., Any], *args: Any) -> Any:
    """A nested call."""
    return import_module(lib).rpc_sync(to, function, args)


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


def run_here(thing: Tensor | Planted) -> Tensor:
    made = thing.value if isinstance(thing, Planted) else thing
    return made.detach().clone().requires_grad_()


def local_gradients(loss_of: Callable[..., Tensor], *leaves: Tensor | Planted) -> tuple[Tensor | None, ...]:
    """What the same computation gives on one worker."""
    copies = [run_here(each) for each in leaves]
    return torch.autograd.grad(loss_of(*copies), copies, allow_unused=True)


@dataclass(frozen=True)
class Held:
    """What a worker has of a context: how many gradients, those of some leaves, and the leaves' own .grad."""

    num_gradients: int
    gradients: list[Tensor | None]
    grads: list[Tensor | None]


def held(lib: str, context_id: int, keys: Sequence[str]) -> Held:
    return held_of(lib, context_id, [kept(lib, key) for key in keys])


def held_of(lib: str, context_id: int, leaves: Sequence[Tensor]) -> Held:
    gradients = autograd(lib).get_gradients(context_id)
    found = [gradients.get(each) for each in leaves]
    return Held(len(gradients), found, [each.grad for each in leaves])


def same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Equal to the bit, and both sparse or both not, of one dtype. A zero's sign doesn't count."""
    if ours is None or theirs is None:
        return ours is theirs
    if (ours.layout, ours.dtype, ours.shape) != (theirs.layout, theirs.dtype, theirs.shape):
        return False
    return torch.equal(dense(ours), dense(theirs))


def dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def check(
    w: Worker,
    context_id: int,
    loss_of: Callable[..., Tensor],
    *leaves: Tensor | Planted,
    unused: str = "none",
) -> None:
    """On every worker the context holds what `loss_of` gives its leaves on one worker, and nothing else.

    A leaf that the loss doesn't depend on has none; with unused="zeros" it has one of zeros. No leaf's .grad
    has been touched.
    """
    found = gather(w, context_id, *leaves)
    for i, (each, expected) in enumerate(zip(leaves, local_gradients(loss_of, *leaves), strict=True)):
        if expected is None and unused == "zeros":
            expected = torch.zeros_like(run_here(each))
        assert same(found[i], expected), f"leaf {i}: {found[i]}, not {expected}"


def gather(w: Worker, context_id: int, *leaves: Tensor | Planted) -> list[Tensor | None]:
    """The gradients of these leaves, each from its worker, in the order given.

    No worker that has one of them has others too, and no leaf has a .grad.
    """
    planted = [as_planted(w, i, each) for i, each in enumerate(leaves)]
    found: dict[Planted, Tensor | None] = {}
    for worker in {each.worker for each in planted}:
        theirs = [each for each in planted if each.worker == worker]
        asked = w.lib, context_id, [each.key for each in theirs]
        seen: Held = held(*asked) if worker == w.name else w.rpc.rpc_sync(worker, held, asked)
        found |= dict(zip(theirs, seen.gradients, strict=True))
        assert seen.grads == [None] * len(theirs), f"{worker} has a .grad: {seen.grads}"
        num_found = len([gradient for gradient in seen.gradients if gradient is not None])
        assert seen.num_gradients == num_found, f"{worker} has {seen.num_gradients}, {num_found} are known"
    return [found[each] for each in planted]


def as_planted(w: Worker, number: int, thing: Tensor | Planted) -> Planted:
    if isinstance(thing, Planted):
        return thing
    key = f"{w.name}'s own {number}"
    keep(w.lib, key, thing)
    return Planted(w.name, key, thing)


def has_context(lib: str, context_id: int) -> bool:
    """Whether this worker knows a context of that id."""
    try:
        autograd(lib)._retrieve_context(context_id)
    except RuntimeError as error:
        if f"Could not find autograd context with id: {context_id}" not in str(error):
            raise
        return False
    return True


def current_id(lib: str) -> int | None:
    """The context of the thread that runs this."""
    try:
        return autograd(lib)._current_context()._context_id()
    except RuntimeError as error:
        if "Current thread doesn't have a valid autograd context" not in str(error):
            raise
        return None


def everyone(w: Worker) -> list[str]:
    return [f"worker{rank}" for rank in range(w.size)]


def wait_released(w: Worker, context_id: int) -> None:
    """On every worker, soon."""
    for worker in everyone(w):
        wait_until(
            lambda worker=worker: not w.rpc.rpc_sync(worker, has_context, (w.lib, context_id)),
            f"context {context_id} is released on {worker}",
        )


def debug_counts(lib: str) -> tuple[int, int]:
    """Contexts and backward passes that this worker has."""
    info = autograd(lib)._get_debug_info()
    return int(info["num_autograd_contexts"]), int(info["num_current_backward_passes"])

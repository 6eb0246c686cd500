"""Run a random plan on three workers, and on one; compare what their leaves get.

All numbers are whole, and a clamp after each product keeps them small: every gradient is exact.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from tests.dist_autograd.leaves import autograd, pass_on, quarters
from tests.dist_autograd.random_plans import LEAVES_A_WORKER, NUM_WORKERS, SIDE, Node, Plan
from tests.rpc.remote_functions import keep, kept, me
from tests.rpc.workers import WEFT, joined

LIMIT = 4.0
PLAN_SECS = 30.0
WORLD_SECS = 600.0  # workers that serve wait at a barrier meanwhile
EXACT_LIMIT = 2.0**52
Grads = list[list[Tensor | None]]
Order = tuple[Callable[..., Any], Any, dict[str, Any], Future[Any]]


def leaf_of(worker: int, number: int) -> Tensor:
    return (quarters(worker * 10 + number, SIDE, SIDE) * 4).remainder(5).sub(2).requires_grad_()


def leaf_key(number: int) -> str:
    return f"random leaf {number}"


def plant_all(lib: str) -> None:
    """This worker's leaves, for all plans to come."""
    worker = int(me(lib).removeprefix("worker"))
    for number in range(LEAVES_A_WORKER):
        keep(lib, leaf_key(number), leaf_of(worker, number))


def small(x: Tensor) -> Tensor:
    return x.clamp(-LIMIT, LIMIT)


def compute(op: str, own: Tensor, inputs: list[Tensor], are_mine: bool) -> Tensor:
    """One node. `are_mine`: the inputs are nobody else's, and may be changed."""
    if op == "own leaf":
        return own
    x = inputs[0]
    if op == "detach":
        return x.detach()
    if op in ("in place", "view in place"):
        changed = x if are_mine else x.clone()
        if op == "in place":
            return changed.mul_(2).clamp_(-LIMIT, LIMIT)
        changed[0].add_(1)
        changed.view(-1)[1:3].mul_(-1)
        return changed
    if op == "own rows":
        rows = torch.tensor([1, 1])
        return x + nn.functional.embedding(rows, own, sparse=True)
    results = {
        "relu": lambda: x.relu(),
        "rows": lambda: x[[1, 1]] + x.t(),
        "twice": lambda: x - x * 3,
        "own product": lambda: small(x * own),
        "own matmul": lambda: small(x @ own),
        "add": lambda: small(x + inputs[1]),
        "mul": lambda: small(x * inputs[1]),
        "matmul": lambda: small(x @ inputs[1]),
        "cat": lambda: torch.cat([x, inputs[1]])[1:3],
    }
    return results[op]()


def run_node(lib: str, op: str, leaf: int, inputs: list[Any]) -> Tensor:
    """On the node's worker: inputs are tensors that came along, or references to fetch."""
    values = [each if isinstance(each, Tensor) else each.to_here() for each in inputs]
    # What came in the message is a copy that nobody else has.
    are_mine = all(isinstance(each, Tensor) for each in inputs)
    return compute(op, kept(lib, leaf_key(leaf)), values, are_mine)


class Runner:
    """Has a method to be called through a proxy."""

    def __init__(self, lib: str) -> None:
        self.lib = lib

    def run(self, op: str, leaf: int, inputs: list[Any]) -> Tensor:
        return run_node(self.lib, op, leaf, inputs)


def ask(lib: str, node: Node, inputs: list[Any]) -> Any:
    """Have the node's worker run it: a tensor, a future, or a reference."""
    rpc, to = import_module(lib), f"worker{node.worker}"
    args = lib, node.op, node.leaf, inputs
    if node.way == "sync":
        return rpc.rpc_sync(to, run_node, args)
    if node.way == "async":
        return rpc.rpc_async(to, run_node, args)
    if node.way == "nested":
        return rpc.rpc_sync(f"worker{node.via}", pass_on, (lib, to, run_node, *args))
    if node.way == "proxy":
        return rpc.remote(to, Runner, (lib,)).rpc_sync().run(*args[1:])
    return rpc.remote(to, run_node, args)


def value(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result
    return result.wait() if isinstance(result, torch.futures.Future) else result.to_here()


def to_send(node: Node, result: Any) -> Any:
    """What goes to the worker that uses it: the value, or the reference to it."""
    is_reference = not isinstance(result, Tensor | torch.futures.Future)
    return result if is_reference and node.fetched_by == "user" else value(result)


def forward(lib: str, plan: Plan) -> Tensor:
    results: list[Any] = []
    for node in plan.nodes:
        inputs = [to_send(plan.nodes[number], results[number]) for number in node.inputs]
        results.append(ask(lib, node, inputs))
    return loss_of([value(results[number]) for number in plan.used])


def loss_of(values: list[Tensor]) -> Tensor:
    return sum((each * (i + 1)).sum() for i, each in enumerate(values))  # type: ignore[return-value]


def run_locally(plan: Plan) -> tuple[float, Grads]:
    leaves = [[leaf_of(worker, number) for number in range(LEAVES_A_WORKER)] for worker in range(NUM_WORKERS)]
    results: list[Tensor] = []
    for node in plan.nodes:
        inputs = [results[number] for number in node.inputs]
        results.append(compute(node.op, leaves[node.worker][node.leaf], inputs, are_mine=False))
    loss = loss_of([results[number] for number in plan.used])
    if loss.requires_grad:
        for i in range(plan.passes):
            loss.backward(retain_graph=i + 1 < plan.passes)
    return loss.item(), [[each.grad for each in row] for row in leaves]


def gradients_here(lib: str, context_id: int) -> list[Tensor | None]:
    """Of a worker that the context never reached: none."""
    try:
        found = autograd(lib).get_gradients(context_id)
    except RuntimeError as error:
        if "Could not find autograd context" not in str(error):
            raise
        found = {}
    gradients = [found.get(kept(lib, leaf_key(number))) for number in range(LEAVES_A_WORKER)]
    assert len([each for each in gradients if each is not None]) == len(found), "a gradient of another leaf"
    assert all(kept(lib, leaf_key(number)).grad is None for number in range(LEAVES_A_WORKER)), "a .grad"
    return gradients


def run_remotely(lib: str, plan: Plan, **options: Any) -> tuple[float, Grads]:
    rpc = import_module(lib)
    with autograd(lib).context() as context_id:
        loss = forward(lib, plan)
        if loss.requires_grad:
            for i in range(plan.passes):
                autograd(lib).backward(context_id, [loss], retain_graph=i + 1 < plan.passes, **options)
        found = [
            rpc.rpc_sync(f"worker{worker}", gradients_here, (lib, context_id))
            for worker in range(NUM_WORKERS)
        ]
    return loss.item(), found


def run_together(lib: str, plans: Sequence[Plan], **options: Any) -> list[tuple[float, Grads]]:
    """All at the same time, each from another worker."""
    rpc = import_module(lib)
    calls = [
        rpc.rpc_async(f"worker{i % NUM_WORKERS}", run_remotely, (lib, plan), options)
        for i, plan in enumerate(plans)
    ]
    return [call.wait() for call in calls]


def difference(found: tuple[float, Grads], expected: tuple[float, Grads]) -> str | None:
    """What isn't the same, in words. No gradient and one of zeros are the same here."""
    if found[0] != expected[0]:
        return f"loss {found[0]}, not {expected[0]}"
    for worker in range(NUM_WORKERS):
        for number in range(LEAVES_A_WORKER):
            ours, theirs = (dense(each[1][worker][number]) for each in (found, expected))
            assert theirs.abs().max() < EXACT_LIMIT
            if not torch.equal(ours, theirs):
                return f"leaf {number} of worker{worker}: {ours}, not {theirs}"
    return None


def dense(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros(SIDE, SIDE).double()
    return gradient.to_dense() if gradient.is_sparse else gradient


class World:
    """Three workers that are threads of this process, and run plans for as long as the block lasts."""

    def __init__(self) -> None:
        self._orders: queue.Queue[Order | None] = queue.Queue()
        self._thread = threading.Thread(target=self._launch)
        self._error: BaseException | None = None
        self._is_stuck = False

    def __enter__(self) -> World:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def run(self, plan: Plan, **options: Any) -> tuple[float, Grads]:
        return self._do(run_remotely, plan, options)

    def run_together(self, plans: Sequence[Plan], **options: Any) -> list[tuple[float, Grads]]:
        return self._do(run_together, plans, options)

    def _do(self, act: Callable[..., Any], what: Any, options: dict[str, Any]) -> Any:
        assert not self._is_stuck, "an earlier plan hangs"
        answer: Future[Any] = Future()
        self._orders.put((act, what, options, answer))
        try:
            return answer.result(PLAN_SECS)
        except TimeoutError:
            self._is_stuck = not answer.done()
            raise

    def _launch(self) -> None:
        try:
            weft.launch(self._serve, ranks=NUM_WORKERS, kind="thread", collective_timeout=WORLD_SECS)
        except BaseException as error:
            self._error = error

    def _serve(self) -> None:
        with joined(WEFT) as worker:
            plant_all(worker.lib)
            dist.barrier()
            while worker.rank == 0 and (order := self._orders.get()) is not None:
                act, what, options, answer = order
                try:
                    answer.set_result(act(worker.lib, what, **options))
                except BaseException as error:
                    answer.set_exception(error)
            dist.barrier()

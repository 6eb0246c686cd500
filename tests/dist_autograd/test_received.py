"""Tensors of every kind that come from another worker: non-leaves, which can be used as any other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from tests.dist_autograd.leaves import autograd, check, leaf, local_gradients, plant, quarters, same
from tests.ranks import run_on
from tests.rpc.remote_functions import give, keep, kept
from tests.rpc.workers import Worker

pytestmark = [
    run_on(threads=3, timeout=90, collective_timeout=60),
    run_on(weft=3, timeout=90, collective_timeout=60, full=True),
]
EVERYDAY = run_on(threads=3, weft=3, timeout=90, collective_timeout=60)


BIG = 300_000  # float64s: more than a message takes along


def run(w: Worker, function: Callable[..., Tensor], *leaves: Tensor) -> None:
    """The function on another worker, with leaves from here, and its result used here."""
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, function, leaves)
        assert not y.is_leaf
        autograd(w.lib).backward(context_id, [total(y)])
        check(w, context_id, lambda *copies: total(function(*[copy * 1 for copy in copies])), *leaves)


def total(y: Tensor) -> Tensor:
    return (y * y).sum()


def change_in_place(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(y)
    x += 1
    x[0] = y[1]
    x.t_()
    return torch.nn.functional.relu(x, inplace=True)


def change_through_views(x: Tensor, y: Tensor) -> Tensor:
    x.view(-1)[2:5].mul_(3)
    x[1].copy_(y[0])
    return x + y.transpose(0, 1).reshape(x.shape)


def change_then_view(x: Tensor, y: Tensor) -> Tensor:
    (x.add_(y))[0].zero_()
    return x.expand(2, *x.shape).select(0, 1)


def split_and_join(x: Tensor, y: Tensor) -> Tensor:
    first, second = x.split(1)
    return torch.cat([first * 2, y, second, y[:1]])


def test_the_callee_changes_in_place_what_it_received(worker: Worker) -> None:
    for function in [change_in_place, change_through_views, change_then_view, split_and_join]:
        run(worker, function, leaf(1, 2, 3), leaf(2, 2, 3))


@EVERYDAY
def test_the_caller_changes_in_place_what_came_back(worker: Worker) -> None:
    """The sender's tensor is another."""
    x, theirs = leaf(1, 2, 3), plant(worker, worker.next, 2, 2, 3)
    with autograd(worker.lib).context() as context_id:
        y, z = worker.rpc.rpc_sync(worker.next, two_results, (worker.lib, theirs.key, x))
        y[0].mul_(2)
        z.add_(y).clamp_(-3, 3)
        autograd(worker.lib).backward(context_id, [(y * z).sum()])
        check(worker, context_id, changed_locally, x, theirs)
    assert torch.equal(x.detach(), quarters(1, 2, 3))


def two_results(lib: str, key: str, x: Tensor) -> tuple[Tensor, Tensor]:
    return x * kept(lib, key), kept(lib, key)


def changed_locally(x: Tensor, p: Tensor) -> Tensor:
    y, z = x * p, p * 1
    y[0].mul_(2)
    z.add_(y).clamp_(-3, 3)
    return (y * z).sum()


def test_what_is_sent_is_the_tensor_as_it_is_then(worker: Worker) -> None:
    """The gradient goes through what came before."""
    x = leaf(1, 3)
    with autograd(worker.lib).context() as context_id:
        y = x * 2
        first = worker.rpc.rpc_sync(worker.next, give, (y,))
        y.mul_(3)
        second = worker.rpc.rpc_sync(worker.next, give, (y,))
        y.add_(1)
        autograd(worker.lib).backward(context_id, [(first * second + y).sum()])
        check(worker, context_id, lambda x: (x * 2 * x * 6 + x * 6 + 1).sum(), x)


LAYOUTS: list[tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = [
    (lambda x: x.t(), (2, 3)),
    (lambda x: x[:, 1], (4, 5)),
    (lambda x: x[::2, ::3], (6, 7)),
    (lambda x: x.expand(4, 3), (1, 3)),
    (lambda x: x.unfold(0, 2, 1), (5,)),
    (lambda x: x.sum(), (3,)),
    (lambda x: x[0:0], (2, 3)),
    (lambda x: x.repeat(BIG // 3), (3,)),
    (lambda x: x.permute(2, 0, 1), (2, 3, 4)),
    (lambda x: x.to(memory_format=torch.channels_last), (1, 2, 3, 4)),
]


def test_layouts(worker: Worker) -> None:
    """Views, transposed, strided, expanded, of no dimension, of no element, large: as argument, as result."""
    for number, (make, shape) in enumerate(LAYOUTS):
        x = leaf(number, *shape)
        for function, args in [(torch.mul, (make(x), 3)), (make_layout, (number, x))]:
            with autograd(worker.lib).context() as context_id:
                y = worker.rpc.rpc_sync(worker.next, function, args)
                assert y.shape == make(x).shape
                autograd(worker.lib).backward(context_id, [total(y)])
                check(worker, context_id, lambda x, number=number: total(make_layout(number, x)), x)


def make_layout(number: int, x: Tensor) -> Tensor:
    return LAYOUTS[number][0](x * 3)


def test_a_gradient_has_the_dtype_of_its_tensor(worker: Worker) -> None:
    """Whatever the worker in between makes of it."""
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
    for dtype in kinds:
        x = quarters(1, 3).to(dtype).requires_grad_()
        with autograd(worker.lib).context() as context_id:
            y = worker.rpc.rpc_sync(worker.next, widen, (x,))
            autograd(worker.lib).backward(context_id, [y.to(torch.complex128).abs().sum()])
            (expected,) = local_gradients(lambda x: widen(x).to(torch.complex128).abs().sum(), x)
            (found,) = autograd(worker.lib).get_gradients(context_id).values()
            assert found.dtype == dtype
            assert same(found, expected)


def widen(x: Tensor) -> Tensor:
    return x.to(torch.complex128) * 3


def test_parameters(worker: Worker) -> None:
    """A parameter arrives as what it stands for; the gradient is the parameter's."""
    x = nn.Parameter(quarters(1, 3))
    with autograd(worker.lib).context() as context_id:
        y = worker.rpc.rpc_sync(worker.next, torch.mul, (x, 3))
        autograd(worker.lib).backward(context_id, [y.sum()])
        check(worker, context_id, lambda x: (x * 3).sum(), x)


def make_embedding(lib: str, key: str, sparse: bool) -> None:
    embedding = nn.Embedding(6, 2, sparse=sparse, dtype=torch.float64)
    with torch.no_grad():
        embedding.weight.copy_(quarters(9, 6, 2))
    keep(lib, key, embedding)


def look_up(lib: str, key: str, rows: Tensor) -> Tensor:
    return kept(lib, key)(rows)


def embedding_gradient(lib: str, context_id: int, key: str) -> Tensor:
    return autograd(lib).get_gradients(context_id)[kept(lib, key).weight]


def test_sparse_gradients_of_a_server(worker: Worker) -> None:
    """Two look-ups of one table, and two passes: one sum, sparse."""
    rows = [torch.tensor([0, 2, 2, 5]), torch.tensor([2, 3])]
    for sparse in [True, False]:
        key = f"table {sparse} {worker.name}"
        worker.rpc.rpc_sync(worker.next, make_embedding, (worker.lib, key, sparse))
        with autograd(worker.lib).context() as context_id:
            parts = [worker.rpc.rpc_sync(worker.next, look_up, (worker.lib, key, each)) for each in rows]
            loss = total(torch.cat(parts))
            autograd(worker.lib).backward(context_id, [loss], retain_graph=True)
            autograd(worker.lib).backward(context_id, [loss])
            found = worker.rpc.rpc_sync(worker.next, embedding_gradient, (worker.lib, context_id, key))
            expected = local_gradients(partial(looked_up, torch.cat(rows), sparse), quarters(9, 6, 2))[0]
            assert expected is not None
            assert found.is_sparse == sparse
            assert same(found, expected)


def looked_up(rows: Tensor, sparse: bool, weight: Tensor) -> Tensor:
    return 2 * total(nn.functional.embedding(rows, weight, sparse=sparse))


def test_sparse_gradients_that_travel(worker: Worker) -> None:
    """The table is here and is used there: what comes back for it is sparse; a dense one may join it."""
    weight, rows = leaf(1, 6, 2), torch.tensor([1, 4, 4])
    for mixed in [False, True]:
        with autograd(worker.lib).context() as context_id:
            y = worker.rpc.rpc_sync(worker.next, look_up_in, (weight, rows))
            loss = total(y) + (weight.sum() if mixed else 0)
            autograd(worker.lib).backward(context_id, [loss])
            check(
                worker,
                context_id,
                lambda p, mixed=mixed: total(look_up_in(p, rows)) + (p.sum() if mixed else 0),
                weight,
            )


def look_up_in(weight: Tensor, rows: Tensor) -> Tensor:
    return nn.functional.embedding(rows, weight, sparse=True)


def test_gradients_are_not_shared(worker: Worker) -> None:
    """What one context holds, or a user changes in place, is no other leaf's gradient."""
    x, y = leaf(1, 3), leaf(2, 3)
    with autograd(worker.lib).context() as context_id:
        z = worker.rpc.rpc_sync(worker.next, torch.add, (x, y))
        autograd(worker.lib).backward(context_id, [z.sum()])
        gradients = autograd(worker.lib).get_gradients(context_id)
        gradients[x].mul_(5)
        assert gradients[y].tolist() == [1.0] * 3

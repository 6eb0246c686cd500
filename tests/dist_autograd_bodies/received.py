"""Tensors of every kind that come from another worker: non-leaves, which can be used as any other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from tests.dist_autograd_bodies.sewing import autograd, check, leaf, local_gradients, plant, quarters, same
from tests.rpc_bodies.places import give, keep, kept
from tests.rpc_bodies.running import Worker

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


def changes_in_place(w: Worker) -> None:
    """By the callee, in what it received."""
    for function in [change_in_place, change_through_views, change_then_view, split_and_join]:
        run(w, function, leaf(1, 2, 3), leaf(2, 2, 3))


def changes_of_results(w: Worker) -> None:
    """By the caller, in what came back; the sender's tensor is another."""
    x, theirs = leaf(1, 2, 3), plant(w, w.next, 2, 2, 3)
    with autograd(w.lib).context() as context_id:
        y, z = w.rpc.rpc_sync(w.next, two_results, (w.lib, theirs.key, x))
        y[0].mul_(2)
        z.add_(y).clamp_(-3, 3)
        autograd(w.lib).backward(context_id, [(y * z).sum()])
        check(w, context_id, changed_locally, x, theirs)
    assert torch.equal(x.detach(), quarters(1, 2, 3))


def two_results(lib: str, key: str, x: Tensor) -> tuple[Tensor, Tensor]:
    return x * kept(lib, key), kept(lib, key)


def changed_locally(x: Tensor, p: Tensor) -> Tensor:
    y, z = x * p, p * 1
    y[0].mul_(2)
    z.add_(y).clamp_(-3, 3)
    return (y * z).sum()


def changes_before_sending(w: Worker) -> None:
    """What is sent is the tensor as it is then; the gradient goes through what came before."""
    x = leaf(1, 3)
    with autograd(w.lib).context() as context_id:
        y = x * 2
        first = w.rpc.rpc_sync(w.next, give, (y,))
        y.mul_(3)
        second = w.rpc.rpc_sync(w.next, give, (y,))
        y.add_(1)
        autograd(w.lib).backward(context_id, [(first * second + y).sum()])
        check(w, context_id, lambda x: (x * 2 * x * 6 + x * 6 + 1).sum(), x)


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


def layouts(w: Worker) -> None:
    """Views, transposed, strided, expanded, of no dimension, of no element, large: as argument, as result."""
    for number, (make, shape) in enumerate(LAYOUTS):
        x = leaf(number, *shape)
        for function, args in [(torch.mul, (make(x), 3)), (make_layout, (number, x))]:
            with autograd(w.lib).context() as context_id:
                y = w.rpc.rpc_sync(w.next, function, args)
                assert y.shape == make(x).shape
                autograd(w.lib).backward(context_id, [total(y)])
                check(w, context_id, lambda x, number=number: total(make_layout(number, x)), x)


def make_layout(number: int, x: Tensor) -> Tensor:
    return LAYOUTS[number][0](x * 3)


def dtypes(w: Worker) -> None:
    """A gradient has the dtype of its tensor, whatever the worker in between makes of it."""
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
    for dtype in kinds:
        x = quarters(1, 3).to(dtype).requires_grad_()
        with autograd(w.lib).context() as context_id:
            y = w.rpc.rpc_sync(w.next, widen, (x,))
            autograd(w.lib).backward(context_id, [y.to(torch.complex128).abs().sum()])
            (expected,) = local_gradients(lambda x: widen(x).to(torch.complex128).abs().sum(), x)
            (found,) = autograd(w.lib).get_gradients(context_id).values()
            assert found.dtype == dtype
            assert same(found, expected)


def widen(x: Tensor) -> Tensor:
    return x.to(torch.complex128) * 3


def parameters(w: Worker) -> None:
    """A parameter arrives as what it stands for; the gradient is the parameter's."""
    x = nn.Parameter(quarters(1, 3))
    with autograd(w.lib).context() as context_id:
        y = w.rpc.rpc_sync(w.next, torch.mul, (x, 3))
        autograd(w.lib).backward(context_id, [y.sum()])
        check(w, context_id, lambda x: (x * 3).sum(), x)


def make_embedding(lib: str, key: str, sparse: bool) -> None:
    embedding = nn.Embedding(6, 2, sparse=sparse, dtype=torch.float64)
    with torch.no_grad():
        embedding.weight.copy_(quarters(9, 6, 2))
    keep(lib, key, embedding)


def look_up(lib: str, key: str, rows: Tensor) -> Tensor:
    return kept(lib, key)(rows)


def embedding_gradient(lib: str, context_id: int, key: str) -> Tensor:
    return autograd(lib).get_gradients(context_id)[kept(lib, key).weight]


def sparse_gradients_of_a_server(w: Worker) -> None:
    """Two look-ups of one table, and two passes: one sum, sparse."""
    rows = [torch.tensor([0, 2, 2, 5]), torch.tensor([2, 3])]
    for sparse in [True, False]:
        key = f"table {sparse} {w.name}"
        w.rpc.rpc_sync(w.next, make_embedding, (w.lib, key, sparse))
        with autograd(w.lib).context() as context_id:
            parts = [w.rpc.rpc_sync(w.next, look_up, (w.lib, key, each)) for each in rows]
            loss = total(torch.cat(parts))
            autograd(w.lib).backward(context_id, [loss], retain_graph=True)
            autograd(w.lib).backward(context_id, [loss])
            found = w.rpc.rpc_sync(w.next, embedding_gradient, (w.lib, context_id, key))
            expected = local_gradients(partial(looked_up, torch.cat(rows), sparse), quarters(9, 6, 2))[0]
            assert expected is not None
            assert found.is_sparse == sparse
            assert same(found, expected)


def looked_up(rows: Tensor, sparse: bool, weight: Tensor) -> Tensor:
    return 2 * total(nn.functional.embedding(rows, weight, sparse=sparse))


def sparse_gradients_that_travel(w: Worker) -> None:
    """The table is here and is used there: what comes back for it is sparse; a dense one may join it."""
    weight, rows = leaf(1, 6, 2), torch.tensor([1, 4, 4])
    for mixed in [False, True]:
        with autograd(w.lib).context() as context_id:
            y = w.rpc.rpc_sync(w.next, look_up_in, (weight, rows))
            loss = total(y) + (weight.sum() if mixed else 0)
            autograd(w.lib).backward(context_id, [loss])
            check(
                w,
                context_id,
                lambda p, mixed=mixed: total(look_up_in(p, rows)) + (p.sum() if mixed else 0),
                weight,
            )


def look_up_in(weight: Tensor, rows: Tensor) -> Tensor:
    return nn.functional.embedding(rows, weight, sparse=True)


def gradients_are_not_shared(w: Worker) -> None:
    """What one context holds, or a user changes in place, is no other leaf's gradient."""
    x, y = leaf(1, 3), leaf(2, 3)
    with autograd(w.lib).context() as context_id:
        z = w.rpc.rpc_sync(w.next, torch.add, (x, y))
        autograd(w.lib).backward(context_id, [z.sum()])
        gradients = autograd(w.lib).get_gradients(context_id)
        gradients[x].mul_(5)
        assert gradients[y].tolist() == [1.0] * 3


BODIES = [
    changes_in_place,
    changes_of_results,
    changes_before_sending,
    layouts,
    dtypes,
    parameters,
    sparse_gradients_of_a_server,
    sparse_gradients_that_travel,
    gradients_are_not_shared,
]

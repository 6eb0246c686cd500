"""Losses of logits that are split by class, beside the same losses of whole logits; and beside torch's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel as torch_loss_parallel
from torch.utils.checkpoint import checkpoint

import weft
from tests.ranks import run_on
from weft.tensor_parallel import ColwiseParallel, parallelize_module
from weft.tensor_parallel.loss import loss_parallel
from weft.tensors import make_dtensor, make_spec
from weft.testing import Expect, assert_calls

REDUCTIONS = ("none", "mean", "sum")


def full(value: Any) -> Any:
    """A parameter of the full tier."""
    return pytest.param(value, marks=pytest.mark.full)


def numbered(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def classes(*shape: int, num: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(num, shape, generator=torch.Generator().manual_seed(seed))


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])


def cut(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> torch.Tensor:
    part = whole
    for axis, place in enumerate(placements):
        if isinstance(place, Shard):
            pieces = part.chunk(mesh.size(axis), place.dim)
            rank = mesh.get_local_rank(axis)
            part = pieces[rank] if rank < len(pieces) else part.narrow(place.dim, 0, 0)
    return part.contiguous()


def spread(
    whole: torch.Tensor, mesh: DeviceMesh, placements: list[Any], *, requires_grad: bool = True
) -> Any:
    """A leaf DTensor."""
    made = make_dtensor(cut(whole.detach(), mesh, placements).clone(), make_spec(mesh, placements, whole))
    return made.requires_grad_(requires_grad and whole.is_floating_point())


def assert_part(seen: Any, whole: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> None:
    assert isinstance(seen, DTensor)
    assert list(seen.placements) == placements
    assert (seen.shape, seen.dtype) == (whole.shape, whole.dtype)
    torch.testing.assert_close(seen.to_local(), cut(whole, mesh, placements), rtol=1e-12, atol=1e-12)


def compare(
    shape: tuple[int, ...], loss: Callable[[Any, torch.Tensor], Any], *, seed: int = 0, is_inside: bool = True
) -> None:
    """The loss and its gradient on a mesh of one axis, with a plain target."""
    dim = 1 if len(shape) > 1 else 0
    mesh = mesh_of(dist.get_world_size())
    target = classes(*shape[:dim], *shape[dim + 1 :], num=shape[dim], seed=seed)
    if target.numel() > 2:
        target.view(-1)[1] = -100
    x = numbered(*shape, seed=seed).requires_grad_()
    split = spread(x, mesh, [Shard(dim)])
    right = loss(x, target)
    weights = numbered(*right.shape, seed=7)
    (right * weights).sum().backward()
    with loss_parallel():
        seen = loss(split, target)
        assert_part(seen, right, mesh, [Replicate()])
        if is_inside:
            seen.backward(make_dtensor(weights, make_spec(mesh, [Replicate()], weights)))
    if not is_inside:
        seen.backward(make_dtensor(weights, make_spec(mesh, [Replicate()], weights)))
    assert_part(split.grad, x.grad, mesh, [Shard(dim)])


# -- on one axis ---------------------------------------------------------------------


@run_on(threads=4)
@pytest.mark.parametrize(
    "shape", [(5, 7), (3, 2), (2, 7, 3), (0, 5), *map(full, [(5, 8), (3, 1), (9,), (2, 6, 3, 2)])], ids=str
)
def test_shapes(shape: tuple[int, ...]) -> None:
    """Classes that divide by the ranks, that don't, and so few that some ranks have none."""
    for reduction in REDUCTIONS:
        if reduction == "mean" and 0 in shape:
            continue  # not a number
        compare(shape, lambda x, target, reduction=reduction: F.cross_entropy(x, target, reduction=reduction))


@run_on(threads=4)
@pytest.mark.parametrize("smoothing", [0.1, *map(full, [0.0, 1.0])])
@pytest.mark.parametrize("num_classes", [3, 7])
def test_weight_and_smoothing(num_classes: int, smoothing: float) -> None:
    weight = numbered(num_classes, seed=3).abs()
    for reduction in REDUCTIONS:
        for own in (weight, None):

            def loss(x: Any, target: torch.Tensor, own: Any = own, reduction: str = reduction) -> Any:
                return F.cross_entropy(x, target, own, reduction=reduction, label_smoothing=smoothing)

            compare((4, num_classes), loss)
            compare((2, num_classes, 3), loss)


@run_on(threads=2)
@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated:UserWarning")
def test_modules_and_other_ways_to_call() -> None:
    weight = numbered(6, seed=3).abs()
    for loss in (
        nn.CrossEntropyLoss(weight=weight, ignore_index=2),
        lambda x, target: F.cross_entropy(input=x, target=target, ignore_index=0),
        lambda x, target: F.cross_entropy(x, target, size_average=False),
        lambda x, target: F.cross_entropy(x, target, reduce=False),
        lambda x, target: F.nll_loss(F.log_softmax(x, 1), target, weight),
        lambda x, target: nn.NLLLoss(reduction="none")(nn.LogSoftmax(-1)(x), target),
        lambda x, target: F.nll_loss(x, target, reduction="sum"),
        lambda x, target: F.nll_loss(torch.log_softmax(x, dim=1), target, ignore_index=1),
        lambda x, target: F.nll_loss(x.log_softmax(1), target.byte()),
    ):
        mesh = mesh_of(2)
        target = classes(5, num=6)
        x = numbered(5, 6).requires_grad_()
        split = spread(x, mesh, [Shard(1)])
        right = loss(x, target)
        right.sum().backward()
        with loss_parallel():
            seen = loss(split, target)
            assert_part(seen, right, mesh, [Replicate()])
            seen.sum().backward()
        assert_part(split.grad, x.grad, mesh, [Shard(1)])


@run_on(threads=4)
def test_backward_outside_the_context() -> None:
    for reduction in REDUCTIONS:
        compare(
            (4, 6),
            lambda x, target, reduction=reduction: F.cross_entropy(x, target, reduction=reduction),
            is_inside=False,
        )


@run_on(threads=2)
def test_large_and_masked_logits() -> None:
    mesh = mesh_of(2)
    x = numbered(4, 6) * 1e4
    x[0, 1], x[1, 3:], x[2, :3] = -torch.inf, -torch.inf, -torch.inf
    target = torch.tensor([0, 2, 4, 5])
    x.requires_grad_()
    split = spread(x, mesh, [Shard(1)])
    right = F.cross_entropy(x, target)
    right.backward()
    with loss_parallel():
        seen: Any = F.cross_entropy(split, target)
    seen.backward()
    assert_part(seen, right, mesh, [Replicate()])
    assert_part(split.grad, x.grad, mesh, [Shard(1)])
    with loss_parallel():
        broken = x.detach().clone()
        broken[3] = torch.inf  # not a number, but nobody asked
        seen = F.cross_entropy(spread(broken, mesh, [Shard(1)]), target, ignore_index=5)
        torch.testing.assert_close(seen.to_local(), F.cross_entropy(broken, target, ignore_index=5))
        bad = spread(torch.where(torch.arange(6) == 5, torch.nan, numbered(4, 6)), mesh, [Shard(1)])
        loss: Any = F.cross_entropy(bad, target)
        assert loss.to_local().isnan()


@run_on(threads=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sixteen_bits_are_computed_in_32(dtype: torch.dtype) -> None:
    mesh = mesh_of(2)
    x = (4 * numbered(64, 501)).to(dtype)
    target = classes(64, num=501)
    wide = x.float().requires_grad_()
    right = F.cross_entropy(wide, target, reduction="none", label_smoothing=0.1)
    right.sum().backward()
    split = spread(x, mesh, [Shard(1)])
    with loss_parallel():
        seen: Any = F.cross_entropy(split, target, reduction="none", label_smoothing=0.1)
    seen.sum().backward()
    assert (seen.dtype, split.grad.dtype) == (dtype, dtype)
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(seen.to_local().float(), right, rtol=rounding, atol=1e-6)
    own = cut(wide.grad, mesh, [Shard(1)])
    # A gradient is rounded once, to its own dtype.
    torch.testing.assert_close(split.grad.to_local(), own.to(dtype), rtol=rounding, atol=1e-6)


@run_on(threads=2)
def test_autocast() -> None:
    mesh = mesh_of(2)
    x = numbered(4, 6).bfloat16()
    target = classes(4, num=6)
    with torch.autocast("cpu", dtype=torch.bfloat16), loss_parallel():
        seen: Any = F.cross_entropy(spread(x, mesh, [Shard(1)]), target)
        right = F.cross_entropy(x, target)
    assert seen.dtype == right.dtype == torch.float32
    torch.testing.assert_close(seen.to_local(), right)


@run_on(threads=2)
def test_log_softmax() -> None:
    mesh = mesh_of(2)
    for dim, dtype in ((1, None), (-1, torch.float32), (0, None)):
        x = numbered(5, 7).requires_grad_()
        split = spread(x, mesh, [Shard(dim % 2)])
        weights = numbered(5, 7, seed=4).to(dtype or torch.float64)
        right = F.log_softmax(x, dim, dtype=dtype)
        (right * weights).sum().backward()
        with loss_parallel():
            seen: Any = F.log_softmax(split, dim, dtype=dtype)
        assert seen.placements == split.placements
        assert seen.dtype == right.dtype
        close = {"rtol": 1e-12, "atol": 1e-12} if dtype is None else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(seen.to_local(), cut(right, mesh, [Shard(dim % 2)]), **close)
        seen.backward(spread(weights, mesh, [Shard(dim % 2)], requires_grad=False))
        torch.testing.assert_close(split.grad.to_local(), cut(x.grad, mesh, [Shard(dim % 2)]), **close)


@run_on(threads=2)
def test_the_end_of_a_model() -> None:
    mesh = mesh_of(2)
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 7)).double()
    for seed, param in enumerate(model.parameters()):
        param.data = numbered(*param.shape, seed=seed)
    x, target = numbered(2, 3, 4), classes(2, 3, num=7)
    right = F.cross_entropy(model(x).flatten(0, 1), target.flatten())
    right.backward()
    grads = [param.grad for param in model.parameters()]
    model.zero_grad()
    head = ColwiseParallel(use_local_output=False)
    parallelize_module(model, mesh, {"0": ColwiseParallel(output_layouts=Replicate()), "2": head})
    with loss_parallel():
        loss: Any = F.cross_entropy(model(x.flatten(0, 1)), target.flatten())
    loss.backward()
    assert_part(loss, right, mesh, [Replicate()])
    for param, whole in zip(model.parameters(), grads, strict=True):
        assert whole is not None
        assert_part(param.grad, whole, mesh, [Shard(0)])


# -- traffic ---------------------------------------------------------------------------


@run_on(threads=2)
def test_traffic() -> None:
    """Three numbers a position forward, nothing backward."""
    mesh = mesh_of(2)
    x, target = numbered(5, 6), classes(5, num=6)
    for options in ({}, {"label_smoothing": 0.1}, {"weight": numbered(6).abs()}):
        split = spread(x, mesh, [Shard(1)])
        with weft.record() as events, loss_parallel():
            loss = F.cross_entropy(split, target, **options)
            assert_calls(events, [Expect("all_reduce", feature="tp", bytes_in=5 * 8)] * 3)
            loss.backward()
            assert_calls(events, ["all_reduce"] * 3)


@run_on(threads=2)
def test_what_torchs_counter_sees() -> None:
    mesh = mesh_of(2)
    x, target = numbered(5, 6), classes(5, num=6)
    for reduction in REDUCTIONS:
        split = spread(x, mesh, [Shard(1)])
        with loss_parallel():
            with CommDebugMode() as counter:
                loss = F.cross_entropy(split, target, reduction=reduction)
            assert counter.get_comm_counts() == {torch.ops.c10d_functional.all_reduce: 3}
            with CommDebugMode() as counter:
                loss.sum().backward()
            assert counter.get_total_counts() == 0


# -- meshes of two axes ------------------------------------------------------------------


@run_on(threads=4)
@pytest.mark.parametrize(
    ("sizes", "placements", "shape"),
    [
        ((2, 2), [Shard(0), Shard(1)], (6, 7)),
        ((2, 2), [Shard(1), Shard(0)], (6, 7)),
        ((2, 2), [Replicate(), Shard(1)], (6, 7)),
        ((2, 2), [Shard(2), Shard(1)], (2, 5, 4)),
        ((2, 2), [Shard(0), Shard(1)], (5, 6, 3)),
        ((4, 1), [Shard(0), Shard(1)], (5, 6)),
    ],
)
def test_meshes(sizes: tuple[int, ...], placements: list[Any], shape: tuple[int, ...]) -> None:
    mesh = mesh_of(*sizes)
    lying = [
        Replicate() if place in (Shard(1), Replicate()) else Shard(min(place.dim, 1)) for place in placements
    ]
    summed = [Partial() if isinstance(place, Shard) else place for place in lying]
    target = classes(shape[0], *shape[2:], num=shape[1])
    target.view(-1)[2] = -100
    weight = numbered(shape[1], seed=5).abs()
    for options in ({}, {"weight": weight}, {"label_smoothing": 0.2}):
        for reduction in ("sum", "none"):
            x = numbered(*shape).requires_grad_()
            split = spread(x, mesh, placements)
            right = F.cross_entropy(x, target, reduction=reduction, **options)
            right.sum().backward()
            with loss_parallel():
                seen: Any = F.cross_entropy(
                    split, spread(target, mesh, lying), reduction=reduction, **options
                )
            if reduction == "none":
                assert_part(seen, right, mesh, lying)
                # A gradient that lies otherwise than the loss: whole on every rank.
                seen.backward(make_dtensor(torch.ones_like(right), make_spec(mesh, [Replicate()] * 2, right)))
            else:
                assert list(seen.placements) == summed
                torch.testing.assert_close(seen.full_tensor(), right, rtol=1e-12, atol=1e-12)
                seen.sum().backward()
            assert_part(split.grad, x.grad, mesh, placements)


# -- autograd ------------------------------------------------------------------------------


@run_on(threads=2)
@pytest.mark.parametrize("smoothing", [0.0, 0.2, None])
def test_second_derivatives(smoothing: float | None) -> None:
    """None: of log_softmax and nll_loss, one after the other."""
    mesh = mesh_of(2)
    target = torch.tensor([0, 4, -100])
    weight = numbered(5, seed=2).abs()
    towards = numbered(3, 5, seed=3)

    def run(x: Any, towards: Any) -> tuple[Any, Any]:
        if smoothing is None:
            loss = F.nll_loss(F.log_softmax(x, 1), target, weight)
        else:
            loss = F.cross_entropy(x, target, weight, label_smoothing=smoothing)
        (slope,) = torch.autograd.grad(loss * loss, x, create_graph=True)
        (slope * towards).sum().backward()
        return slope, x.grad

    right = run(numbered(3, 5).requires_grad_(), towards)
    with loss_parallel():
        seen = run(
            spread(numbered(3, 5), mesh, [Shard(1)]), spread(towards, mesh, [Shard(1)], requires_grad=False)
        )
    for mine, theirs in zip(seen, right, strict=True):
        assert_part(mine.detach(), theirs.detach(), mesh, [Shard(1)])


@run_on(threads=2)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant: bool) -> None:
    mesh = mesh_of(2)
    target = classes(4, num=6)
    x = numbered(4, 6).requires_grad_()
    F.cross_entropy(2 * x, target).backward()
    split = spread(x, mesh, [Shard(1)])

    def run(logits: Any) -> Any:
        with loss_parallel():
            return F.cross_entropy(2 * logits, target)

    loss: Any = checkpoint(run, split, use_reentrant=use_reentrant)
    loss.backward()
    assert_part(split.grad, x.grad, mesh, [Shard(1)])


@run_on(threads=2)
def test_without_gradients() -> None:
    mesh = mesh_of(2)
    x, target = numbered(4, 6), classes(4, num=6)
    for off in (torch.no_grad, torch.inference_mode):
        with off(), loss_parallel():
            seen: Any = F.cross_entropy(spread(x, mesh, [Shard(1)], requires_grad=False), target)
            assert not seen.requires_grad
            torch.testing.assert_close(seen.to_local(), F.cross_entropy(x, target))


# -- the context ---------------------------------------------------------------------------


@run_on(threads=2)
def test_plain_tensors_are_torchs() -> None:
    x, target = numbered(4, 6).requires_grad_(), classes(4, num=6)
    right = F.cross_entropy(x, target)
    with loss_parallel(), weft.record() as events:
        seen = F.cross_entropy(x, target)
        assert torch.equal(F.log_softmax(x, 1), torch.log_softmax(x, 1))
    assert torch.equal(seen, right)
    assert seen.grad_fn.name() == right.grad_fn.name()
    assert not events


@run_on(threads=2)
def test_the_context_ends() -> None:
    """Nested, entered again, left by an error; a thread of its own has none."""
    mesh = mesh_of(2)
    x, target = numbered(4, 6), classes(4, num=6)

    def is_on() -> bool:
        with weft.record() as events:
            F.cross_entropy(spread(x, mesh, [Shard(1)]), target)
        return len(events) == 3

    with loss_parallel():
        with loss_parallel():
            assert is_on()
        assert is_on()
        with pytest.raises(KeyError), loss_parallel():
            raise KeyError
        assert is_on()
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(torch._C._len_torch_function_stack()))
        thread.start()
        thread.join()
        assert seen == [0]
    assert torch._C._len_torch_function_stack() == 0

    @loss_parallel()
    def decorated() -> bool:
        return is_on()

    assert decorated()
    assert decorated()


@run_on(threads=2)
def test_refusals() -> None:
    mesh = mesh_of(2)
    x, target = numbered(4, 6), classes(4, num=6)
    split = spread(x, mesh, [Shard(1)])
    with loss_parallel():
        for placement in (Shard(0), Replicate(), Partial()):
            for loss in (lambda x: F.cross_entropy(x, target), lambda x: F.nll_loss(x, target)):
                with pytest.raises(ValueError, match="loss_parallel"):
                    loss(make_dtensor(cut(x, mesh, [placement]), make_spec(mesh, [placement], x)))
        with pytest.raises(ValueError, match="loss_parallel"):
            F.log_softmax(split, 0)
        with pytest.raises(IndexError, match="Target 6 is out of bounds"):
            F.cross_entropy(split, torch.tensor([0, 6, 1, 2]))
        with pytest.raises(IndexError, match="Target -1 is out of bounds"):
            F.cross_entropy(split, torch.tensor([0, -1, 1, 2]))
        with pytest.raises(ValueError, match="batch_size"):
            F.cross_entropy(split, target[:3])
        with pytest.raises(RuntimeError, match="for all 6 classes or no classes"):
            F.cross_entropy(split, target, torch.ones(3))
        with pytest.raises(RuntimeError, match="label_smoothing must be between"):
            F.cross_entropy(split, target, label_smoothing=1.5)
        with pytest.raises(ValueError, match="foo is not a valid value for reduction"):
            F.cross_entropy(split, target, reduction="foo")
        with pytest.raises(NotImplementedError, match="Class probabilities"):
            F.cross_entropy(split, x)
        with pytest.raises(RuntimeError, match="expected target dtype to be Long"):
            F.cross_entropy(split, target.int())
        with pytest.raises(TypeError, match="Unsupported type"):
            F.cross_entropy(split, [0, 1, 2, 3])
        with pytest.raises(RuntimeError, match=r"Expected \(Replicate\(\),\) but got \(Shard\(dim=0\),\)"):
            F.cross_entropy(split, spread(target, mesh, [Shard(0)]))
        odd = make_dtensor(torch.ones(4, 2), make_spec(mesh, [Shard(1)], x))
        with pytest.raises(ValueError, match=f"rank {dist.get_rank()} of 2 has 2 classes, and of 6 in all"):
            F.cross_entropy(odd, target)


@run_on(threads=4)
def test_refusals_of_meshes() -> None:
    mesh = mesh_of(2, 2)
    x, target = numbered(4, 6), classes(4, num=6)
    rows = spread(x, mesh, [Shard(0), Shard(1)])
    with loss_parallel():
        with pytest.raises(NotImplementedError, match="one-dimensional"):
            F.cross_entropy(rows, spread(target, mesh, [Shard(0), Replicate()]))
        with pytest.raises(ValueError, match="requires a DTensor"):
            F.cross_entropy(rows, target, reduction="sum")
        for reduction in REDUCTIONS:
            terms = spread(x, mesh, [Partial(), Shard(1)])
            with pytest.raises(ValueError, match="Shard or Replicate"):
                F.cross_entropy(terms, target, reduction=reduction)
        with pytest.raises(ValueError, match="exactly one mesh dim"):
            F.cross_entropy(spread(x, mesh, [Shard(1), Shard(1)]), target, reduction="sum")


# -- beside torch's ------------------------------------------------------------------------


@run_on(gloo=4, weft=4, timeout=90, full=True)
def test_as_torchs() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    generator = torch.Generator().manual_seed(0)
    for shape, axes in (((4, 8), mesh), ((4, 8, 6), mesh), ((5, 8), init_device_mesh("cpu", (4,)))):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        target = torch.randint(8, (shape[0], *shape[2:]), generator=generator)
        weight = torch.rand(8, generator=generator, dtype=torch.float64)
        rows = [Shard(0)] * (axes.ndim - 1)
        dist_target = distribute_tensor(target, axes, [*rows, Replicate()], src_data_rank=None)
        for reduction in ("none", "sum", "mean"):
            if reduction == "mean" and axes.ndim > 1:
                continue
            seen: list[tuple[Any, Any]] = []
            for context in (torch_loss_parallel, loss_parallel):
                logits = distribute_tensor(x, axes, [*rows, Shard(1)], src_data_rank=None).requires_grad_()
                with context():
                    loss: Any = F.cross_entropy(logits, dist_target, weight, reduction=reduction)
                    loss.sum().backward()
                seen.append((loss.detach(), logits.grad))
            for theirs, ours in zip(*seen, strict=True):
                assert (ours.placements, ours.shape) == (theirs.placements, theirs.shape)
                torch.testing.assert_close(ours.to_local(), theirs.to_local(), rtol=1e-12, atol=1e-12)


# -- compiled: around a compiled function, and inside of one ---------------------------------


TARGET = torch.tensor([3, 0, -100, 4])


def loss_of(x: Any) -> Any:
    loss: Any = F.cross_entropy(x, TARGET, label_smoothing=0.1)
    return loss.to_local() if isinstance(loss, DTensor) else loss


def loss_in_two_steps(x: Any) -> Any:
    loss: Any = F.nll_loss(F.log_softmax(x, 1), TARGET)
    return loss.to_local() if isinstance(loss, DTensor) else loss


def loss_inside(x: Any) -> Any:
    with loss_parallel():
        return loss_of(x)


@run_on(gloo=2, timeout=120, collective_timeout=60)
@run_on(weft=2, timeout=120, collective_timeout=60, full=True)
@pytest.mark.filterwarnings("default")  # of Dynamo come some, other ones with each release
def test_compiled() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    start, size = (0, 3) if dist.get_rank() == 0 else (3, 2)
    cases: list[tuple[Any, Any, bool]] = [
        (loss_inside, nullcontext, False),
        (loss_of, loss_parallel, True),
        (loss_in_two_steps, loss_parallel, False),
    ]
    for fn, context, is_dynamic in cases:
        torch._dynamo.reset()
        whole.grad = None
        expected = fn(whole)
        expected.backward()
        local = whole.detach()[:, start : start + size].clone().requires_grad_()
        split = DTensor.from_local(local, mesh, [Shard(1)], shape=whole.shape, stride=whole.stride())
        compiled = torch.compile(fn, backend="aot_eager", fullgraph=True, dynamic=is_dynamic)
        with context():
            loss = compiled(split)
        loss.backward()
        torch.testing.assert_close(loss, expected)
        assert whole.grad is not None
        torch.testing.assert_close(local.grad, whole.grad[:, start : start + size])

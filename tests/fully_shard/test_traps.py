"""Uses of a sharded model that once went wrong."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import weft
from tests.ranks import run_on

pytestmark = run_on(threads=(2, 4))

WIDTH = 6


def make(*layers: nn.Module) -> Any:
    """The same values on every rank: each one's own generator, since threads share torch's."""
    model = nn.Sequential(*layers).double()
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=source, dtype=param.dtype) / 4)
    return model


def rows(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def assert_whole_equals(sharded: nn.Module, bare: nn.Module) -> None:
    for (name, param), other in zip(sharded.named_parameters(), bare.parameters(), strict=True):
        assert isinstance(param, DTensor), name
        torch.testing.assert_close(param.full_tensor(), other, rtol=1e-10, atol=1e-12)


def test_inputs_hidden_in_a_set() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, hidden: set[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            (other,) = hidden
            return self.inner(x) - other

    model = make(Takes())[0]
    bare = copy.deepcopy(model)
    weft.fully_shard(model)
    x, y = rows().requires_grad_(), rows(1).requires_grad_()
    torch.testing.assert_close(model({x}, y), bare({x}, y))


def test_a_module_used_twice_steps_once() -> None:
    """Each backward gives one gradient, so an optimizer in backward makes one step."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.last = linear(), linear()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.shared(torch.tanh(self.shared(x))))

    model = make(Twice())[0]
    bare = copy.deepcopy(model)
    for module in (model.shared, model.last, model):
        weft.fully_shard(module)
    optimizers = {param: torch.optim.Adam([param], lr=0.1) for param in model.parameters()}
    num_steps = 0

    def step(param: torch.Tensor) -> None:
        nonlocal num_steps
        num_steps += 1
        optimizers[param].step()  # type: ignore[index]
        optimizers[param].zero_grad()  # type: ignore[index]

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    reference = torch.optim.Adam(bare.parameters(), lr=0.1, foreach=False)
    for seed in range(3):
        model(rows(seed)).square().mean().backward()
        reference.zero_grad()
        bare(rows(seed)).square().mean().backward()
        reference.step()
    assert num_steps == 3 * len(optimizers)
    assert_whole_equals(model, bare)


def test_a_copy_has_its_own_method() -> None:
    class Encodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.inner(x)

    model = weft.fully_shard(make(Encodes())[0])
    weft.register_fsdp_forward_method(model, "encode")
    model(rows()).sum().backward()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for param in copied.parameters():
            param.zero_()
    assert copied.encode(rows()).abs().sum() == 0
    assert model.encode(rows()).abs().sum() > 0


def test_a_forward_inside_the_roots_keeps_gradients() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
            return self(x, again=False) if again else self.inner(x)

    model = make(Recursive())[0]
    bare = copy.deepcopy(model)
    weft.fully_shard(model)
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        model(rows(int(is_last))).square().sum().backward()
        bare(rows(int(is_last))).square().sum().backward()
    for param, other in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad)  # type: ignore[union-attr]


@run_on(threads=4)
def test_what_waits_for_replicas_is_known_to_all() -> None:
    """Used by one rank in a step that doesn't reduce over the replicas, by none in the one that does."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rare, self.often = linear(), linear()

        def forward(self, x: torch.Tensor, uses_rare: bool) -> torch.Tensor:
            return self.often(self.rare(x) if uses_rare else x)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = weft.fully_shard(make(Branches())[0], mesh=mesh)
    model.set_requires_all_reduce(False)  # type: ignore[attr-defined]
    model(rows(), dist.get_rank() == 0).sum().backward()
    model.set_requires_all_reduce(True)  # type: ignore[attr-defined]
    model(rows(), False).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_an_output_that_is_a_parameter() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(8, WIDTH))

        def forward(self) -> torch.Tensor:
            return self.table[:3]

    for reshard in (True, None):
        inner = weft.fully_shard(make(Positions())[0], reshard_after_forward=reshard)
        inner().sum().backward()
        assert inner.table.grad.full_tensor().sum() == 3 * WIDTH  # type: ignore[union-attr]
        with torch.no_grad():
            torch.testing.assert_close(inner(), inner.table.full_tensor()[:3])


def test_a_loss_from_inside_raises() -> None:
    """Its backward would read parameters that are freed: an error, not a crash."""

    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = linear(), linear()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            self.aside = self.second(torch.tanh(hidden))
            return hidden

    model = weft.fully_shard(make(Aside())[0], reshard_after_forward=True)
    model(rows())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model.aside.square().sum().backward()  # type: ignore[union-attr,operator]


def test_after_an_evaluation_parameters_are_sharded() -> None:
    model: Any = make(linear(), linear())
    for module in (model[0], model):
        weft.fully_shard(module)
    with torch.no_grad():
        model(rows())
    assert all(isinstance(param, DTensor) for param in model.parameters())
    loss = model(rows()).sum()
    model.zero_grad()
    loss.backward()
    before = [param.grad.full_tensor() for param in model.parameters()]  # type: ignore[union-attr]
    loss = model(rows()).sum()
    model.zero_grad()  # while the root is whole
    loss.backward()
    for param, earlier in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), earlier)  # type: ignore[union-attr]


@run_on(threads=4)
def test_a_smaller_mesh_is_not_older_than_the_shards() -> None:
    """A forward that no backward follows leaves parameters there; then they are changed."""
    model = make(linear(), linear())
    bare = copy.deepcopy(model)
    for module in (*model, model):  # type: ignore[misc]
        weft.fully_shard(module, reshard_after_forward=2)
    model(rows())
    with torch.no_grad():
        for param, other in zip((p for p in _sharded(model)), bare.parameters(), strict=True):
            param.mul_(2)
            other.mul_(2)
    torch.testing.assert_close(model(rows()), bare(rows()))


def _sharded(model: nn.Module) -> list[Any]:
    model.state_dict()  # shows the sharded parameters
    return list(model.parameters())


def test_a_sharded_module_inside_an_except_block() -> None:
    class Falls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.last = linear(), linear()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                raise NotImplementedError
            except NotImplementedError:
                x = self.block(x)
            return self.last(x)

    model = make(Falls())[0]
    bare = copy.deepcopy(model)
    for module in (model.block, model.last, model):
        weft.fully_shard(module, reshard_after_forward=True)
    for _ in range(2):
        model(rows()).square().sum().backward()
        bare(rows()).square().sum().backward()
    for param, other in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad)  # type: ignore[union-attr]


def test_what_was_gathered_for_others_is_gathered_anew() -> None:
    """Parameters are kept after backward; a rank that only helped to gather one uses it a step later."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = linear(), linear(), linear()

        def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
            return self.head(getattr(self, name)(x))

    model = make(Experts())[0]
    bare = copy.deepcopy(model)
    for module in (model.a, model.b, model.head, model):
        weft.fully_shard(module, reshard_after_forward=True)
    model.set_reshard_after_backward(False)  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    reference = torch.optim.SGD(bare.parameters(), lr=0.5)
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(4):
        names = ["a" if (other + step) % 2 else "b" for other in range(size)]
        optimizer.zero_grad()
        model(rows(step), names[rank]).square().mean().backward()
        optimizer.step()
        reference.zero_grad()
        for name in names:
            (bare(rows(step), name).square().mean() / size).backward()
        reference.step()
    for module in (model.a, model.b, model.head):
        module.reshard()
    assert_whole_equals(model, bare)


def test_a_backward_after_one_that_failed() -> None:
    model = make(linear(), linear())
    bare = copy.deepcopy(model)
    for module in (*model, model):  # type: ignore[misc]
        weft.fully_shard(module)
    x = rows().requires_grad_()
    loss = model(x).square().sum()

    def fail(_: torch.Tensor) -> None:
        raise ValueError

    handle = x.register_hook(fail)
    with contextlib.suppress(ValueError):
        loss.backward(retain_graph=True)
    handle.remove()
    model.zero_grad()
    loss.backward()
    bare(rows()).square().sum().backward()
    for param, other in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad)  # type: ignore[union-attr]

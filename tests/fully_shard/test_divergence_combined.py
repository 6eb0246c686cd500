"""Ranks that use different modules, together with everything else that changes what a step does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from tests.fully_shard.models import WIDTH, Expert, Experts, as_whole, by_layer, filled, loss_by_rank
from tests.fully_shard.twins import Twin, follow, full_of, make_rows, rows_of, single_loss
from tests.ranks import run_on
from weft import MixedPrecisionPolicy, register_fsdp_forward_method
from weft.comm_hooks.default_hooks import allreduce_hook

pytestmark = run_on(threads=(2, 4))

SCHEDULE = [("ab", "c"), ("c", "ab"), ("", "a"), ("abc", "cba"), ("a", "a", "b", "c"), ("abc",)]


@run_on(threads=4)
def test_on_a_mesh_of_two_axes() -> None:
    """Ranks part within the shards and between the copies."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for reshard in (True, False):
        follow(Twin(Experts("abc"), mesh=mesh, reshard_after_forward=reshard), SCHEDULE)


@run_on(threads=4)
def test_with_the_all_reduce_later() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    twin = Twin(Experts("abc"), mesh=mesh)
    for step in range(2):
        twin.sharded.set_requires_all_reduce(False)
        twin.backward(make_rows(10 * step), loss_by_rank("a", "b", "", "c"))
        twin.sharded.set_requires_all_reduce(True)
        twin.backward(make_rows(10 * step + 1), loss_by_rank("c", "ab", "b", ""))
        twin.check()
        twin.update()


class Checkpointed(Experts):
    """Experts that run again in backward."""

    def forward(self, rows: torch.Tensor, names: str) -> torch.Tensor:
        hidden = rows * 2
        for name in names:
            hidden = hidden + checkpoint(self.experts[name], hidden, use_reentrant=False)
        assert self.head is not None
        return self.head(hidden)


def test_with_checkpointing() -> None:
    for reshard in (True, False):
        follow(Twin(Checkpointed("abc"), reshard_after_forward=reshard), SCHEDULE)


def test_with_a_reduction_hook() -> None:
    twin = Twin(Experts("abc"))
    twin.sharded.register_comm_hook(None, allreduce_hook)
    follow(twin, SCHEDULE)


def test_with_explicit_prefetch() -> None:
    """What is prefetched may not be used."""
    twin = Twin(Experts("abc"), reshard_after_forward=True)
    a, b, c = (twin.sharded.experts[name] for name in "abc")
    a.set_modules_to_forward_prefetch([b, c])
    b.set_modules_to_forward_prefetch([c])
    c.set_modules_to_backward_prefetch([b, a])
    b.set_modules_to_backward_prefetch([a])
    follow(twin, SCHEDULE)


class Routed(nn.Module):
    """Tokens are routed: an expert may get none of a rank's rows, or all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Expert() for _ in range(3))
        filled(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores = self.gate(rows).softmax(-1)
        chosen = scores.argmax(-1)
        out = torch.zeros_like(rows)
        for place, expert in enumerate(self.experts):
            mine = (chosen == place).nonzero().squeeze(-1)
            if len(mine):
                out = out.index_add(0, mine, expert(rows[mine]) * scores[mine, place, None])
        return out


def test_routed_tokens() -> None:
    twin = Twin(Routed(), reshard_after_forward=True)
    for step in range(5):
        twin.step(make_rows(step, per_rank=2))


def test_with_mixed_precision() -> None:
    """Gradients are what bfloat16 makes of them; here only that ranks agree and nobody waits."""
    model: Any = Experts("abc").float()
    by_layer(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    for step, names in enumerate(SCHEDULE):
        rows = rows_of(make_rows(step), dist.get_rank()).float().requires_grad_()
        model(rows, names[dist.get_rank() % len(names)]).square().mean().backward()
        used = set("".join(names[rank % len(names)] for rank in range(dist.get_world_size())))
        for name, expert in model.experts.items():
            assert (expert.up.weight.grad is not None) == (name in used)
        model.zero_grad()


def test_with_norms_of_gradients() -> None:
    twin = Twin(Experts("abc"))
    for step, names in enumerate(SCHEDULE):
        twin.backward(make_rows(step), loss_by_rank(*names))
        seen = clip_grad_norm_(twin.sharded.parameters(), 0.01)
        right = clip_grad_norm_(twin.single.parameters(), 0.01)
        assert abs(full_of(seen).item() - right.item()) <= 1e-12 * right.item()
        twin.check()
        twin.update()


class Choosing(nn.Module):
    """Methods of which each rank calls its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Expert(), Expert()
        filled(self)

    def go_left(self, rows: torch.Tensor) -> torch.Tensor:
        """One way."""
        return self.left(rows)

    def go_right(self, rows: torch.Tensor) -> torch.Tensor:
        """The other."""
        return self.right(rows)


def test_other_methods() -> None:
    twin = Twin(Choosing())
    for name in ("go_left", "go_right"):
        register_fsdp_forward_method(twin.sharded, name)

    def loss(model: Any, rows: torch.Tensor, rank: int) -> torch.Tensor:
        return (model.go_left if rank % 2 else model.go_right)(rows).square().mean()

    twin.train(loss=loss)


def test_other_rows() -> None:
    """Ranks with batches of different sizes, one of them empty: the mean is of the ranks' losses."""
    twin = Twin(Experts("ab"), as_whole)
    for step in range(3):

        def loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
            part = rows[: (rank + 1) % 3]
            return model(part, "ab").square().sum()

        rows = make_rows(step)
        loss(twin.sharded, rows_of(rows, dist.get_rank()), dist.get_rank()).backward()
        single_loss(twin.single, rows, loss).backward()
        twin.check()
        twin.update()

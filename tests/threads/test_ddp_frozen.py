"""Parameters whose requires_grad is False, or becomes so, or ceases to be so.

Frozen before construction: never reduced, no gradient. Frozen later: like an unused
one. Thawed later: right, or an error with its name; a gradient that differs from rank
to rank without a word is what must not be.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn

from tests.data_parallel_bodies.hooks import names_in, noting_hook
from tests.data_parallel_bodies.libraries import weft_only
from tests.data_parallel_bodies.twins import Twin, gradients_of, make_rows, net, refusal_of
from weft.testing import on_ranks

VIEW = pytest.mark.parametrize("view", [False, True])


@VIEW
@on_ranks(2)
def test_one_frozen_before_construction_is_never_reduced(view: bool) -> None:
    model = net()
    model[2].requires_grad_(False)
    twin = Twin(model, gradient_as_bucket_view=view)
    seen: list = []
    twin.parallel.register_comm_hook(seen, noting_hook)
    for step in range(3):
        twin.step(make_rows(step))
    reduced = {name for names in names_in(seen, twin.parallel) for name in names}
    assert reduced == {"0.weight", "0.bias", "4.weight", "4.bias"}


@on_ranks(2)
def test_one_frozen_before_construction_is_broadcast_all_the_same() -> None:
    model = net()
    model[2].requires_grad_(False)
    nn.init.constant_(model[2].weight, float(dist.get_rank() + 5))
    twin = Twin(model)
    assert (twin.parallel.module[2].weight == 5).all()


@weft_only("raises: it expected a gradient")
@VIEW
@pytest.mark.parametrize("steps_before", [0, 2])
@on_ranks(2)
def test_one_frozen_after_wrapping_is_like_an_unused_one(view: bool, steps_before: int) -> None:
    twin = Twin(net(), gradient_as_bucket_view=view, bucket_cap_mb=0.0001)
    for step in range(steps_before):
        twin.step(make_rows(step))
    for model in (twin.parallel.module, twin.single):
        model[2].requires_grad_(False)
    for step in range(2):
        twin.backward(make_rows(step + 10))
        assert gradients_of(twin.parallel)["2.weight"] is None
        twin.check()
        twin.update()
    for model in (twin.parallel.module, twin.single):
        model[2].requires_grad_(True)
    for step in range(2):
        twin.step(make_rows(step + 20))


@weft_only("leaves its gradient local, without a word")
@VIEW
@pytest.mark.parametrize("steps_before", [0, 2])
@on_ranks(2)
def test_one_thawed_after_wrapping_is_right_or_named(view: bool, steps_before: int) -> None:
    model = net()
    model[2].weight.requires_grad_(False)
    twin = Twin(model, gradient_as_bucket_view=view)
    for step in range(steps_before):
        twin.step(make_rows(step))
    for model in (twin.parallel.module, twin.single):
        model[2].weight.requires_grad_(True)
    refusal = refusal_of(lambda: [twin.step(make_rows(step + 10)) for step in range(2)])
    assert refusal is None or "2.weight" in str(refusal)


@weft_only("leaves its gradient local, without a word")
@on_ranks(2)
def test_one_replaced_after_wrapping_is_right_or_named() -> None:
    """`layer.weight = nn.Parameter(...)`, as pruning and adapters do it."""
    twin = Twin(net())
    twin.step(make_rows(0))
    for model in (twin.parallel.module, twin.single):
        model[2].weight = nn.Parameter(model[2].weight.detach() * 2)
    refusal = refusal_of(lambda: twin.step(make_rows(1)))
    assert refusal is None or "2.weight" in str(refusal)


@on_ranks(2)
def test_a_module_in_which_nothing_needs_a_gradient_is_refused() -> None:
    model = net().requires_grad_(False)
    with pytest.raises(RuntimeError, match="doesn't have any parameter"):
        Twin(model)

"""Mixed precision, autocast and GradScaler under DDP."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft
from tests.data_parallel.libraries import DistributedDataParallel
from tests.data_parallel.twins import (
    WIDTH,
    Twin,
    all_ranks,
    assert_same_gradients,
    filled,
    make_rows,
    rows_of,
    single_loss,
)
from tests.ranks import run_on
from weft.data_parallel import MixedPrecision

pytestmark = run_on(threads=2)

LOW = MixedPrecision(param_dtype=torch.bfloat16)


class Interrupted(nn.Linear):
    """The user presses Ctrl-C while it runs, if `is_now`."""

    is_now = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.is_now:
            raise KeyboardInterrupt
        return super().forward(rows)


def test_a_module_wrapped_again_keeps_its_parameters() -> None:
    module = nn.Sequential(nn.Linear(3, 3))
    before = list(module.parameters())
    for _ in range(2):
        model = weft.DistributedDataParallel(module, mixed_precision=LOW)
        model(torch.ones(2, 3)).sum().backward()
        assert [id(param) for param in module.parameters()] == [id(param) for param in before]
        del model
        gc.collect()


def test_a_module_that_was_interrupted_keeps_its_parameters() -> None:
    module = nn.Sequential(Interrupted(3, 3))
    model = weft.DistributedDataParallel(module, mixed_precision=LOW)
    before = list(module.parameters())
    module[0].is_now = True
    with contextlib.suppress(KeyboardInterrupt):
        model(torch.ones(2, 3))
    module[0].is_now = False
    model(torch.ones(2, 3))
    assert [id(param) for param in module.parameters()] == [id(param) for param in before]


def test_inputs_may_come_in_any_mapping() -> None:
    class Reads(nn.Linear):
        def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().forward(given["rows"])

    model = weft.DistributedDataParallel(Reads(3, 3), mixed_precision=LOW)
    given = collections.defaultdict(list, rows=torch.ones(2, 3))
    assert model(given).dtype == torch.bfloat16


def test_a_model_in_mixed_precision_can_be_pickled() -> None:
    model = weft.DistributedDataParallel(nn.Sequential(nn.Linear(3, 3)), mixed_precision=LOW)
    again = pickle.loads(pickle.dumps(model))
    assert again(torch.ones(2, 3)).dtype == torch.bfloat16


def test_reductions_follow_the_model_to_another_group() -> None:
    torch.manual_seed(0)
    model = weft.DistributedDataParallel(nn.Linear(3, 1, bias=False), mixed_precision=LOW)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    rows = torch.full((2, 3), dist.get_rank() + 1.0)
    model(rows).sum().backward()
    model._update_process_group(alone)
    model.zero_grad()
    model(rows).sum().backward()
    assert torch.equal(model.module.weight.grad, rows.sum(0, keepdim=True))


@pytest.mark.parametrize("num_heads", [1, 2])
def test_a_module_may_use_its_childs_weight_itself(num_heads: int) -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, num_heads)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.attention(rows, rows, rows)[0]

    model = weft.DistributedDataParallel(Attends(), mixed_precision=LOW)
    model(torch.ones(2, 3, 4)).sum().backward()


def single_net() -> nn.Module:
    return filled(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), dtype=torch.float32
    )


class Checkpointed(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.net, x, use_reentrant=False)


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_mixed_precision_computes_low_and_keeps_parameters_high(has_checkpoint: bool) -> None:
    net = single_net()
    low = copy.deepcopy(net).to(torch.bfloat16)
    inner = Checkpointed(net) if has_checkpoint else net
    model = weft.DistributedDataParallel(inner, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    batch = make_rows(0).float()
    for _ in range(2):
        model.zero_grad()
        low.zero_grad()
        out = model(rows_of(batch, dist.get_rank()))
        assert out.dtype == torch.bfloat16
        out.float().square().mean().backward()
        low(rows_of(batch, dist.get_rank()).bfloat16()).float().square().mean().backward()
        for param, right in zip(net.parameters(), low.parameters(), strict=True):
            assert param.dtype == torch.float32
            assert param.grad is not None
            assert param.grad.dtype == torch.float32
            assert right.grad is not None
            # The same arithmetic in bfloat16 on each rank, then its mean in bfloat16.
            mean = right.grad.clone().div_(2)
            dist.all_reduce(mean)
            torch.testing.assert_close(param.grad, mean.float(), rtol=0, atol=0)


def test_mixed_precision_reduces_in_the_dtype_asked_for() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = weft.DistributedDataParallel(single_net(), mixed_precision=precision)
    with weft.record() as events:
        model(rows_of(make_rows(0).float(), dist.get_rank())).float().sum().backward()
    reduced = {event.dtype for event in events.by_op("all_reduce")} - {torch.int32}
    assert reduced == {torch.float32}


def test_mixed_precision_casts_buffers_as_asked() -> None:
    net = nn.BatchNorm1d(3)
    precision = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = weft.DistributedDataParallel(net, mixed_precision=precision)
    model(torch.randn(4, 3)).sum().backward()
    assert net.running_mean is not None
    assert net.running_mean.dtype == torch.bfloat16
    assert net.num_batches_tracked is not None
    assert net.num_batches_tracked.dtype == torch.int64


# -- autocast and GradScaler ------------------------------------------------------------------

# Both compute the same 16-bit numbers, row by row; sums over ranks are float32's.
SUMS = 1e-6


def half_loss(model: nn.Module, rows: torch.Tensor, rank: int) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(rows.float())
        assert output.dtype == torch.bfloat16
    return output.float().square().mean()


@pytest.mark.parametrize("view", [False, True])
def test_autocast(view: bool) -> None:
    # The weights are cast once a forward and the casts' gradients added in 16 bits, so the single
    # process keeps the ranks apart: one backward each.
    twin = Twin(single_net(), gradient_as_bucket_view=view)
    world_size = dist.get_world_size()
    for step in range(3):
        rows = make_rows(step)
        half_loss(twin.parallel, rows_of(rows, dist.get_rank()), 0).backward()
        for rank in range(world_size):
            (half_loss(twin.single, rows_of(rows, rank), rank) / world_size).backward()
        assert all(param.grad.dtype == torch.float32 for param in twin.parallel.parameters())
        twin.check(SUMS)
        twin.update()


def scaled_step(model: nn.Module, loss: torch.Tensor, scaler: torch.amp.GradScaler) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def test_grad_scaler() -> None:
    model = single_net()
    single, parallel = copy.deepcopy(model), DistributedDataParallel(model)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for step in range(3):
        rows = make_rows(step).float()
        scaled_step(single, single_loss(single, rows), scalers[0])
        scaled_step(parallel, parallel(rows_of(rows, dist.get_rank())).square().mean(), scalers[1])
        assert_same_gradients(parallel, single, SUMS)
    for param, right in zip(parallel.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(param, right, rtol=1e-6, atol=1e-7)


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    parallel = DistributedDataParallel(single_net())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = [param.detach().clone() for param in parallel.parameters()]
    factor = float("inf") if dist.get_rank() == 1 else 1.0
    rows = rows_of(make_rows().float(), dist.get_rank())
    scaled_step(parallel, (parallel(rows) * factor).sum(), scaler)
    assert all_ranks(scaler.get_scale()) == [512.0] * dist.get_world_size()
    for param, old in zip(parallel.parameters(), before, strict=True):
        assert torch.equal(param, old)
    scaled_step(parallel, parallel(rows).square().mean(), scaler)
    assert not torch.equal(next(parallel.parameters()), before[0])

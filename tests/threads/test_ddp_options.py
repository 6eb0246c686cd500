"""Options of DDP that are seldom used: mixed precision, delayed parameters, meshes, another group."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import weft
from weft.data_parallel import MixedPrecision
from weft.testing import on_ranks


def make_net(dtype: torch.dtype = torch.float64) -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    generator = torch.Generator().manual_seed(3)
    for param in net.parameters():
        param.data.copy_(torch.randn(param.shape, generator=generator))
    return net


def rows(step: int, num_ranks: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2 * num_ranks, 3, generator=generator, dtype=torch.float64)


def own(batch: torch.Tensor, rank: int | None = None) -> torch.Tensor:
    return batch[2 * (dist.get_rank() if rank is None else rank) :][:2]


def assert_mean_gradients(
    model: nn.Module, single: nn.Module, batch: torch.Tensor, rank: int | None = None
) -> None:
    model.zero_grad()
    single.zero_grad()
    model(own(batch, rank)).square().mean().backward()
    single(batch).square().mean().backward()
    for param, right in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(param.grad, right.grad, rtol=1e-12, atol=1e-13)


class Checkpointed(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.net, x, use_reentrant=False)


@pytest.mark.parametrize("has_checkpoint", [False, True])
@on_ranks(2)
def test_mixed_precision_computes_low_and_keeps_parameters_high(has_checkpoint: bool) -> None:
    net = make_net(torch.float32)
    low = copy.deepcopy(net).to(torch.bfloat16)
    inner = Checkpointed(net) if has_checkpoint else net
    model = weft.DistributedDataParallel(inner, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    batch = rows(0, 2).float()
    for _ in range(2):
        model.zero_grad()
        low.zero_grad()
        out = model(own(batch))
        assert out.dtype == torch.bfloat16
        out.float().square().mean().backward()
        low(own(batch).bfloat16()).float().square().mean().backward()
        for param, right in zip(net.parameters(), low.parameters(), strict=True):
            assert param.dtype == torch.float32
            assert param.grad is not None
            assert param.grad.dtype == torch.float32
            assert right.grad is not None
            # The same arithmetic in bfloat16 on each rank, then its mean in bfloat16.
            mean = right.grad.clone().div_(2)
            dist.all_reduce(mean)
            torch.testing.assert_close(param.grad, mean.float(), rtol=0, atol=0)


@on_ranks(2)
def test_mixed_precision_reduces_in_the_dtype_asked_for() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = weft.DistributedDataParallel(make_net(torch.float32), mixed_precision=precision)
    with weft.record() as events:
        model(own(rows(0, 2).float())).float().sum().backward()
    reduced = {event.dtype for event in events.by_op("all_reduce")} - {torch.int32}
    assert reduced == {torch.float32}


@on_ranks(2)
def test_mixed_precision_casts_buffers_as_asked() -> None:
    net = nn.BatchNorm1d(3)
    precision = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = weft.DistributedDataParallel(net, mixed_precision=precision)
    model(torch.randn(4, 3)).sum().backward()
    assert net.running_mean is not None
    assert net.running_mean.dtype == torch.bfloat16
    assert net.num_batches_tracked is not None
    assert net.num_batches_tracked.dtype == torch.int64


@on_ranks(2)
def test_delayed_parameters_are_reduced_last_and_right() -> None:
    net, single = make_net(), make_net()
    delayed = [(name, param) for name, param in net.named_parameters() if name.startswith("2.")]
    model = weft.DistributedDataParallel(
        net, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=net[0].weight
    )
    for step in range(3):
        with weft.record() as events:
            assert_mean_gradients(model, single, rows(step, 2))
        reductions = sorted(events.by_op("all_reduce"), key=lambda event: event.start_secs)
        # 0.weight, 0.bias; then the delayed 2.weight, 2.bias. Each with a mark, and one for the step.
        assert [event.bytes_in for event in reductions] == [8 * (16 + 3), 8 * (10 + 3)]


@on_ranks(1)
def test_delayed_parameters_come_with_the_one_that_sends_them() -> None:
    with pytest.raises(ValueError, match="need to be set at the same time"):
        weft.DistributedDataParallel(make_net(), delay_all_reduce_named_params=[])


@pytest.mark.parametrize("kind", ["ddp", "replicate"])
@on_ranks(4)
def test_an_axis_of_a_mesh_is_the_group(kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "other"))
    wrap = weft.DistributedDataParallel if kind == "ddp" else weft.replicate
    net, single = make_net(), make_net()
    model = wrap(net, device_mesh=mesh["dp"])
    batch = rows(mesh["other"].get_local_rank(), 2)  # which differs along the other axis
    for _ in range(2):
        assert_mean_gradients(model, single, batch, mesh["dp"].get_local_rank())


@on_ranks(2)
def test_a_mesh_of_two_axes_is_refused_and_so_are_two_groups() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "other"))
    with pytest.raises(RuntimeError, match="Only 1D device mesh is supported"):
        weft.DistributedDataParallel(make_net(), device_mesh=mesh)
    with pytest.raises(RuntimeError, match="Cannot specify both"):
        weft.DistributedDataParallel(make_net(), device_mesh=mesh["dp"], process_group=dist.group.WORLD)


@on_ranks(2)
def test_distributed_tensors_are_refused_by_name() -> None:
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    net = make_net()
    net[0].weight = nn.Parameter(distribute_tensor(net[0].weight.detach(), mesh))
    with pytest.raises(RuntimeError, match=r"0\.weight.*DTensor"):
        weft.DistributedDataParallel(net)


@on_ranks(4)
def test_another_group_can_take_over() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    net, single = make_net(), make_net()
    model = weft.DistributedDataParallel(net)
    for step in range(2):
        assert_mean_gradients(model, single, rows(step, 4))
    half = dist.get_rank() // 2
    model._update_process_group(pairs[half])
    for step in range(3):
        assert_mean_gradients(model, single, rows(10 * half + step, 2), dist.get_rank() % 2)


@on_ranks(2)
def test_a_static_graph_is_promised_before_training() -> None:
    model = weft.DistributedDataParallel(make_net())
    model(own(rows(0, 2))).sum().backward()
    with pytest.raises(RuntimeError, match="should be called before training loop starts"):
        model._set_static_graph()


@on_ranks(2)
def test_logging_data_tells_of_plan_and_times() -> None:
    model = weft.DistributedDataParallel(make_net(), bucket_cap_mb=0.0001)
    for step in range(2):
        model(own(rows(step, 2))).sum().backward()
    facts = model._get_ddp_logging_data()
    assert facts["world_size"] == 2
    assert facts["module_name"] == "Sequential"
    assert facts["num_parameter_tensors"] == 4
    assert facts["iteration"] == 2
    assert facts["has_rebuilt_buckets"] == 1
    assert facts["dtypes"] == "double"
    assert sum(map(int, facts["bucket_sizes"].split(", "))) == facts["total_parameter_size_bytes"]
    assert facts["backward_comm_time"] > 0

"""Options of DDP that are seldom used: delayed parameters, meshes, another group, logging data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.ranks import run_on

pytestmark = run_on(threads=2)


def make_net(dtype: torch.dtype = torch.float64) -> Any:
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


@run_on(threads=1)
def test_delayed_parameters_come_with_the_one_that_sends_them() -> None:
    with pytest.raises(ValueError, match="need to be set at the same time"):
        weft.DistributedDataParallel(make_net(), delay_all_reduce_named_params=[])


@pytest.mark.parametrize("kind", ["ddp", "replicate"])
@run_on(threads=4)
def test_an_axis_of_a_mesh_is_the_group(kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "other"))
    wrap = weft.DistributedDataParallel if kind == "ddp" else weft.replicate
    net, single = make_net(), make_net()
    model = wrap(net, device_mesh=mesh["dp"])
    batch = rows(mesh["other"].get_local_rank(), 2)  # which differs along the other axis
    for _ in range(2):
        assert_mean_gradients(model, single, batch, mesh["dp"].get_local_rank())


def test_a_mesh_of_two_axes_is_refused_and_so_are_two_groups() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "other"))
    with pytest.raises(RuntimeError, match="Only 1D device mesh is supported"):
        weft.DistributedDataParallel(make_net(), device_mesh=mesh)
    with pytest.raises(RuntimeError, match="Cannot specify both"):
        weft.DistributedDataParallel(make_net(), device_mesh=mesh["dp"], process_group=dist.group.WORLD)


def test_distributed_tensors_are_refused_by_name() -> None:
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    net = make_net()
    net[0].weight = nn.Parameter(distribute_tensor(net[0].weight.detach(), mesh))
    with pytest.raises(RuntimeError, match=r"0\.weight.*DTensor"):
        weft.DistributedDataParallel(net)


@run_on(threads=4)
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


def test_a_static_graph_is_promised_before_training() -> None:
    model = weft.DistributedDataParallel(make_net())
    model(own(rows(0, 2))).sum().backward()
    with pytest.raises(RuntimeError, match="should be called before training loop starts"):
        model._set_static_graph()


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

"""Gradient hooks on sharded modules: the mean on every mesh, counted steps, what a hook can't do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.futures import Future

import weft
from tests.comm_hooks.buckets import assert_within
from tests.fully_shard import test_comm_hooks as buckets
from tests.fully_shard.hook_bounds import (
    HOOKS,
    brief,
    byte,
    byte_twice,
    check_within,
    exact_power_sgd,
    half,
    ops,
    train_with,
)
from tests.fully_shard.models import Experts, as_whole, by_layer, loss_by_rank, net
from tests.fully_shard.twins import Twin, make_rows, mean_square, part_of, rows_of
from tests.fully_shard.uneven import ACTIVE, by_active, by_world, train_unevenly
from tests.ranks import run_on
from weft import GradBucket, MixedPrecisionPolicy, fully_shard, replicate_with_fsdp
from weft.comm_hooks import chain
from weft.comm_hooks.ddp_zero_hook import hook_with_zero_step
from weft.comm_hooks.debugging_hooks import noop_hook
from weft.comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from weft.comm_hooks.optimizer_overlap_hooks import (
    PerParameterOptimizer,
    _apply_optim_in_backward_hook,
    _hook_then_optimizer,
    _OptimizerHookState,
)
from weft.comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from weft.comm_hooks.powerSGD_hook import powerSGD_hook
from weft.comm_hooks.quantization_hooks import (
    QuantizationState,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from weft.errors import UnsupportedError
from weft.fsdp.comm_hook import LastBucket
from weft.testing.models import fill_parameters

NAME = pytest.mark.parametrize("name", sorted(HOOKS))


# Sharded modules


@run_on(threads=(1, 2))
@NAME
def test_training(name: str) -> None:
    hook, make_state, bound = HOOKS[name]
    train_with(hook, make_state(), bound)


@run_on(threads=4)
@NAME
def test_uneven_shards(name: str) -> None:
    """Along the last dim, too: six columns are two, two, two and none on four ranks."""
    hook, make_state, bound = HOOKS[name]
    for dim in (0, -1):
        train_with(
            hook, make_state(), bound, shard_placement_fn=lambda param, dim=dim: Shard(dim % param.ndim)
        )


@run_on(threads=(2, 3))
@pytest.mark.parametrize("name", ["allreduce", "int8_perchannel"])
def test_ranks_that_use_other_modules(name: str) -> None:
    """Ranks use different modules; a parameter that no rank used has no gradient."""
    hook, make_state, bound = HOOKS[name]
    twin = Twin(Experts("abc"))
    twin.sharded.register_comm_hook(make_state(), hook)
    for step, names in enumerate([("a", "b"), ("", "c"), ("ab", "a"), ("b",)]):
        loss = loss_by_rank(*names)
        twin.backward(make_rows(step), loss)
        check_within(twin, make_rows(step), bound, loss)
        for model in (twin.sharded, twin.single):
            model.zero_grad()


@run_on(threads=2)
def test_going_on_from_a_saved_state() -> None:
    """A model that goes on from saved errors does what it would have done."""

    def steps(state: QuantizationState, model: Any, seeds: range) -> list[torch.Tensor]:
        model.register_comm_hook(state, quantization_perchannel_hook)
        found: list[torch.Tensor] = []
        for seed in seeds:
            model(make_rows(seed)[dist.get_rank()]).square().mean().backward()
            found += [param.grad.to_local().clone() for param in model.parameters()]
            model.zero_grad()
        return found

    model = net()
    by_layer(model)
    unbroken = QuantizationState(error_feedback=True)
    steps(unbroken, model, range(3))
    assert len(unbroken.errors) == 3
    resumed, fresh = QuantizationState(error_feedback=True), QuantizationState(error_feedback=True)
    resumed.load_state_dict(copy.deepcopy(unbroken.state_dict()))
    right, seen, other = (steps(state, model, range(3, 5)) for state in (unbroken, resumed, fresh))
    assert all(torch.equal(a, b) for a, b in zip(right, seen, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(right, other, strict=True))


@run_on(threads=2)
def test_noop_leaves_the_local_part() -> None:
    twin = Twin(net())
    twin.sharded.register_comm_hook(None, noop_hook)
    twin.backward(make_rows())
    twin.single.zero_grad()
    rank = dist.get_rank()
    mean_square(twin.single, rows_of(make_rows(), rank), rank).backward()
    twin.check()


@pytest.mark.parametrize("hook", [allreduce_hook, bf16_compress_hook])
@run_on(threads=2)
def test_dtypes_of_one_group_and_of_the_reduction(hook: Any) -> None:
    """Parameters of two dtypes, and gradients that are reduced in a third: a bucket of each."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 5).double()
            self.second = nn.Linear(5, 3)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(rows).float())

    for policy, dtypes in (
        (MixedPrecisionPolicy(), {torch.float32, torch.float64}),
        (MixedPrecisionPolicy(reduce_dtype=torch.float32), {torch.float32}),
        (MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), {torch.bfloat16}),
    ):
        model = Mixed()
        fill_parameters(model, seed=1)
        twin = Twin(model, as_whole, mp_policy=policy)
        seen: list[GradBucket] = []

        def watched(state: Any, bucket: GradBucket, seen: list[GradBucket] = seen) -> Future[torch.Tensor]:
            seen.append(bucket)
            return hook(state, bucket)

        twin.sharded.register_comm_hook(None, watched)
        twin.backward(make_rows())
        assert {bucket.buffer().dtype for bucket in seen} == dtypes
        assert len({bucket.index() for bucket in seen}) == len(seen) == 2
        assert [bucket.is_last() for bucket in seen] == [False, True]
        narrowest = torch.bfloat16 if hook is bf16_compress_hook else min(dtypes, key=lambda d: d.itemsize)
        twin.check(4 * torch.finfo(narrowest).eps)


@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("sizes", [(1, 4), (2, 2)])
@run_on(threads=4)
def test_a_divide_factor_is_of_the_sum(factor: float, sizes: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    twin = Twin(net(), mesh=mesh)
    twin.sharded.register_comm_hook(None, allreduce_hook)
    twin.sharded[0].set_gradient_divide_factor(factor)
    twin.backward(make_rows())
    for param in twin.single[0].parameters():
        param.grad.mul_(4 / factor)
    twin.check()


@pytest.mark.parametrize(("scale", "options"), [(by_world, {}), (by_active, ACTIVE)], ids=["world", "active"])
@run_on(threads=(2, 3))
def test_ranks_that_run_out_of_inputs(scale: Any, options: dict[str, Any]) -> None:
    twin = Twin(net())
    twin.sharded.register_comm_hook(exact_power_sgd(2), powerSGD_hook)
    train_unevenly(twin, scale, optimizer=None, **options)
    twin.check(1e-10)


# Meshes


@NAME
@run_on(threads=4)
def test_hybrid_sharding_over_the_world(name: str) -> None:
    hook, make_state, bound = HOOKS[name]
    bound = byte_twice if bound is byte else bound
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    train_with(hook, make_state(), bound, mesh=mesh)


@run_on(threads=4)
def test_a_stage_for_each_axis() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    stages = [
        (mesh[name].get_group(), hook)
        for name, hook in (("replicate", allreduce_hook), ("shard", quantization_pertensor_hook))
    ]
    train_with(chain(*stages), None, byte, mesh=mesh)


@run_on(threads=4)
def test_reducing_over_replicas_later() -> None:
    """The hook has averaged over all ranks each time; nothing is lost or counted twice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    twin = Twin(net(), mesh=mesh)
    twin.sharded.register_comm_hook(None, allreduce_hook)
    for step in range(3):
        twin.sharded.set_requires_all_reduce(step == 2)
        twin.backward(make_rows(step))
    twin.check()


@run_on(threads=2)
def test_replicated_modules() -> None:
    """Each rank wants all of it."""
    twin = Twin.__new__(Twin)  # its constructor asks for shards
    twin.single, twin.sharded = net(), net()
    replicate_with_fsdp(twin.sharded)
    twin.sharded.register_comm_hook(None, quantization_pertensor_hook)
    twin.backward(make_rows())
    check_within(twin, make_rows(), byte_twice)


@run_on(threads=4)
def test_a_part_of_the_world_needs_its_group() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    group, rank = mesh.get_group(), dist.get_rank()
    ranks = dist.get_process_group_ranks(group)
    twin = net()
    model = net()
    by_layer(model, mesh=mesh)
    register: Any = model.register_comm_hook
    for state, hook in (
        (None, allreduce_hook),
        (None, lambda state, bucket: allreduce_hook(group, bucket)),
        (QuantizationState(), quantization_pertensor_hook),
        (exact_power_sgd(), powerSGD_hook),
        (None, chain((group, allreduce_hook), quantization_pertensor_hook)),
    ):
        with pytest.raises(weft.ConfigError, match=rf"world of 4 ranks.*shared by ranks \[{ranks[0]}, "):
            register(state, hook)
    for state, hook in (
        (group, allreduce_hook),
        (None, chain((group, allreduce_hook))),
        (group, lambda state, bucket: allreduce_hook(state, bucket)),
    ):
        register(state, hook)
        rows = make_rows()
        with weft.record() as events:
            mean_square(model, rows_of(rows, rank), rank).backward()
        assert ops(events) == ["reduce_scatter_tensor"] * 3
        torch.stack([mean_square(twin, rows_of(rows, other), other) for other in ranks]).mean().backward()
        for param, right in zip(model.parameters(), twin.parameters(), strict=True):
            wanted = part_of(right.grad, param.grad)
            torch.testing.assert_close(param.grad.to_local(), wanted, rtol=1e-12, atol=1e-14)
        for each in (model, twin):
            each.zero_grad()
    register(None, noop_hook)


@run_on(threads=2)
def test_several_meshes_need_several_hooks() -> None:
    model = net()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))
    fully_shard(model)
    twin = net()
    with pytest.raises(weft.ConfigError, match="several meshes"):
        model.register_comm_hook(None, allreduce_hook)  # type: ignore[operator]
    model.register_comm_hook(None, allreduce_hook, recurse=False)  # type: ignore[operator]
    model[0].register_comm_hook(None, bf16_compress_hook)  # type: ignore[operator]
    rows, rank = make_rows(), dist.get_rank()
    with weft.record() as events:
        mean_square(model, rows_of(rows, rank), rank).backward()
    assert {event.dtype for event in events if event.op == "reduce_scatter_tensor"} == {
        torch.float64,
        torch.bfloat16,
    }
    torch.stack([mean_square(twin, rows_of(rows, other), other) for other in range(2)]).mean().backward()
    for param, right in zip(model.parameters(), twin.parameters(), strict=True):
        atol = right.grad.abs().max().item() * 2**-6
        torch.testing.assert_close(param.grad.full_tensor(), right.grad, rtol=0, atol=atol)


# Steps


@run_on(threads=2)
def test_power_sgd_counts_steps() -> None:
    twin = Twin(net())
    state = exact_power_sgd(2)
    twin.sharded.register_comm_hook(state, powerSGD_hook)
    for step in range(4):
        with weft.record() as events:
            twin.backward(make_rows(step))
        # At first means of this rank's parts, then factors.
        assert set(ops(events)) == {"reduce_scatter_tensor" if step < 2 else "all_reduce"}
        assert state.iter == step + 1
        twin.check(1e-10)
        for model in (twin.sharded, twin.single):
            model.zero_grad()


def test_which_bucket_is_the_last() -> None:
    steps = LastBucket(3)
    assert [steps.is_last(index) for index in (5, 2, 9)] == [False, False, True]
    assert [steps.is_last(index) for index in (5, 9)] == [False, False]  # one is missing
    assert [steps.is_last(index) for index in (5, 9)] == [False, True]
    assert [steps.is_last(index) for index in (9, 5)] == [False, True]  # in another order
    assert [steps.is_last(index) for index in (9, 5, 2)] == [False, True, False]  # one more
    assert [steps.is_last(index) for index in (9, 5, 2)] == [False, False, True]


@run_on(threads=4)
def test_local_sgd_keeps_ranks_of_one_copy_together() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard, rank = mesh["shard"].get_group(), dist.get_rank()
    ranks = dist.get_process_group_ranks(shard)
    twin = Twin(net(), mesh=mesh)
    twin.sharded.register_comm_hook(PostLocalSGDState(None, shard, 1), post_localSGD_hook)
    twin.backward(make_rows())
    twin.check()
    for model in (twin.sharded, twin.single):
        model.zero_grad()
    mean_square(twin.sharded, rows_of(make_rows(), rank), rank).backward()
    losses = [mean_square(twin.single, rows_of(make_rows(), other), other) for other in ranks]
    torch.stack(losses).mean().backward()
    twin.check()


@pytest.mark.parametrize("averages", [True, False])
@run_on(threads=4)
def test_local_sgd_of_one_copy_is_refused(averages: bool) -> None:
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    model = net()
    by_layer(model)
    state = PostLocalSGDState(None, pair, 100, post_local_gradient_allreduce=averages)
    model.register_comm_hook(state, post_localSGD_hook)  # type: ignore[operator]
    with pytest.raises(UnsupportedError, match=r"sharded over ranks \[0, 1, 2, 3\]"):
        mean_square(model, make_rows(), 0).backward()


class OverlappedZero:
    """As much of a sharded optimizer as the hook asks for before it runs."""

    overlaps_with_ddp = True

    def prepare_overlap(self, *, shard_buckets: bool) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("hook_with_zero_step", lambda: hook_with_zero_step(allreduce_hook, None, OverlappedZero())),  # type: ignore[arg-type]
        (
            "_hook_then_optimizer",
            lambda: _hook_then_optimizer(
                allreduce_hook, _OptimizerHookState(PerParameterOptimizer(torch.optim.SGD, lr=0.1))
            ),
        ),
        ("_apply_optim_in_backward_hook", lambda: _apply_optim_in_backward_hook(False)),
    ],
)
@run_on(threads=2)
def test_hooks_that_update_parameters_are_refused(name: str, make: Any) -> None:
    model = net()
    by_layer(model)
    model.register_comm_hook(dist.group.WORLD, make())  # type: ignore[operator]
    with pytest.raises(UnsupportedError, match=f"{name} updates the parameters"):
        mean_square(model, make_rows(), 0).backward()


# Hooks of the user


@run_on(threads=2)
def test_a_bucket_says_what_is_wanted() -> None:
    model = net()
    fully_shard(model)
    seen: list[GradBucket] = []

    def hook(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        seen.append(bucket)
        return allreduce_hook(state, bucket)

    model.register_comm_hook(None, hook)  # type: ignore[operator]
    mean_square(model, rows_of(make_rows(), dist.get_rank()), 0).backward()
    (bucket,) = seen
    assert bucket.wanted() == (dist.get_rank(), 2)
    assert bucket.sharers() == (0, 1)
    params = list(model.parameters())
    assert [piece.shape for piece in bucket.parameters()] == [param.to_local().shape for param in params] * 2
    mine = bucket.wanted_part()
    assert torch.equal(mine, torch.cat([param.grad.to_local().reshape(-1) for param in params]))


@run_on(threads=4)
def test_padding_is_zero_whatever_was_in_the_memory() -> None:
    """Six rows, two a rank: the last one has none."""
    model = net()
    by_layer(model)
    last_parts: list[torch.Tensor] = []

    def hook(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        last_parts.append(bucket.buffer().view(4, -1)[3].clone())
        done: Future[torch.Tensor] = Future()
        done.set_result(bucket.buffer().fill_(7.0))
        return done

    model.register_comm_hook(None, hook)  # type: ignore[operator]
    for _ in range(2):
        mean_square(model, make_rows(), 0).backward()
    assert len(last_parts) == 6
    assert not any(part.any() for part in last_parts)


@run_on(threads=2)
def test_buckets_lie_in_the_same_memory_unless_somebody_keeps_one() -> None:
    model = net()
    by_layer(model)
    places: list[int] = []
    kept: list[torch.Tensor] = []
    keeps = False

    def hook(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        places.append(bucket.buffer().data_ptr())
        if keeps:
            kept.append(bucket.buffer())
        done: Future[torch.Tensor] = Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)  # type: ignore[operator]
    for _ in range(2):
        mean_square(model, make_rows(), 0).backward()
    assert len(places) == 6
    assert len(set(places)) == 1
    keeps = True
    mean_square(model, make_rows(2), 0).backward()
    before = [buffer.clone() for buffer in kept]
    assert len({buffer.data_ptr() for buffer in kept}) == 3
    keeps = False
    mean_square(model, make_rows(3), 0).backward()
    assert all(torch.equal(now, then) for now, then in zip(kept, before, strict=True))


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3), torch.zeros(100).to_sparse(), "mean"], ids=["short", "sparse", "str"]
)
@run_on(threads=1)
def test_a_future_of_something_else_is_an_error(wrong: Any) -> None:
    def hook(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        done: Future[Any] = Future()
        done.set_result(wrong)
        return done

    model = net()
    fully_shard(model)
    model.register_comm_hook(None, hook)  # type: ignore[operator]
    with pytest.raises(weft.StateError, match="a gradient hook's future must bring a tensor"):
        mean_square(model, make_rows(), 0).backward()


# On a GPU


def single(every: torch.Tensor) -> torch.Tensor:
    """Roundings of float32, some of them of products of a thousand numbers."""
    return every.abs().amax().expand(every.shape[1:]) * 2.0**-16


CASES = [
    (allreduce_hook, single),
    (fp16_compress_hook, lambda every: half(every) + single(every)),
    (bf16_compress_hook, lambda every: brief(every) + single(every)),
    (quantization_pertensor_hook, lambda every: byte(every) + single(every)),
    (quantization_perchannel_hook, lambda every: byte(every) + single(every)),
]


@run_on(gpu=2, timeout=120, collective_timeout=40)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("hook", "bound"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_means_of_a_busy_gpu(hook: Any, bound: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(1000, 801), nn.Tanh(), nn.Linear(801, 9)).cuda()
    fill_parameters(model, seed=1)
    bare = copy.deepcopy(model)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    model.register_comm_hook(None, hook)  # type: ignore[operator]
    for step in range(3):
        rows = torch.randn(size, 16, 1000, generator=torch.Generator().manual_seed(step)).cuda()
        found: list[list[torch.Tensor]] = [[] for _ in bare.parameters()]
        for other in range(size):
            bare.zero_grad()
            bare(rows[other]).square().mean().backward()
            for grads, param in zip(found, bare.parameters(), strict=True):
                grads.append(param.grad.double().clone())
        torch.cuda._sleep(20_000_000)  # the GPU is behind: whoever reads too early finds the last step's
        model(rows[rank]).square().mean().backward()
        for grads, param in zip(found, model.parameters(), strict=True):
            every = torch.stack(grads)
            parts = [part_of(full, param.grad) for full in (every.mean(0), bound(every))]
            grad: Any = param.grad
            assert_within(grad.to_local(), *parts)
        model.zero_grad()


# On processes


@run_on(weft=(2, 3), gloo=(2, 3), timeout=90, full=True)
def test_means_in_one_job() -> None:
    """Of buckets too; starting a group costs more than most of them."""
    buckets.test_the_plain_mean_is_exact(torch.float64)
    buckets.test_16_bits(torch.float32)
    buckets.check_quantized_means(torch.int8, torch.float32)
    buckets.check_quantized_means(torch.float8_e4m3fn, torch.float32, [(70_001,)])
    for name in ("allreduce", "fp16", "int8_perchannel", "power_sgd", "chain"):
        test_training(name)
    test_ranks_that_use_other_modules("int8_perchannel")

"""ZeroRedundancyOptimizer: the plain optimizer's steps to the bit; constructor, groups, state, traffic."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.data_parallel.twins import filled, make_rows, rows_of
from tests.ranks import run_on
from weft import DistributedDataParallel
from weft.comm_hooks.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from weft.comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from weft.join import Join
from weft.optimizers import ZeroRedundancyOptimizer
from weft.testing.models import MLP, make_batches

pytestmark = run_on(threads=2)

ADAM: Any = {"lr": 0.01, "betas": (0.8, 0.9)}


def set_grads(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def assert_equal_models(one: nn.Module, other: nn.Module) -> None:
    for param, expected in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(param, expected)


def assert_equal_states(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for index, state in expected.items():
        assert found[index].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(found[index][name]), torch.as_tensor(value)), (index, name)


def test_each_rank_keeps_a_part_of_the_state() -> None:
    model = MLP()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, **ADAM)
    set_grads(model, 0)
    zero.step()
    mine = sum(param.numel() for group in zero.optim.param_groups for param in group["params"])
    total = sum(param.numel() for param in model.parameters())
    largest = max(param.numel() for param in model.parameters())
    assert abs(mine - total / 2) <= largest / 2
    assert len(zero.optim.state) == sum(len(group["params"]) for group in zero.optim.param_groups)
    assert zero.state is zero.optim.state
    counts = torch.tensor([mine])
    dist.all_reduce(counts)
    assert counts.item() == total


@pytest.mark.parametrize("as_view", [False, True])
@run_on(threads=4)
def test_one_broadcast_an_owner_and_dtype(as_view: bool) -> None:
    model = nn.ModuleList(
        [nn.Linear(4, 4) for _ in range(10)] + [nn.Linear(4, 4).double() for _ in range(10)]
    )
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, parameters_as_bucket_view=as_view, lr=0.1
    )
    set_grads(model, 1)
    with weft.record() as events:
        zero.step()
    assert {event.op for event in events} == {"broadcast"}
    assert len(events) <= 2 * dist.get_world_size()
    assert {event.feature for event in events} == {"zero"}


@run_on(threads=1)
def test_a_world_of_one_communicates_nothing() -> None:
    model, plain = MLP(), MLP()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    with weft.record() as events:
        for seed in range(3):
            set_grads(model, seed)
            set_grads(plain, seed)
            zero.step()
            optimizer.step()
        zero.consolidate_state_dict()
    assert events == []
    assert_equal_models(model, plain)
    assert_equal_states(zero.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("as_view", [False, True])
@run_on(threads=4)
def test_params_of_several_dtypes_and_layouts(as_view: bool) -> None:
    def make() -> nn.Module:
        generator = torch.Generator().manual_seed(5)
        model: Any = nn.ModuleList(
            [nn.Linear(3, 5), nn.Linear(5, 2).double(), nn.Conv2d(2, 3, 3), nn.Linear(2, 2).bfloat16()]
        )
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))
        return model.to(memory_format=torch.channels_last)

    model, plain = make(), make()
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=as_view, **ADAM
    )
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)
    for seed in range(3):
        set_grads(model, seed)
        set_grads(plain, seed)
        zero.step()
        optimizer.step()
        assert_equal_models(model, plain)
    assert all(
        param.stride() == other.stride()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True)
    )


@run_on(threads=4)
def test_groups_options_and_schedulers() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        params = dict(model.named_parameters())
        weights = [param for name, param in params.items() if name.endswith("weight")]
        biases = [param for name, param in params.items() if name.endswith("bias")]
        return [{"params": weights, "weight_decay": 0.1}, {"params": iter(biases), "lr": 0.5}]

    model, plain = MLP(), MLP()
    zero = ZeroRedundancyOptimizer(groups(model), torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(groups(plain), lr=0.1, momentum=0.9)
    assert [group["lr"] for group in zero.param_groups] == [0.1, 0.5]
    assert [group["nesterov"] for group in zero.param_groups] == [False, False]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in (zero, optimizer)]
    for seed in range(4):
        set_grads(model, seed)
        set_grads(plain, seed)
        zero.step()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        assert_equal_models(model, plain)
    assert zero.param_groups[1]["lr"] == optimizer.param_groups[1]["lr"] == 0.5**5


@pytest.mark.parametrize("as_view", [False, True])
def test_a_group_added_later(as_view: bool) -> None:
    model, plain = MLP(), MLP()
    first, rest = list(model.parameters())[:2], list(model.parameters())[2:]
    plain_first, plain_rest = list(plain.parameters())[:2], list(plain.parameters())[2:]
    zero = ZeroRedundancyOptimizer(first, torch.optim.Adam, parameters_as_bucket_view=as_view, **ADAM)
    optimizer = torch.optim.Adam(plain_first, **ADAM)
    for seed in range(4):
        if seed == 2:
            zero.add_param_group({"params": rest, "lr": 0.1})
            optimizer.add_param_group({"params": plain_rest, "lr": 0.1})
        set_grads(model, seed)
        set_grads(plain, seed)
        zero.step()
        optimizer.step()
        assert_equal_models(model, plain)
    assert zero.param_groups[1]["eps"] == optimizer.param_groups[1]["eps"]


@run_on(threads=4)
def test_state_is_saved_and_loaded() -> None:
    model, plain = MLP(), MLP()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, **ADAM)
    optimizer = torch.optim.Adam(plain.parameters(), **ADAM)
    for seed in range(2):
        set_grads(model, seed)
        set_grads(plain, seed)
        zero.step()
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"consolidate_state_dict\(to=") as caught:
        zero.state_dict()
    assert "Optimizer state has not been consolidated on this rank." in str(caught.value)
    zero.consolidate_state_dict(to=1)
    if dist.get_rank() != 1:
        with pytest.raises(RuntimeError, match="has not been consolidated"):
            zero.state_dict()
    else:
        saved = zero.state_dict()
        assert_equal_states(saved["state"], optimizer.state_dict()["state"])
        assert saved["param_groups"] == optimizer.state_dict()["param_groups"]

    # A plain optimizer's state loads into a sharded one, and what was passed is not changed.
    model2 = copy.deepcopy(plain)
    zero2 = ZeroRedundancyOptimizer(model2.parameters(), torch.optim.Adam, lr=1.0)
    given = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(given)
    zero2.load_state_dict(given)
    assert_equal_states(given["state"], before["state"])
    assert zero2.param_groups[0]["lr"] == 0.01
    assert zero2.state is zero2.optim.state
    set_grads(model2, 9)
    set_grads(plain, 9)
    zero2.step()
    optimizer.step()
    assert_equal_models(model2, plain)


def test_a_state_that_does_not_fit_is_refused() -> None:
    zero = ZeroRedundancyOptimizer(MLP().parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        zero.load_state_dict(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).state_dict())
    with pytest.raises(ValueError, match="there is no rank 2; the group has 2"):
        zero.consolidate_state_dict(to=2)


def test_step_passes_arguments_and_results() -> None:
    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None, note: Any = None) -> Any:  # type: ignore[override]
            loss = super().step(closure)
            self.param_groups[0]["new_key"] = 0.5
            if note is not None:
                note.append(7)
            return loss

    model = MLP()
    zero = ZeroRedundancyOptimizer(model.parameters(), Noting, lr=0.1)
    notes: list[int] = []

    def closure() -> float:
        set_grads(model, 3)
        return 1.5

    assert zero.step(closure, note=notes) == 1.5
    assert notes == [7]
    assert zero.param_groups[0]["new_key"] == 0.5
    zero.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("as_view", [False, True])
def test_frozen_later(as_view: bool) -> None:
    model, plain = MLP(), MLP()
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, parameters_as_bucket_view=as_view, lr=0.1
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for seed in range(4):
        for one in (model, plain):
            one.zero_grad()
            first = next(one.parameters())
            first.requires_grad_(seed not in (1, 2))
            set_grads(one, seed)
            if not first.requires_grad:
                first.grad = None
        zero.step()
        optimizer.step()
        assert_equal_models(model, plain)


@run_on(threads=1)
def test_params_are_checked() -> None:
    def make(params: Any) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)

    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer got an empty parameter list"):
        make([])
    with pytest.raises(TypeError, match="`params` argument should be an iterable of Tensors, but got"):
        make(torch.ones(1))
    with pytest.raises(
        TypeError, match="`params` argument should be an iterable of Tensors or dicts, but got float"
    ):
        make(1.2)
    with pytest.raises(TypeError, match="`params` argument should be an iterable of Tensors or dicts"):
        make([nn.Parameter(torch.ones(1)), 42])
    with pytest.raises(ValueError, match="must have a 'params' key"):
        make([{"lr": 0.1}])
    with pytest.raises(ValueError, match="only supports using the same dense type"):
        make([torch.eye(2).to_sparse()])


@run_on(threads=4)
def test_a_subgroup() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    model, plain = MLP(), MLP()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=mine, lr=0.1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for one in (model, plain):
        set_grads(one, dist.get_rank() // 2)
    zero.step()
    optimizer.step()
    assert_equal_models(model, plain)
    zero.consolidate_state_dict(to=1)
    assert (zero.rank, zero.world_size, zero.global_rank) == (dist.get_rank() % 2, 2, dist.get_rank())


def test_outside_of_its_join_it_is_refused_when_ranks_differ() -> None:
    """A rank that has joined can't stand in for an optimizer that Join doesn't know."""
    first, other = MLP(), MLP()
    known = ZeroRedundancyOptimizer(first.parameters(), torch.optim.SGD, lr=0.1)
    forgotten = ZeroRedundancyOptimizer(other.parameters(), torch.optim.SGD, lr=0.1)
    set_grads(first, 0)
    set_grads(other, 0)

    def train() -> None:
        with Join([known]):
            for _ in range(1 + dist.get_rank()):
                known.step()
                forgotten.step()

    with pytest.raises(RuntimeError, match="give Join every object that communicates in the loop"):
        train()


# -- steps ------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
}
WRAPS = [hook_with_zero_step, hook_with_zero_step_interleaved]
BATCHES = list(make_batches(MLP(), 5))


def train(model: nn.Module, make: Callable[[Iterable[nn.Parameter]], Any]) -> list[torch.Tensor]:
    """Train on this rank's share of the batches; every parameter after every step."""
    optimizer = make(model.parameters())
    seen: list[torch.Tensor] = []
    for batch in BATCHES:
        optimizer.zero_grad()
        shard = batch.shard()
        model(shard.inputs).pow(2).mean().backward()
        optimizer.step()
        seen.extend(param.detach().clone() for param in model.parameters())
    return seen


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@run_on(threads=4, optimizer=["sgd", "adam"], as_view=[False, True])
@run_on(threads=4, optimizer=["adamw", "rmsprop", "adagrad"], as_view=[False, True], full=True)
def test_steps(optimizer: str, as_view: bool) -> None:
    kind, options = OPTIMIZERS[optimizer]
    expected = train(DistributedDataParallel(MLP()), lambda params: kind(params, **options))
    found = train(
        DistributedDataParallel(MLP()),
        lambda params: ZeroRedundancyOptimizer(params, kind, parameters_as_bucket_view=as_view, **options),
    )
    assert_equal(found, expected)


@run_on(threads=2, wrap=WRAPS, inner=[allreduce_hook], optimizer=["sgd", "adam"], shard_buckets=[False, True])
@run_on(
    threads=2,
    wrap=WRAPS,
    inner=[fp16_compress_hook],
    optimizer=["sgd", "adam"],
    shard_buckets=[False, True],
    full=True,
)
@run_on(
    weft=2, gloo=2, wrap=WRAPS, inner=[allreduce_hook], optimizer=["adam"], shard_buckets=[True], full=True
)
def test_steps_inside_backward(wrap: Any, inner: Any, optimizer: str, shard_buckets: bool) -> None:
    kind, options = OPTIMIZERS[optimizer]
    plain = DistributedDataParallel(MLP(), bucket_cap_mb=0.0001)
    plain.register_comm_hook(None, inner)
    expected = train(plain, lambda params: kind(params, **options))
    model = DistributedDataParallel(MLP(), bucket_cap_mb=0.0001)

    def make(params: Iterable[nn.Parameter]) -> ZeroRedundancyOptimizer:
        zero = ZeroRedundancyOptimizer(params, kind, overlap_with_ddp=True, **options)
        model.register_comm_hook(None, wrap(inner, model, zero, shard_buckets=shard_buckets))
        return zero

    assert_equal(train(model, make), expected)


@run_on(nccl=(2, 4))
def test_uneven_inputs_on_nccl_have_the_steps_of_one_adam() -> None:
    """Each rank steps a part of the parameters; with uneven inputs, and what a single Adam makes of it."""
    model, single = (filled(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))).cuda() for _ in "ab")
    parallel = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.Adam, lr=0.01)
    other = torch.optim.Adam(single.parameters(), lr=0.01)
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [make_rows(step).cuda() for step in range(1 + size)]
    with Join([parallel, optimizer]):
        for step in range(2 + rank):
            optimizer.zero_grad()
            parallel(rows_of(rows[step], rank)).square().mean().backward()
            optimizer.step()
    for step in range(1 + size):
        other.zero_grad()
        active = [other_rank for other_rank in range(size) if step < 2 + other_rank]
        losses = [single(rows_of(rows[step], one)).square().mean() for one in active]
        (torch.stack(losses).sum() / size).backward()
        other.step()
    for mine, right in zip(parallel.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-9)

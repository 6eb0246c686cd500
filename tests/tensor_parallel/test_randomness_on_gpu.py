"""Random numbers under tensor parallelism on a GPU: masks of each rank's own, replays, initial values.

What is made for them lies on the device of their place: they would run on a CPU, too. Ranks are processes:
threads share a generator.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

from tests.ranks import run_on
from tests.tensor_parallel.twins import are_different, are_same, assert_is_part, device, make_mesh, part_of

pytest_plugins = ["tests.tensor_parallel.libraries"]
pytestmark = run_on(gpu=(2, 4), nccl=1, timeout=90, collective_timeout=20)


def make_dropout(tp: Any) -> nn.Module:
    return tp.parallelize_module(nn.Dropout(0.5), make_mesh(), tp.SequenceParallel(use_local_output=True))


def ones() -> torch.Tensor:
    return torch.ones(4, 16, 8, device=device(), requires_grad=True)


def test_masks(tp: Any) -> None:
    """Each rank's own with equal seeds, followed by what is the same on all; the seed says all of it."""
    dropout, firsts = make_dropout(tp), []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        given = ones()
        first = dropout(given)
        assert are_different(first)
        assert set(first.detach().unique().tolist()) == {0.0, 2.0}
        assert are_same(F.dropout(torch.ones(64, device=device()), 0.5))
        second = dropout(ones())
        assert are_different(second)
        assert not torch.equal(first, second)
        assert are_same(torch.rand(8, device=device()))
        first.sum().backward()
        assert torch.equal(given.grad, first.detach())
        firsts.append(first.detach())
    assert torch.equal(firsts[0], firsts[1])
    assert not torch.equal(firsts[0], firsts[2])


def test_masks_are_replayed(tp: Any) -> None:
    """By both kinds of checkpointing, whatever was drawn in between; ranks still draw alike afterwards."""
    mesh = make_mesh()

    def of_a_user(rows: torch.Tensor) -> torch.Tensor:
        with tp.local_randomness(mesh):
            return F.dropout(rows, 0.5)

    for draw in (make_dropout(tp), of_a_user):
        for is_reentrant in (True, False):
            torch.manual_seed(0)
            given = ones()
            seen = checkpoint(draw, given, use_reentrant=is_reentrant)
            torch.rand(3, device=device())
            draw(ones())
            assert are_different(seen)
            seen.sum().backward()
            assert torch.equal(given.grad, seen.detach())
            assert are_same(torch.rand(8, device=device()))


def test_a_generator_goes_on(tp: Any) -> None:
    """By one draw, whatever this rank has drawn in between, nothing and an error included."""
    mesh = make_mesh()
    generator = torch.default_generator
    if device() != "cpu":
        generator = torch.get_device_module(device()).default_generators[0]
    states: list[torch.Tensor] = []
    for num_drawn in (0, 1, 1000, 10 * (dist.get_rank() + 1)):
        torch.manual_seed(5)
        before = generator.get_state()
        with tp.local_randomness(mesh):
            torch.rand(num_drawn, device=device())
        states.append(generator.get_state())
        assert not torch.equal(states[-1], before)
        assert generator.initial_seed() == 5
    torch.manual_seed(5)
    with pytest.raises(ZeroDivisionError), tp.local_randomness(mesh):
        raise ZeroDivisionError
    states.append(generator.get_state())
    assert all(torch.equal(state, states[0]) for state in states)
    assert are_same(states[0])


def test_uneven_parts_draw_alike_afterwards(tp: Any) -> None:
    """Ranks with more, with less and with nothing: what comes behind is the same on all of them."""
    mesh = make_mesh()
    for length in (1, 3, 5, 9_000_001):  # the last: more than a GPU's threads draw at a time
        torch.manual_seed(0)
        dropout = tp.parallelize_module(
            nn.Dropout(0.5), mesh, tp.SequenceParallel(sequence_dim=0, use_local_output=True)
        )
        dropout(part_of(torch.ones(length, device=device()), Shard(0), mesh))
        assert are_same(torch.rand(8, device=device())), length


def test_ranks_never_draw_each_others(tp: Any) -> None:
    """Neither at once nor one after another, on as many ranks as one machine has GPUs."""
    seen: set[tuple[float, ...]] = set()
    mesh = make_mesh()
    for rank in range(8):
        torch.manual_seed(0)
        for _ in range(4):
            with (
                mock.patch.object(DeviceMesh, "get_local_rank", return_value=rank),
                tp.local_randomness(mesh),
            ):
                seen.add(tuple(torch.rand(16, device=device()).tolist()))
    assert len(seen) == 8 * 4


class Initial(nn.Sequential):
    """Layers of every style, of uneven sizes."""

    def __init__(self) -> None:
        super().__init__(
            nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 10), nn.Linear(10, 8), nn.Linear(8, 7)
        )


def test_initial_values(tp: Any) -> None:
    """Those that a single process draws on such a device, to the bit; the generator is left alone."""
    plan = {
        "0": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "1": tp.SequenceParallel(use_local_output=True),
        "2": tp.ColwiseParallel(input_layouts=Shard(1)),
        "3": tp.RowwiseParallel(),
        "4": tp.ColwiseParallel(output_layouts=Replicate()),
    }
    with torch.device("meta"):
        model = Initial()
    tp.parallelize_module(model, make_mesh(), plan)
    tp.init_parameters(model.to_empty(device=device()), seed=7)
    single = Initial().to(device())
    torch.manual_seed(7)
    part: Any
    for part in single:
        part.reset_parameters()
    rights = dict(single.named_parameters())
    for name, param in model.named_parameters():
        assert param.device.type == device()
        assert_is_part(param, rights[name].detach(), name, 0.0)
    torch.manual_seed(1)
    wanted = torch.rand(4, device=device())
    torch.manual_seed(1)
    tp.init_parameters(model, seed=7)
    assert torch.equal(torch.rand(4, device=device()), wanted)
    model(torch.arange(8, device=device()).view(2, 4)).sum().backward()

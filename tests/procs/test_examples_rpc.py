"""The parameter server learns, and what its trainers compute together is what one process computes."""

from __future__ import annotations

import pytest
import torch

import weft
from examples import parameter_server as example
from weft.testing import shared_pool

NUM_STEPS = 5


def train_alone(num_trainers: int) -> list[float]:
    """Every trainer's batches, one after the other, in this process."""
    generators = [torch.Generator().manual_seed(1 + index) for index in range(num_trainers)]
    weight, losses = torch.zeros(4, 1, requires_grad=True), []
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(NUM_STEPS):
        x = torch.cat([torch.randn(32, 4, generator=generator) for generator in generators])
        loss = (x @ weight - x.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check(by_rank: list[list[list[float]]], num_trainers: int) -> None:
    assert by_rank[1:] == [[]] * num_trainers
    by_trainer = torch.tensor(by_rank[0])
    assert by_trainer.shape == (num_trainers, NUM_STEPS)
    torch.testing.assert_close(by_trainer.mean(dim=0), torch.tensor(train_alone(num_trainers)))


@pytest.mark.parametrize("num_trainers", [1, 3])
def test_trainers_learn_as_one_process_does(num_trainers: int) -> None:
    ranks = 1 + num_trainers
    check(weft.launch(example.job, ranks=ranks, kind="thread", args=(NUM_STEPS,), timeout=60), num_trainers)


def test_processes_learn_as_well() -> None:
    check(shared_pool(2).run(example.job, args=(NUM_STEPS,), timeout=60), 1)

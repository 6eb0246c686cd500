"""The recommender learns, and with one trainer it computes what one process computes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import weft
from examples import recommender as example
from weft.testing import shared_pool

NUM_STEPS = 5


def train_alone() -> list[float]:
    torch.manual_seed(0)
    tables = example.Tables()
    torch.manual_seed(0)
    dense = example.make_dense()
    optimizers = [
        torch.optim.SparseAdam(tables.parameters(), lr=0.03),
        torch.optim.Adam(dense.parameters(), lr=0.03),
    ]
    generator, losses = torch.Generator().manual_seed(1), list[float]()
    for _ in range(NUM_STEPS):
        liked, shown, is_click = example.make_batch(generator)
        loss = F.binary_cross_entropy_with_logits(dense(tables(liked, shown)), is_click)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def test_one_trainer_learns_as_one_process_does() -> None:
    by_rank = shared_pool(2).run(example.job, args=(NUM_STEPS,), timeout=120)
    assert by_rank[1] == []
    torch.testing.assert_close(torch.tensor(by_rank[0]), torch.tensor([train_alone()]))


def test_two_trainers_learn_as_threads() -> None:
    (losses, *_) = weft.launch(example.job, ranks=3, kind="thread", args=(100,), timeout=60)
    first, last = torch.tensor(losses)[:, :10].mean(dim=1), torch.tensor(losses)[:, -10:].mean(dim=1)
    assert first.shape == (2,)
    assert (last < first / 5).all()

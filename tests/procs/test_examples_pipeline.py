"""The pipeline has several micro-batches on their way, and computes what one process computes."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import weft
from examples import remote_pipeline as example
from weft import rpc

NUM_STEPS = 5


def train_alone(num_stages: int) -> list[float]:
    widths = [2, *[example.WIDTH] * (num_stages - 1), 1]
    stages = [example.Stage(widths[index], widths[index + 1], index) for index in range(num_stages)]
    model = nn.Sequential(*(stage.layers for stage in stages))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator, losses = torch.Generator().manual_seed(0), list[float]()
    for _ in range(NUM_STEPS):
        rows, wanted = example.make_batch(generator)
        optimizer.zero_grad()
        loss = (model(rows) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("num_stages", [1, 3])
def test_it_learns_as_one_process_does(num_stages: int) -> None:
    ranks = 1 + num_stages
    losses = weft.launch(example.job, ranks=ranks, kind="thread", args=(NUM_STEPS,), timeout=60)
    assert losses[1:] == [[]] * num_stages
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(train_alone(num_stages)))


class Visits:
    """Which stages have begun on how many micro-batches."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.num_by_worker = {1: 0, 2: 0}

    def enter(self, worker: int) -> None:
        """Stage 2 begins on the first micro-batch once stage 1 has the second, and before it has the last."""
        with self.changed:
            self.num_by_worker[worker] += 1
            self.changed.notify_all()
            if worker == 1 and self.num_by_worker[1] == example.NUM_MICRO_BATCHES:
                assert self.changed.wait_for(lambda: self.num_by_worker[2] >= 1, 20)
            if worker == 2:
                assert self.changed.wait_for(lambda: self.num_by_worker[1] >= 2, 20)


visits = Visits()


class WatchedStage(example.Stage):
    def __init__(self, num_in: int, num_out: int, seed: int) -> None:
        super().__init__(num_in, num_out, seed)
        self.layers.register_forward_pre_hook(lambda *_: visits.enter(rpc.get_worker_info().id))


def test_micro_batches_are_at_several_stages_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "Stage", WatchedStage)
    weft.launch(example.job, ranks=3, kind="thread", args=(1,), timeout=60)
    assert set(visits.num_by_worker.values()) == {example.NUM_MICRO_BATCHES}

"""The examples on RPC compute what one process computes: parameter server, recommender, pipeline."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from examples import parameter_server, recommender, remote_pipeline
from weft import rpc
from weft.testing import shared_pool

NUM_STEPS = 5


# -- the parameter server -------------------------------------------------------------------


def serve_alone(num_trainers: int) -> list[float]:
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


def check_trainers(by_rank: list[list[list[float]]], num_trainers: int) -> None:
    assert by_rank[1:] == [[]] * num_trainers
    by_trainer = torch.tensor(by_rank[0])
    assert by_trainer.shape == (num_trainers, NUM_STEPS)
    torch.testing.assert_close(by_trainer.mean(dim=0), torch.tensor(serve_alone(num_trainers)))


@pytest.mark.threads
@pytest.mark.parametrize("num_trainers", [1, 3])
def test_trainers_learn_as_one_process_does(num_trainers: int) -> None:
    ranks = 1 + num_trainers
    check_trainers(
        weft.launch(parameter_server.job, ranks=ranks, kind="thread", args=(NUM_STEPS,), timeout=60),
        num_trainers,
    )


@pytest.mark.processes
def test_processes_learn_as_well() -> None:
    check_trainers(shared_pool(2).run(parameter_server.job, args=(NUM_STEPS,), timeout=60), 1)


# -- the recommender ------------------------------------------------------------------------


def recommend_alone() -> list[float]:
    torch.manual_seed(0)
    tables = recommender.Tables()
    torch.manual_seed(0)
    dense = recommender.make_dense()
    optimizers = [
        torch.optim.SparseAdam(tables.parameters(), lr=0.03),
        torch.optim.Adam(dense.parameters(), lr=0.03),
    ]
    generator, losses = torch.Generator().manual_seed(1), list[float]()
    for _ in range(NUM_STEPS):
        liked, shown, is_click = recommender.make_batch(generator)
        loss = F.binary_cross_entropy_with_logits(dense(tables(liked, shown)), is_click)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.processes
def test_one_trainer_learns_as_one_process_does() -> None:
    by_rank = shared_pool(2).run(recommender.job, args=(NUM_STEPS,), timeout=120)
    assert by_rank[1] == []
    torch.testing.assert_close(torch.tensor(by_rank[0]), torch.tensor([recommend_alone()]))


@pytest.mark.threads
def test_two_trainers_learn_as_threads() -> None:
    (losses, *_) = weft.launch(recommender.job, ranks=3, kind="thread", args=(100,), timeout=60)
    first, last = torch.tensor(losses)[:, :10].mean(dim=1), torch.tensor(losses)[:, -10:].mean(dim=1)
    assert first.shape == (2,)
    assert (last < first / 5).all()


# -- the pipeline: several micro-batches on their way -----------------------------------------


def pipe_alone(num_stages: int) -> list[float]:
    widths = [2, *[remote_pipeline.WIDTH] * (num_stages - 1), 1]
    stages = [remote_pipeline.Stage(widths[index], widths[index + 1], index) for index in range(num_stages)]
    model = nn.Sequential(*(stage.layers for stage in stages))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator, losses = torch.Generator().manual_seed(0), list[float]()
    for _ in range(NUM_STEPS):
        rows, wanted = remote_pipeline.make_batch(generator)
        optimizer.zero_grad()
        loss = (model(rows) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.threads
@pytest.mark.parametrize("num_stages", [1, 3])
def test_stages_learn_as_one_process_does(num_stages: int) -> None:
    ranks = 1 + num_stages
    losses = weft.launch(remote_pipeline.job, ranks=ranks, kind="thread", args=(NUM_STEPS,), timeout=60)
    assert losses[1:] == [[]] * num_stages
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(pipe_alone(num_stages)))


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
            if worker == 1 and self.num_by_worker[1] == remote_pipeline.NUM_MICRO_BATCHES:
                assert self.changed.wait_for(lambda: self.num_by_worker[2] >= 1, 20)
            if worker == 2:
                assert self.changed.wait_for(lambda: self.num_by_worker[1] >= 2, 20)


visits = Visits()


class WatchedStage(remote_pipeline.Stage):
    def __init__(self, num_in: int, num_out: int, seed: int) -> None:
        super().__init__(num_in, num_out, seed)
        self.layers.register_forward_pre_hook(lambda *_: visits.enter(rpc.get_worker_info().id))


@pytest.mark.threads
def test_micro_batches_are_at_several_stages_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_pipeline, "Stage", WatchedStage)
    weft.launch(remote_pipeline.job, ranks=3, kind="thread", args=(1,), timeout=60)
    assert set(visits.num_by_worker.values()) == {remote_pipeline.NUM_MICRO_BATCHES}

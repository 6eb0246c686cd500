"""A run whose rank is killed can be read up to its last step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import weft
from weft import LaunchError
from weft.observe import Observer, draw_run
from weft.observe.page import make_page
from weft.observe.reading import read_run
from weft.testing import Fault, inject


def train(directory: str) -> None:
    torch.set_num_threads(1)
    model = weft.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), bucket_cap_mb=0.01
    )
    observer = Observer(directory, {"strategy": "ddp"})
    with inject(Fault(rank=1, action="kill", op="all_reduce", step=6, call=0)) as faults:
        for number in faults.steps(10):
            with observer.step(number) as step, observer.span("backward"):
                loss = model(torch.ones(4, 64)).square().mean()
                loss.backward()
                step.note(loss=loss.item())


def test_a_killed_run_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="rank 1"):
        weft.launch(train, ranks=2, kind="process", backend="weft", args=(str(tmp_path),), timeout=120)
    run = read_run(tmp_path)
    survivor, killed = run.logs
    assert [step.step for step in killed.steps] == list(range(6))
    # The other one had been in step 6 when it heard of it: that step's collectives failed, and are there.
    assert [step.step for step in survivor.steps] == list(range(6))
    assert survivor.errors
    assert any("rank 1" in error for error in survivor.errors), survivor.errors
    for log in run.logs:
        assert {event.label for event in log.events} >= {"bucket 0", "bucket 1"}
        assert any(event.wait_start is not None for event in log.events)
        assert all(step.wait_secs <= step.comm_secs <= step.secs for step in log.steps)
    page = make_page(run)
    assert "PeerError" in page
    assert "2 ranks made 6 steps" in page
    assert "2 ranks made 6 steps" in draw_run(tmp_path)

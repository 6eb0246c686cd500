"""A trainer or the server dies in the middle of a data-parallel backward in a context: it is named, soon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import weft
from tests.data_parallel_rpc.libraries import dist_autograd
from tests.data_parallel_rpc.pipelines import (
    BACK,
    FRONT,
    MIDDLE,
    Pipeline,
    RemotePart,
    make_part,
    mean_square,
)
from tests.data_parallel_rpc.trainers import LIMITS, Trainer, Wrap, among_trainers, ddp, sharded
from tests.ranks import SitOut
from weft.testing import Fault, inject, shared_pool

pytestmark = pytest.mark.processes

SOON_SECS = 15.0  # for an error that takes two, on a machine that has other things to do


def make_model(t: Trainer, wrap: Wrap, middle: Callable[..., Any]) -> Any:
    options: dict[str, Any] = {} if wrap is sharded else {"bucket_cap_mb": 0.0001}
    return wrap(t, Pipeline(make_part(FRONT), middle, make_part(BACK)), **options)


def run_on_trainers(body: Callable[[Trainer], None]) -> None:
    """Two trainers and a server, which are processes, on the local group."""
    shared_pool(3).run(be_a_trainer, args=(body,), backend="weft", **LIMITS)


def be_a_trainer(body: Callable[[Trainer], None]) -> None:
    with suppress(SitOut), among_trainers() as trainer:
        try:
            body(trainer)
        except BaseException as error:
            error.add_note("in the body")
            raise


def a_trainer(wrap: Wrap, t: Trainer) -> None:
    """It is killed at its third reduction, in the second step."""
    middle = RemotePart(t.server, make_part, MIDDLE)
    model = make_model(t, wrap, middle)
    op = "reduce_scatter_spread" if wrap is sharded else "all_reduce"
    with inject(Fault(rank=1, action="kill", op=op, step=1, call=1)) as faults:
        for step in faults.steps(3):
            began = time.monotonic()
            with dist_autograd.context() as context_id:
                loss = mean_square(model, t.rank, step)
                try:
                    dist_autograd.backward(context_id, [loss])
                finally:
                    assert time.monotonic() - began < SOON_SECS


def the_server(wrap: Wrap, t: Trainer) -> None:
    """It kills itself in its part of the backward."""
    middle = RemotePart(t.server, Mortal)
    model = make_model(t, wrap, middle)
    began = time.monotonic()
    with dist_autograd.context() as context_id:
        loss = mean_square(model, t.rank)
        with pytest.raises(weft.PeerError, match=t.server) as caught:
            dist_autograd.backward(context_id, [loss])
    assert caught.value.ranks == (t.size,)
    assert time.monotonic() - began < SOON_SECS


class Mortal(nn.Module):
    """Does not survive its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.part = make_part(MIDDLE)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output = self.part(rows)
        output.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        return output


@pytest.mark.parametrize("wrap", [ddp, sharded], ids=lambda wrap: wrap.__name__)
def test_a_trainer_dies(wrap: Wrap) -> None:
    with pytest.raises(weft.LaunchError) as caught:
        run_on_trainers(partial(a_trainer, wrap))
    assert "SIGKILL" in caught.value.failures[1]
    assert "PeerError" in caught.value.failures[0]
    assert "rank 1" in caught.value.failures[0]


@pytest.mark.full
def test_the_server_dies() -> None:
    with pytest.raises(weft.LaunchError) as caught:
        run_on_trainers(partial(the_server, ddp))
    assert "SIGKILL" in caught.value.failures[2]
    for rank in (0, 1):
        # The body was right; what fails is the end, which all would have to come to.
        assert "in the body" not in caught.value.failures[rank], caught.value.failures[rank]

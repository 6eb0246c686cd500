"""Tensors without work, and groups without peers: what they bring is what real ones would."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft import comm
from weft.errors import StateError, UnsupportedError
from weft.planning.clock import Clock
from weft.planning.imagined_values import Imagining, is_known
from weft.planning.imagined_world import imagined_world
from weft.planning.machine import Link, Links
from weft.planning.memory import StorageLog, followed_resizes

LINKS = Links(Link(1e9, 1e-3), Link(1e9, 1e-3), ranks_per_host=4)


class Seen:
    """Keeps the names of operations, and lets a log see their results."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.log = StorageLog()

    def saw(
        self, op: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *, is_view: bool
    ) -> None:
        self.names.append(op.name())
        self.log.see(outputs)

    def saw_dtensor(self) -> None:
        self.names.append("dtensor")


def train_once(model: nn.Module, batch: torch.Tensor) -> list[tuple[Any, ...]]:
    loss = model(batch).square().mean()
    loss.backward()
    return [(param.grad.shape, param.grad.stride(), param.grad.dtype) for param in model.parameters()]  # type: ignore[union-attr]


def test_results_have_the_shapes_of_real_ones() -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(4, 8, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(64, 16), nn.LayerNorm(16)
        )

    real = train_once(make(), torch.randn(5, 4, 8))
    with Imagining(Seen()):
        assert train_once(make(), torch.randn(5, 4, 8)) == real


def test_a_huge_model_takes_no_memory() -> None:
    with Imagining(Seen()):
        train_once(nn.Linear(2, 2), torch.randn(1, 2))  # what torch imports on the way takes memory
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Imagining(Seen()):
        model = nn.Sequential(*[nn.Linear(16384, 16384) for _ in range(8)])  # 8 GiB
        train_once(model, torch.randn(4096, 16384))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 2**10  # KiB


def test_what_is_known_stays_known() -> None:
    with Imagining(Seen()):
        row = torch.tensor([3, 4])
        rows = row.repeat(3, 1)
        assert rows.tolist() == [[3, 4]] * 3
        assert bool((rows == rows[0]).all())
        large = torch.randn(10_000)
        assert not is_known(large)
        many = torch.zeros(10_000, dtype=torch.long)
        assert is_known(many)
        many.copy_(large.long())
        assert not is_known(many)
        loss = large.square().mean()
        assert loss.item() == 1.0
        assert not bool(torch.isnan(loss))
        assert bool(torch.isfinite(large).all())
        assert not bool(torch.isnan(large).any())


def test_shapes_that_depend_on_values_are_refused() -> None:
    with Imagining(Seen()), pytest.raises(UnsupportedError, match=r"the model calls aten::nonzero"):
        torch.randn(10_000).nonzero()


def test_memory_is_followed_to_its_end() -> None:
    seen = Seen()
    log = seen.log
    with Imagining(seen), followed_resizes(log):
        kept = torch.empty(1000)  # 4000 bytes
        log.begin_window()
        passing = torch.empty(5000)
        del passing
        log.assign("parameters", [kept])
        assert log.peak().parameters == 4000
        assert log.peak().activations == 20000
        kept.untyped_storage().resize_(0)
        log.begin_window()
        other = torch.empty(500)
        assert log.peak().total == 2000
        kept.untyped_storage().resize_(4000)
        assert log.peak().total == 6000
        del other


def test_peers_say_what_this_rank_says() -> None:
    clock = Clock(LINKS)
    with imagined_world(8, clock), Imagining(Seen()):
        assert dist.get_world_size() == 8
        assert comm.exchange_rows([1, 2]) == [[1, 2]] * 8
        assert comm.all_reduce(torch.tensor([5])).wait().tolist() == [40]
        gathered = comm.all_gather_into_tensor(
            torch.empty(16, dtype=torch.int64), torch.tensor([7, 8])
        ).wait()
        assert gathered.tolist() == [7, 8] * 8
        with weft.record() as events:
            comm.all_reduce(torch.randn(1000)).wait()
        assert [(event.op, event.bytes_in, event.group_size) for event in events] == [("all_reduce", 4000, 8)]
        with pytest.raises(StateError, match="in a process group already"), imagined_world(2, clock):
            pass
    assert not dist.is_initialized()


def test_communication_hides_behind_computation() -> None:
    clock = Clock(LINKS)
    with imagined_world(4, clock), Imagining(Seen()):
        flat = torch.randn(1_000_000)
        all_secs = 2 * 0.75 * 4e6 / 1e9 + 2 * 2 * 1e-3
        clock.begin_step()
        handle = comm.all_reduce(flat)
        clock.compute(all_secs / 2)
        handle.wait()
        time = clock.step_time()
        assert time.total_secs == pytest.approx(all_secs)
        assert time.exposed_secs == pytest.approx(all_secs / 2)
        clock.begin_step()
        handles = [comm.all_reduce(flat), comm.all_reduce(flat)]  # one after the other on their lane
        for handle in handles:
            handle.wait()
        assert clock.step_time().total_secs == pytest.approx(2 * all_secs)
        assert clock.step_time().hidden_secs == pytest.approx(0.0)

"""What fully_shard does when, as weft.record() tells it: unshard, reshard, reduce and their collectives."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

import weft
from tests.fully_shard.models import (
    Experts,
    Language,
    as_whole,
    by_layer,
    filled,
    make_tokens,
    net,
    next_token_loss,
)
from tests.fully_shard.twins import all_ranks, make_rows, mean_square, rows_of
from tests.ranks import run_on
from weft import fully_shard
from weft.comm import Event

pytestmark = run_on(threads=(2, 4))

LAYERS = ["0", "2", "4"]


def step(model: nn.Module, seed: int = 0) -> None:
    rank = dist.get_rank()
    mean_square(model, rows_of(make_rows(seed), rank), rank).backward()


def in_order(events: Iterable[Event]) -> list[Event]:
    return sorted(events, key=lambda event: event.start_secs)


def details(events: Iterable[Event], op: str) -> list[str]:
    """The modules of which an op was recorded, in the order in which they began."""
    return [event.detail for event in in_order(events) if event.op == op]


def collectives(events: Iterable[Event], word: str) -> list[Event]:
    return [event for event in in_order(events) if word in event.op and event.feature == "fsdp"]


def steps_recorded(model: nn.Module, steps: int = 1, after: int = 1) -> list[Event]:
    """The events of steps that came after the first one(s)."""
    for seed in range(after):
        step(model, seed)
    with weft.record() as events:
        for seed in range(steps):
            step(model, seed)
    return list(events)


def assert_nothing_twice(events: Iterable[Event]) -> None:
    """Between two unshards of a module there is a reshard."""
    gathered: set[str] = set()
    for event in in_order(events):
        if event.op == "unshard":
            assert event.detail not in gathered, f"{event.detail} was gathered already"
            gathered.add(event.detail)
        elif event.op == "reshard":
            gathered.discard(event.detail)


def test_gathered_for_forward_and_backward() -> None:
    model = net()
    by_layer(model, reshard_after_forward=True)
    events = steps_recorded(model)
    assert details(events, "unshard") == [*LAYERS, *reversed(LAYERS)]
    assert Counter(details(events, "reshard")) == dict.fromkeys(LAYERS, 2)
    assert details(events, "reduce") == list(reversed(LAYERS))
    assert_nothing_twice(events)


def test_gathered_once_where_kept() -> None:
    model = net()
    by_layer(model, reshard_after_forward=False)
    events = steps_recorded(model, steps=2)
    assert details(events, "unshard") == LAYERS * 2
    assert Counter(details(events, "reshard")) == dict.fromkeys(LAYERS, 2)
    assert_nothing_twice(events)


def test_the_root_by_its_name() -> None:
    """Its parameters are kept after forward unless told otherwise."""
    model = Language()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    next_token_loss(model, make_tokens(0)).backward()
    with weft.record() as events:
        next_token_loss(model, make_tokens(1)).backward()
    counts = Counter(details(events, "unshard"))
    assert counts == {"root": 1, "blocks.0": 2, "blocks.1": 2}
    assert details(events, "unshard")[0] == "root"
    assert Counter(details(events, "reduce")) == {"root": 1, "blocks.0": 1, "blocks.1": 1}


def test_a_collective_each() -> None:
    """One gather for an unshard, one reduction for a reduce, named after the module, as large as it is."""
    model = net()
    by_layer(model, reshard_after_forward=True)
    events = steps_recorded(model)
    gathers, reductions = collectives(events, "gather"), collectives(events, "reduce_scatter")
    assert len(gathers) == len(details(events, "unshard")) == 6
    assert len(reductions) == len(details(events, "reduce")) == 3
    for event, name in zip(gathers, [*LAYERS, *reversed(LAYERS)], strict=True):
        assert name in event.detail
    layer_bytes = (6 * 6 + 6) * 8
    assert all(2 * layer_bytes > event.bytes_out >= layer_bytes for event in gathers)
    assert all(event.bytes_in >= layer_bytes > event.bytes_out for event in reductions)


def test_bytes_balance() -> None:
    """An unshard says how much memory it takes, a reshard how much it gives back."""
    for reshard, most in ((True, 2), (False, 3)):
        model = net()
        by_layer(model, reshard_after_forward=reshard)
        held, peak = 0, 0
        layer_bytes = (6 * 6 + 6) * 8
        for event in in_order(event for event in steps_recorded(model) if event.op in ("unshard", "reshard")):
            held += event.bytes_out - event.bytes_in
            peak = max(peak, held)
        assert held == 0
        assert most * layer_bytes <= peak < (most + 1) * 2 * layer_bytes


def test_one_collective_for_many_parameters() -> None:
    model = filled(nn.Sequential(*(nn.Linear(6, 6) for _ in range(30))))
    as_whole(model)
    events = steps_recorded(model)
    assert len(collectives(events, "gather")) == 1
    assert len(collectives(events, "reduce_scatter")) == 1


class Timed(nn.Module):
    """A layer that notes when its computation began and ended, forward and backward."""

    def __init__(self, notes: dict[str, dict[str, float]], name: str) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.notes, self.name = notes, name

    def note(self, what: str) -> None:
        self.notes[what][self.name] = time.perf_counter()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows.register_hook(lambda grad: self.note("backward ended"))
        out = torch.tanh(self.layer(rows))
        out.register_hook(lambda grad: self.note("backward began"))
        self.note("forward ended")
        return out


def test_prefetch() -> None:
    """From the second step on a module's gather begins before the computation of the one before has ended."""
    notes: dict[str, dict[str, float]] = defaultdict(dict)
    names = [str(place) for place in range(4)]
    model = filled(nn.Sequential(*(Timed(notes, name) for name in names)), dtype=torch.float32)
    by_layer(model, reshard_after_forward=True)
    rows = torch.ones(4, 64).requires_grad_()
    for _ in range(2):
        model(rows).sum().backward()
    notes.clear()
    with weft.record() as events:
        model(rows).sum().backward()
    forward, backward = {}, {}
    for event in in_order(event for event in events if event.op == "unshard"):
        (backward if event.detail in forward else forward)[event.detail] = event.start_secs
    for before, after in itertools.pairwise(names):
        assert forward[after] < notes["forward ended"][before], f"{after} in forward"
        assert backward[before] < notes["backward ended"][after], f"{before} in backward"


def test_memory_falls() -> None:
    """After forward the full parameters of resharded layers are gone, though autograd still needs them."""
    for reshard, most in ((True, 3), (False, 8)):
        seen: list[StorageWeakRef] = []

        class Seen(nn.Linear):
            def forward(self, rows: torch.Tensor, seen=seen) -> torch.Tensor:
                seen.append(StorageWeakRef(self.weight.untyped_storage()))
                return super().forward(rows)

        model = filled(nn.Sequential(*(Seen(32, 32) for _ in range(8))), dtype=torch.float32)
        by_layer(model, reshard_after_forward=reshard)
        for _ in range(2):
            seen.clear()
            loss = model(torch.ones(2, 32)).sum()
            layer_bytes = 32 * 32 * 4
            alive = alive_bytes(seen)
            assert alive <= most * 2 * layer_bytes, f"reshard {reshard}: {alive / layer_bytes} layers"
            if not reshard:
                assert alive >= 8 * layer_bytes
            loss.backward()
            del loss
            assert alive_bytes(seen) <= 3 * 2 * layer_bytes


def alive_bytes(refs: list[StorageWeakRef]) -> int:
    """The sizes of the storages that are still there, each counted once."""
    sizes: dict[int, int] = {}
    for ref in refs:
        if not ref.expired():
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is not None:
                sizes[ref.cdata] = storage.nbytes()
    return sum(sizes.values())


def test_nothing_without_sync() -> None:
    model = net()
    by_layer(model, reshard_after_forward=False)
    step(model)
    model.set_requires_gradient_sync(False)
    with weft.record() as events:
        step(model)
    assert details(events, "reduce") == []
    assert collectives(events, "reduce_scatter") == []
    model.set_reshard_after_backward(False)
    step(model)
    with weft.record() as events:
        step(model)
    assert details(events, "unshard") == []  # all is there already
    assert collectives(events, "gather") == []


def test_frozen_parts_are_not_reduced() -> None:
    model = net()
    model[2].requires_grad_(False)
    by_layer(model)
    assert Counter(details(steps_recorded(model), "reduce")) == {"0": 1, "4": 1}


@run_on(threads=4)
def test_copies_are_averaged_once() -> None:
    model = net()
    by_layer(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    events = steps_recorded(model)
    assert len(collectives(events, "reduce_scatter")) == 3
    assert len(collectives(events, "all_reduce")) == 3
    assert all(event.group_size == 2 for event in collectives(events, "all_reduce"))


def test_ranks_call_the_same() -> None:
    """In the same order, whatever each of them uses."""
    model = Experts("abc")
    by_layer(model)
    rank = dist.get_rank()
    with weft.record() as events:
        for seed in range(3):
            model(make_rows(seed), ["ab", "c", "", "ba"][(rank + seed) % 4]).square().mean().backward()
    calls = [(e.op, e.detail) for e in in_order(events) if e.op not in ("unshard", "reshard", "reduce")]
    first, *others = all_ranks(calls)
    assert first
    assert all(other == first for other in others)


@run_on(threads=1)
def test_a_world_of_one_communicates_nothing() -> None:
    model = net()
    by_layer(model, reshard_after_forward=True)
    with weft.record() as events:
        for seed in range(3):
            step(model, seed)
    assert [event for event in events if event.op not in ("unshard", "reshard", "reduce")] == []

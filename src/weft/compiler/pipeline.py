"""The pipeline: what is done to a compiled graph, pass by pass, in this order.

A pass is a function of the graph and of what is known about it. The last one verifies.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from weft.compiler.graphs import calls
from weft.compiler.ops import MARK, REDUCE
from weft.compiler.passes.bucket_gathers import bucket_gathers
from weft.compiler.passes.bucket_gradients import (
    bucket_by_coalescing,
    bucket_by_concat,
    bucket_in_buffers,
)
from weft.compiler.passes.bucket_scatters import bucket_scatters
from weft.compiler.passes.drop_copies import drop_copies
from weft.compiler.passes.find_marks import Reducible, find_reducible
from weft.compiler.passes.find_shards import find_gathers, find_scatters, moved_numels
from weft.compiler.passes.launch_early import launch_early, launches_in
from weft.compiler.passes.make_in_place import make_in_place
from weft.compiler.passes.pace_shards import pace_gathers, pace_scatters
from weft.compiler.passes.verify import verify, verify_shards
from weft.compiler.passes.wait_late import wait_late
from weft.compiler.settings import form_in_force, settings, shard_cap_bytes
from weft.compiler.tracing import gathers_here


@dataclass(slots=True)
class Work:
    """One graph under way through the pipeline."""

    graph: fx.Graph
    found: list[Reducible] = field(default_factory=list[Reducible])
    num_buckets: int = 0
    has_shards: bool = False  # it gathers sharded parameters, or scatters their gradients
    moved: Counter[Hashable] = field(default_factory=Counter[Hashable])  # elements, by such collectives

    def launches(self) -> list[fx.Node]:
        """The graph's other collectives, in order; none where nothing is marked."""
        if not self.found:
            return []
        shards = set(self.shards())
        return [node for node in launches_in(self.graph) if node not in shards]

    def shards(self) -> list[fx.Node]:
        """The collectives of sharded parameters."""
        return self.gathers() + self.scatters()

    def gathers(self) -> list[fx.Node]:
        """The gatherings of sharded parameters, in order."""
        return find_gathers(self.graph) if self.has_shards else []

    def scatters(self) -> list[fx.Node]:
        """The scatterings of their gradients, in order."""
        return find_scatters(self.graph) if self.has_shards else []


Pass = Callable[[Work], None]


def _find(work: Work) -> None:
    work.found = find_reducible(work.graph)
    work.moved = moved_numels(work.shards())


def _bucket(work: Work) -> None:
    wanted = FORMS[form_in_force()]
    for found in work.found:
        bucket = wanted if found.wire.is_plain else bucket_in_buffers
        work.num_buckets += bucket(work.graph, found)


def _bucket_gathers(work: Work) -> None:
    bucket_gathers(work.graph, work.gathers(), shard_cap_bytes())


def _bucket_scatters(work: Work) -> None:
    bucket_scatters(work.graph, work.scatters(), shard_cap_bytes())


def _pace(work: Work) -> None:
    pace_gathers(work.graph, work.gathers())
    pace_scatters(work.graph, work.scatters())


def _launch(work: Work) -> None:
    launch_early(work.graph, work.launches())


def _wait(work: Work) -> None:
    wait_late(work.graph, work.launches())


def _drop(work: Work) -> None:
    drop_copies(work.graph, work.launches())


def _make_in_place(work: Work) -> None:
    for found in work.found:
        make_in_place(work.graph, found)


def _verify(work: Work) -> None:
    verify(work.graph, work.found)
    verify_shards(work.gathers(), work.scatters(), work.moved)


FORMS: dict[str, Callable[[fx.Graph, Reducible], int]] = {
    "buffers": bucket_in_buffers,
    "concat": bucket_by_concat,
    "coalesced": bucket_by_coalescing,
}

PASSES: list[tuple[str, Pass]] = [
    ("find_gradients", _find),
    ("bucket_gradients", _bucket),
    ("bucket_gathers", _bucket_gathers),
    ("bucket_scatters", _bucket_scatters),
    ("pace_shards", _pace),
    ("launch_early", _launch),
    ("wait_late", _wait),
    ("drop_copies", _drop),
    ("make_in_place", _make_in_place),
    ("verify", _verify),
]


def run_passes(graph: fx.Graph) -> Work:
    """Take a graph through all passes. One without anything of weft stays as it is."""
    work = Work(graph, has_shards=gathers_here())
    if not work.has_shards and not calls(graph, MARK, REDUCE):
        return work
    for _, run in PASSES:
        run(work)
    if work.found:
        _count(work.num_buckets)
    if work.has_shards:
        _count_shards(work)
    return work


def _count(num_buckets: int) -> None:
    """Tell how many buckets the last graph got, under the name that torch's tools look for."""
    from torch._dynamo.utils import counters

    counters["inductor"]["ddp_buckets"] = num_buckets


def _count_shards(work: Work) -> None:
    from torch._dynamo.utils import counters

    counters["inductor"]["fsdp_gathers"] += len(work.gathers())
    counters["inductor"]["fsdp_scatters"] += len(work.scatters())


def fingerprint() -> str:
    """What a graph that has been through here depends on beside itself, for Inductor's cache."""
    told = (form_in_force(), settings.bucket_cap_mb, torch.__version__)
    return hashlib.sha256(repr((_hash_of_sources(), *told)).encode()).hexdigest()


@functools.cache
def _hash_of_sources() -> str:
    sources = sorted(Path(inspect.getfile(run_passes)).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def name_of(target: Any) -> str:
    """A short name of an op, for people."""
    return str(target).removeprefix("torch.ops.").removesuffix(".default")

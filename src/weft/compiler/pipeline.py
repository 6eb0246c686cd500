"""The pipeline: what is done to a compiled graph, pass by pass, in this order.

A pass is a function of the graph and of what is known about it. The last one verifies.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from weft.compiler.graphs import calls
from weft.compiler.ops import MARK, REDUCE
from weft.compiler.passes.bucket_gradients import (
    bucket_by_coalescing,
    bucket_by_concat,
    bucket_in_buffers,
)
from weft.compiler.passes.drop_copies import drop_copies
from weft.compiler.passes.find_marks import Reducible, find_reducible
from weft.compiler.passes.launch_early import launch_early, launches_in
from weft.compiler.passes.verify import verify
from weft.compiler.passes.wait_late import wait_late
from weft.compiler.settings import form_in_force, settings


@dataclass(slots=True)
class Work:
    """One graph under way through the pipeline."""

    graph: fx.Graph
    found: list[Reducible] = field(default_factory=list[Reducible])
    num_buckets: int = 0

    def launches(self) -> list[fx.Node]:
        """The graph's collectives, in order."""
        return launches_in(self.graph)


Pass = Callable[[Work], None]


def _find(work: Work) -> None:
    work.found = find_reducible(work.graph)


def _bucket(work: Work) -> None:
    wanted = FORMS[form_in_force()]
    for found in work.found:
        bucket = wanted if found.wire.is_plain else bucket_in_buffers
        work.num_buckets += bucket(work.graph, found)


def _launch(work: Work) -> None:
    launch_early(work.graph, work.launches())


def _wait(work: Work) -> None:
    wait_late(work.graph, work.launches())


def _drop(work: Work) -> None:
    drop_copies(work.graph, work.launches())


def _verify(work: Work) -> None:
    verify(work.graph, work.found)


FORMS: dict[str, Callable[[fx.Graph, Reducible], int]] = {
    "buffers": bucket_in_buffers,
    "concat": bucket_by_concat,
    "coalesced": bucket_by_coalescing,
}

PASSES: list[tuple[str, Pass]] = [
    ("find_gradients", _find),
    ("bucket_gradients", _bucket),
    ("launch_early", _launch),
    ("wait_late", _wait),
    ("drop_copies", _drop),
    ("verify", _verify),
]


def run_passes(graph: fx.Graph) -> Work:
    """Take a graph through all passes. One without anything of weft stays as it is."""
    work = Work(graph)
    if not calls(graph, MARK, REDUCE):
        return work
    for _, run in PASSES:
        run(work)
    if work.found:
        _count(work.num_buckets)
    return work


def _count(num_buckets: int) -> None:
    """Tell how many buckets the last graph got, under the name that torch's tools look for."""
    from torch._dynamo.utils import counters

    counters["inductor"]["ddp_buckets"] = num_buckets


def fingerprint() -> str:
    """What a graph that has been through here depends on beside itself, for Inductor's cache."""
    sources = sorted(Path(inspect.getfile(run_passes)).parent.rglob("*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources))
    digest.update(repr((form_in_force(), settings.bucket_cap_mb, torch.__version__)).encode())
    return digest.hexdigest()


def name_of(target: Any) -> str:
    """A short name of an op, for people."""
    return str(target).removeprefix("torch.ops.").removesuffix(".default")

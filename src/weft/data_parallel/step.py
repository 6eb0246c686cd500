"""What the reducer remembers of one backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.autograd import traced_inside_only
from weft.data_parallel.buckets import Reduction
from weft.data_parallel.streams import GradStreams


def one_at_a_time(method: Callable[..., None]) -> Callable[..., None]:
    """Run one such method of an object with a `_mutex` at a time: autograd has a thread for each device."""

    @functools.wraps(method)
    @traced_inside_only
    def run(self: Any, **kwargs: Any) -> None:
        with self._mutex:
            method(self, **kwargs)

    return run


class Expectation:
    """What the last forward lets the reducer expect.

    Compiled code reads it, and writes to it and nothing else: Dynamo takes its time for each object.
    """

    def __init__(self) -> None:
        self.is_inside = False  # a forward is under way that a graph has marks of
        self.was_synced = True  # at the last forward: only then buffers may differ between ranks
        self.is_synced = True  # the backward shall reduce
        self.is_asked_for = False  # it shall reduce whatever its forward said
        self.is_open = False  # it is still to come
        self.is_traced = False  # gradients come all at once: their order tells nothing
        self.has_unsynced = False  # gradients of this rank alone wait for the next reduction
        self.has_left = False  # a compiled graph has left gradients to the reducer
        self.graph_backward: int | None = None  # the last one in which a graph has reduced
        self.owner = -1  # what graphs of compiled autograd call the reducer's gradients by
        self.wire = ""

    def is_done_in(self, backward: int | None) -> bool:
        """Whether graphs have reduced all gradients of this backward."""
        return backward is not None and self.graph_backward == backward and not self.has_left


@dataclass(slots=True)
class Step:
    """One backward, from its first sign to its end. Parameters are named by index, buckets by number."""

    end_callback: weakref.ref[Callable[[], None]] | None = None  # held by the backward alone
    number: int | None = None  # of its backward
    has_ended: bool = False
    is_synced: bool = False  # it reduces
    is_unexpected: bool = False  # no forward of the module led to it
    is_done_in_graph: bool = False  # a compiled graph has reduced already
    num_seen: int = 0  # of the arrivals
    counts: list[int] = field(default_factory=list[int])  # how often each parameter came
    remaining: list[int] = field(default_factory=list[int])  # gradients that each bucket waits for
    skipped: set[int] = field(default_factory=set[int])  # not in the graph, so not waited for
    deferred: set[int] = field(default_factory=set[int])  # parameters whose hooks wait for the mean
    # Gradients that were there before and are the user's, by place in each bucket.
    held: list[dict[int, torch.Tensor]] = field(default_factory=list[dict[int, torch.Tensor]])
    roots: list[Any] = field(default_factory=list[Any])  # nodes through which it entered the graph
    num_launched: int = 0
    num_early: int = 0  # buckets launched before the backward ended
    reduction: Reduction | None = None
    streams: GradStreams = field(default_factory=GradStreams)

    def is_reducing(self) -> bool:
        """Whether its backward goes on and its gradients are reduced."""
        return self.is_synced and not self.has_failed()

    def has_failed(self) -> bool:
        """Whether its backward is gone and has left something to be cleared."""
        return self.has_ended or (self.end_callback is not None and self.end_callback() is None)

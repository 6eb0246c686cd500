"""What a rank communicates in a step: how often, with how many ranks, how many bytes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from weft.comm import Event


@dataclass(frozen=True, order=True)
class Traffic:
    """Equal collectives of a step. Bytes are of one rank and of all `count` of them."""

    feature: str  # which part of weft calls: "ddp", "fsdp", "tp", "train"
    op: str
    group_size: int
    count: int
    bytes_in: int  # what the rank gives
    bytes_out: int  # what it gets


def traffic_of(events: Iterable[Event]) -> tuple[Traffic, ...]:
    """The collectives of recorded events, by feature, op and group size."""
    counts: Counter[tuple[str, str, int]] = Counter()
    bytes_in: Counter[tuple[str, str, int]] = Counter()
    bytes_out: Counter[tuple[str, str, int]] = Counter()
    for event in events:
        if event.is_note:
            continue
        key = (event.feature, event.op, event.group_size)
        counts[key] += 1
        bytes_in[key] += event.bytes_in
        bytes_out[key] += event.bytes_out
    return tuple(sorted(Traffic(*key, counts[key], bytes_in[key], bytes_out[key]) for key in counts))

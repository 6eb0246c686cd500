"""A world of N ranks in which this process is rank 0 and the others are imagined."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from weft.errors import StateError
from weft.first_use import register_backend
from weft.launcher.stores import memory_store
from weft.planning.imagined_group import BACKEND, ImaginedGroup, Timeline


@dataclass(frozen=True)
class _World:
    timeline: Timeline
    is_local: bool


# c10d makes groups through a function that it is given once: this is how that one knows for whom.
_entered: list[_World] = []


@contextmanager
def imagined_world(num_ranks: int, timeline: Timeline, *, is_local: bool = False) -> Generator[None]:
    """Be rank 0 of `num_ranks` while the block runs; the timeline hears of their collectives.

    Raises StateError where a world is there already.
    """
    if dist.is_initialized():
        raise StateError(
            "plan: this process is in a process group already, and a plan makes one of its own. Plan in "
            "another process, or before init_process_group."
        )
    register_backend(BACKEND, _make_group)
    _entered.append(_World(timeline, is_local))
    try:
        dist.init_process_group(BACKEND, store=memory_store(), rank=0, world_size=num_ranks)
        try:
            yield
        finally:
            dist.destroy_process_group()
    finally:
        _entered.pop()


def _make_group(options: Any, backend_options: object = None) -> ImaginedGroup:
    world = _entered[-1]
    return ImaginedGroup(
        int(options.group_rank), int(options.group_size), world.timeline, is_local=world.is_local
    )

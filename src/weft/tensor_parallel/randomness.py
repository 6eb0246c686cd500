"""Random numbers where ranks hold different parts of a tensor: each draws its own, and a replay draws the
same.

Ranks of a tensor-parallel group share a seed, so that what is whole on each of them (dropout of a replicated
activation, say) stays equal. Over parts, equal draws would make equal masks. So there each rank draws from a
seed made of the shared generator's state and its own rank: checkpointing, which puts that state back before
it recomputes, gets the same numbers again. The shared generator goes on as if it had been asked once, or not
at all if nothing was drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

_ONE_DRAW = 4  # the least that the count of a device's generator goes on by


@contextmanager
def local_randomness(mesh: DeviceMesh, device: torch.device | str | None = None) -> Generator[None]:
    """Let this rank draw numbers of its own while the block runs: for dropout over a part of a tensor.

    Ranks that are threads of one process share its generator, so that their numbers depend on who comes
    first.

    `device` is whose generator is meant; the mesh's unless given.
    """
    kind = torch.device(mesh.device_type if device is None else device)
    rank = mesh.get_local_rank() if mesh.ndim == 1 else torch.distributed.get_rank()
    with _drawing_apart(rank) if kind.type == "cpu" else _drawing_apart_on(kind, rank):
        yield


@contextmanager
def _drawing_apart(rank: int) -> Generator[None]:
    generator = torch.default_generator
    shared = int(torch.randint(2**62, (), generator=generator, device="cpu"))
    after = generator.get_state()
    generator.manual_seed(_mixed(shared, 0, rank))
    try:
        yield
    finally:
        generator.set_state(after)


@contextmanager
def _drawing_apart_on(device: torch.device, rank: int) -> Generator[None]:
    """The same on a device, whose generator is a seed and a count of draws: nothing is waited for."""
    module: Any = torch.get_device_module(device)
    generator = module.default_generators[torch.empty(0, device=device).device.index]
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.manual_seed(_mixed(seed, offset, rank))
    try:
        yield
    finally:
        generator.manual_seed(seed)
        generator.set_offset(offset + _ONE_DRAW)


def _mixed(seed: int, offset: int, rank: int) -> int:
    digest = hashlib.blake2b(f"{seed} {offset} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # a seed is a signed number

"""The spread collectives, ranks as threads, which read each other's memory in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.testing._internal.common_distributed import spawn_threads_and_init_comms

import weft
from tests.local_bodies import spreads
from weft.local import kernel


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("body", spreads.BODIES)
def test_on_the_local_group(body: Callable[[], None], ranks: int) -> None:
    weft.launch(body, ranks=ranks, kind="thread", backend="weft", timeout=60)


@pytest.mark.parametrize("body", spreads.BODIES)
def test_without_direct_copies(body: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks may not read each other's memory, the packed way stands in."""
    monkeypatch.setenv("WEFT_DIRECT_COPY", "0")
    with spreads.low_bounds():
        weft.launch(body, ranks=2, kind="thread", backend="weft", timeout=60)


@pytest.mark.parametrize("body", spreads.BODIES)
def test_on_the_threads_of_torch(body: Callable[[], None]) -> None:
    """torch's own thread-ranks, a group that is written in Python."""

    @spawn_threads_and_init_comms(world_size=2)
    def run(_: object) -> None:
        body()

    with spreads.low_bounds():
        run(None)


def test_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads need no leave of the kernel to read each other's memory."""
    monkeypatch.setattr(kernel, "_libc", _Refusing(kernel._libc))
    weft.launch(spreads.reduces, ranks=2, kind="thread", backend="weft", timeout=60)
    weft.launch(spreads.gathers, ranks=2, kind="thread", backend="weft", timeout=60)


class _Refusing:
    def __init__(self, library: Any) -> None:
        self._library = library

    def process_vm_readv(self, *_: Any) -> int:
        return -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

"""What orders the streams of a GPU, left out on ranks of nccl: the features' tests of it see that."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import weft
from tests.data_parallel import test_on_gpu as data_parallel
from tests.data_parallel import test_streams as data_parallel_streams
from tests.fully_shard import test_streams as sharded_streams
from tests.join import test_join as joins
from tests.tensor_parallel import test_streams as split_streams
from weft.comm.handle import Handle
from weft.launcher.backends import GPU_EACH
from weft.testing import shared_pool

pytestmark = [pytest.mark.processes, pytest.mark.gpu, pytest.mark.nccl]


@contextmanager
def without_waits() -> Generator[None]:
    """Handles don't order the stream behind their collective."""

    def wait_for_nothing(handle: Any, timeout: float | None) -> None:
        handle._is_waited = True

    with mock.patch.object(Handle, "_wait_for_works", wait_for_nothing):
        yield


@contextmanager
def without(cls: type, method: str, module: str) -> Generator[None]:
    """Calls of the method from this module of weft do nothing."""
    original = getattr(cls, method)

    def call(self: Any, *args: Any) -> Any:
        return None if sys._getframe(1).f_globals["__name__"] == module else original(self, *args)

    with mock.patch.object(cls, method, call):
        yield


def left_out(event: Callable[..., Any], names: tuple[Any, ...], body: Callable[[], None]) -> None:
    with event(*names):
        body()


FORKED = (torch.cuda.Stream, "wait_stream", "weft.data_parallel.arrivals")
HOOKS = (torch.cuda.Stream, "wait_event", "weft.comm_hooks.in_order")
NOTICE = (torch.cuda.Stream, "wait_event", "weft.join.watch")
EVENTS: dict[str, tuple[Any, ...]] = {
    "data parallel waits": (without_waits, (), data_parallel_streams.test_overlap),
    "fully_shard waits": (without_waits, (), sharded_streams.test_overlap),
    "tensor parallel waits": (without_waits, (), split_streams.test_overlap),
    "streams of a bucket": (without, FORKED, data_parallel_streams.test_two_streams_in_a_bucket),
    "hooks in order": (without, HOOKS, data_parallel.test_hooks),
    "join": (without, NOTICE, joins.test_handles_count_the_active_ranks_for_every_stream),
}


@pytest.mark.parametrize("name", list(EVENTS))
def test_an_event_that_is_left_out_is_seen(name: str) -> None:
    """The tests of these bodies would fail: what they prove is not luck."""
    with pytest.raises(weft.LaunchError, match="AssertionError"):
        shared_pool(2).run(left_out, args=EVENTS[name], backend=GPU_EACH, timeout=120, collective_timeout=40)

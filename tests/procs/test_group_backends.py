"""What is behind a group, for those who ask: torch itself, and graphs that want to gather."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from weft.comm.traced import can_gather
from weft.testing.pool import shared_pool

pytestmark = pytest.mark.full

_CPU, _GPU = torch.device("cpu"), torch.device("cuda")


def test_inductor_finds_a_graph_in_its_cache_on_a_machine_with_gpus() -> None:
    shared_pool(2).run(_add_time, backend="weft", timeout=60)


def _add_time() -> None:
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        group = distributed_c10d._get_default_group()
        assert _GPU in group._device_types
        distributed_c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))
        backend = group._get_backend(_GPU)
        assert backend is group
        # Asked before what a group in Python doesn't have is called; Inductor asks for the first.
        asked = ("supports_time_estimate", "supports_splitting", "supports_coalescing", "supports_shrinking")
        assert not any(getattr(backend, name) for name in asked)
    dist.barrier()


def test_where_graphs_can_gather() -> None:
    shared_pool(2).run(_ask_weft, backend="weft", timeout=60)
    shared_pool(2).run(_ask_gloo, backend="gloo", timeout=60)


def _ask_weft() -> None:
    group = distributed_c10d._get_default_group()
    assert can_gather(_CPU, group)
    assert can_gather(_GPU, group)


def _ask_gloo() -> None:
    group = distributed_c10d._get_default_group()
    assert can_gather(_CPU, group)
    assert not can_gather(_GPU, group)

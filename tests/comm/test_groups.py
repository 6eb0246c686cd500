"""What is behind a group, for those who ask: torch itself, and graphs that want to gather."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.ranks import run_on
from weft.comm.traced import can_gather

_CPU, _GPU = torch.device("cpu"), torch.device("cuda")


@run_on(weft=2, timeout=60, full=True)
def test_inductor_finds_a_graph_in_its_cache_on_a_machine_with_gpus() -> None:
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


@run_on(weft=2, timeout=60, full=True)
def test_graphs_can_gather_on_the_local_group() -> None:
    group = distributed_c10d._get_default_group()
    assert can_gather(_CPU, group)
    assert can_gather(_GPU, group)


@run_on(gloo=2, timeout=60, full=True)
def test_graphs_can_gather_on_gloos_devices_alone() -> None:
    group = distributed_c10d._get_default_group()
    assert can_gather(_CPU, group)
    assert not can_gather(_GPU, group)

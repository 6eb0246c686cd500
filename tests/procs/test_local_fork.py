"""A process that was forked from a rank has no part in the rank's groups."""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist

import weft
from weft.testing import on_ranks


@on_ranks(2, kind="process")
def test_a_forked_child_cannot_touch_its_parents_group() -> None:
    if dist.get_rank() == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of forks in a process with threads
            child = os.fork()
        if child == 0:
            try:
                dist.all_reduce(torch.ones(1))
            except weft.StateError:
                dist.destroy_process_group()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]

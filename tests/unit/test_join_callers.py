"""The places in torch by which callers are told apart are where they were."""

from __future__ import annotations

import inspect

from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules import _functions

from weft.comm.door import launch_call
from weft.join import callers


def test_sync_batch_norm_is_in_its_file() -> None:
    assert inspect.getsourcefile(_functions.SyncBatchNorm) == callers._SYNC_BATCH_NORM
    for method in (_functions.SyncBatchNorm.forward, _functions.SyncBatchNorm.backward):
        assert inspect.unwrap(method).__code__.co_filename == callers._SYNC_BATCH_NORM
    assert inspect.getsourcefile(nn.SyncBatchNorm) != callers._SYNC_BATCH_NORM


def test_object_collectives_bear_their_names() -> None:
    for name in callers._OBJECT_CALLS:
        function = inspect.unwrap(getattr(c10d, name))
        assert function.__code__.co_name == name
        assert function.__code__.co_filename == callers._C10D


def test_the_door_has_a_feature() -> None:
    assert "feature" in inspect.signature(launch_call).parameters
    assert launch_call.__code__ is callers._DOOR

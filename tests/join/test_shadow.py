"""Which calls a joined rank can make, and with what; by what the callers of a collective are told apart."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules import _functions

from weft.comm.door import launch_call
from weft.join import callers, shadow
from weft.join.wire import Description, Flag

OPS, DTYPES, REDUCE_OPS = shadow.OPS, shadow._DTYPES, shadow._REDUCE_OPS


def described(op: str, reduce_op: str = "", dtype: torch.dtype = torch.float32, **more: Any) -> Description:
    return Description(OPS.index(op), REDUCE_OPS.index(reduce_op), DTYPES.index(dtype), numel=3, **more)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("name", ["sum", "product", "min", "max", "band", "bor", "bxor"])
def test_neutral_values_change_nothing(name: str, dtype: torch.dtype) -> None:
    value = shadow._neutral(described("all_reduce", name, dtype))
    if value is None:
        assert name == "band"
        assert dtype.is_floating_point
        return
    if name in ("bor", "bxor") and dtype.is_floating_point:
        return  # no backend takes these
    neutral = torch.full((4,), value, dtype=dtype)
    others = torch.tensor([0, 1, 1, 0]) if dtype is torch.bool else torch.tensor([0, 1, 7, 100])
    others = others.to(dtype)
    combine: dict[str, Any] = {
        "sum": torch.add,
        "product": torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }
    assert torch.equal(combine[name](neutral, others), others)


@pytest.mark.parametrize("name", ["avg", "premul_sum"])
def test_a_mean_has_no_neutral_value(name: str) -> None:
    reason = shadow.refusal(described("all_reduce", name), [0])
    assert reason is not None
    assert "Use SUM" in reason


def test_roots() -> None:
    for op in ("broadcast", "scatter"):
        assert shadow.refusal(described(op, root=1), [0, 2]) is None
        reason = shadow.refusal(described(op, root=2), [0, 2])
        assert reason is not None
        assert "rank 2, has joined" in reason
    assert shadow.refusal(described("reduce", "sum", root=2), [0, 2]) is None


def test_gathers_need_leave() -> None:
    for op in ("all_gather", "all_gather_into_tensor"):
        assert "shadowed()" in (shadow.refusal(described(op), [0]) or "")
        assert shadow.refusal(described(op, flags=int(Flag.ZEROS)), [0]) is None


@pytest.mark.parametrize("flag", [Flag.OPAQUE, Flag.OBJECTS, Flag.FOREIGN, Flag.NESTED])
def test_flags_refuse(flag: Flag) -> None:
    assert shadow.refusal(replace(described("all_reduce", "sum"), flags=int(flag)), [0])


def test_every_op_has_an_answer() -> None:
    for op in OPS:
        description = described(op, "sum", flags=int(Flag.ZEROS))
        assert shadow.words(description)
        shadow.refusal(description, [0])


def test_the_methods_are_those_of_process_groups() -> None:
    """What c10d calls on a group to make a collective, in the torch that is installed."""
    public = {
        name
        for name in vars(dist.ProcessGroup)
        if any(
            word in name
            for word in ("reduce", "gather", "scatter", "broadcast", "alltoall", "all_to_all", "barrier")
        )
        and not name.startswith("__")
    }
    assert public <= set(shadow.METHODS)


# The places in torch by which callers are told apart are where they were.


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

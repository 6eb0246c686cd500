"""Which calls a joined rank can make, and with what; what says whose a collective is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules._functions import SyncBatchNorm

import weft
from weft.comm.call import door_feature
from weft.comm.door import launch_call
from weft.join import shadow, watch
from weft.join.wire import CallDescription, Flag

OPS, DTYPES, REDUCE_OPS = shadow.OPS, shadow._DTYPES, shadow._REDUCE_OPS


def described(
    op: str, reduce_op: str = "", dtype: torch.dtype = torch.float32, **more: Any
) -> CallDescription:
    return CallDescription(OPS.index(op), REDUCE_OPS.index(reduce_op), DTYPES.index(dtype), numel=3, **more)


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
    reason = shadow.refusal_reason(described("all_reduce", name), [0])
    assert reason is not None
    assert "Use SUM" in reason


def test_roots() -> None:
    for op in ("broadcast", "scatter"):
        assert shadow.refusal_reason(described(op, root=1), [0, 2]) is None
        reason = shadow.refusal_reason(described(op, root=2), [0, 2])
        assert reason is not None
        assert "rank 2, has joined" in reason
    assert shadow.refusal_reason(described("reduce", "sum", root=2), [0, 2]) is None


def test_gathers_need_leave() -> None:
    for op in ("all_gather", "all_gather_into_tensor"):
        assert "shadowed()" in (shadow.refusal_reason(described(op), [0]) or "")
        assert shadow.refusal_reason(described(op, flags=int(Flag.ZEROS)), [0]) is None


@pytest.mark.parametrize("flag", [Flag.OPAQUE, Flag.OBJECTS, Flag.FOREIGN, Flag.NESTED])
def test_flags_refuse(flag: Flag) -> None:
    assert shadow.refusal_reason(replace(described("all_reduce", "sum"), flags=int(flag)), [0])


def test_every_op_has_an_answer() -> None:
    for op in OPS:
        description = described(op, "sum", flags=int(Flag.ZEROS))
        assert shadow.format_call(description)
        shadow.refusal_reason(description, [0])


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


# What says whose a call is, in the torch that is installed.


def test_object_collectives_bear_their_names() -> None:
    for name in watch.OBJECT_CALLS:
        assert getattr(dist, name) is getattr(c10d, name)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_autograd_calls_what_stands_in_for_sync_batch_norm(name: str) -> None:
    """Methods of a Function are looked up when they are called, so one that is replaced is called."""
    assert isinstance(vars(SyncBatchNorm)[name], staticmethod)
    called: list[str] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return 2 * grad

    original = getattr(Twice, name)

    def replaced(*args: Any) -> Any:
        called.append(name)
        return original(*args)

    setattr(Twice, name, staticmethod(replaced))
    Twice.apply(torch.ones(1, requires_grad=True)).backward()
    assert called == [name]


def test_the_door_says_the_feature() -> None:
    seen: list[str | None] = []

    def body() -> None:
        start = lambda: seen.append(door_feature.get())  # noqa: E731
        launch_call("barrier", dist.group.WORLD, "ddp", start, None, (), ())  # type: ignore[arg-type]
        assert door_feature.get() is None

    weft.launch(body, ranks=1, kind="thread")
    assert seen == ["ddp"]

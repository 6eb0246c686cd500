"""Calls that a joined rank makes for collectives that no hook knows.

An active rank describes what it is about to call (`describe_call`), a joined rank makes
the same call with values that leave the result alone (`shadow_call`): zeros in a sum,
the lowest number in a maximum. Where there are no such values every rank finds the same
`refusal`, from the same description, and nothing moves.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.group import state_of
from weft.comm.names import all_gather_single, op_name, reduce_scatter_single
from weft.join.wire import CallDescription, Flag

# The methods of a process group by which c10d makes collectives, old and new names, and what we call them.
METHODS: dict[str, str] = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "gather": "gather",
    "gather_single": "gather",
    "gather_into_tensor": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
}
OPS = tuple(sorted({*METHODS.values(), "Join"}))
_REDUCE_OPS = ("", "sum", "product", "min", "max", "band", "bor", "bxor", "avg", "premul_sum")
_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "npu")
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64),
)
_WITH_NEUTRAL_VALUES = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
_GATHERS = ("all_gather", "all_gather_into_tensor")
_FROM_A_ROOT = ("broadcast", "scatter")


def group_number(group: dist.ProcessGroup) -> int:
    """The group's name as a number, the same on all of its ranks."""
    return zlib.crc32(group.group_name.encode())


def describe_call(method: str, group: dist.ProcessGroup, args: Sequence[Any], flags: int) -> CallDescription:
    """Describe a call of a process group's method, as c10d makes it; OPAQUE where its form is another."""
    op = METHODS[method]
    number = group_number(group)
    opaque = CallDescription(OPS.index(op), group=number, flags=flags | Flag.OPAQUE)
    if op == "barrier":
        return CallDescription(OPS.index(op), group=number, flags=flags)
    try:
        tensor = _tensor_of(op, args)
        options = args[-1]
        reduce_op = op_name(options.reduceOp) if op in _WITH_NEUTRAL_VALUES else ""
        is_rooted = op in (*_FROM_A_ROOT, "reduce")
        root = dist.get_global_rank(group, options.rootRank) if is_rooted else -1
        return CallDescription(
            OPS.index(op),
            _REDUCE_OPS.index(reduce_op),
            _DTYPES.index(tensor.dtype),
            _DEVICES.index(tensor.device.type),
            root,
            number,
            flags if tensor.layout is torch.strided else flags | Flag.OPAQUE,
            tensor.numel(),
        )
    except (LookupError, TypeError, ValueError, AttributeError):
        return opaque


def _tensor_of(op: str, args: Sequence[Any]) -> torch.Tensor:
    """The tensor whose size determines all others."""
    if op in ("all_reduce", "reduce", "broadcast", "scatter"):
        (tensor,) = args[0]
    elif op == "all_gather":
        (tensor,) = args[1]
    elif op == "all_gather_into_tensor":
        tensor = args[1]
    elif op == "reduce_scatter":
        (tensor,) = args[0]
        if any(part.numel() != tensor.numel() for part in args[1][0]):
            raise ValueError("parts of different sizes")
    elif op == "reduce_scatter_tensor":
        tensor = args[1]
    else:
        raise ValueError(f"no description for {op}")
    return tensor


def refusal_reason(description: CallDescription, joined: Sequence[int]) -> str | None:
    """Why joined ranks (of the world) can't make the call, and what to do; None if they can."""
    op, flags = OPS[description.op], description.flags
    if flags & Flag.NESTED:
        return "A Join inside a Join can't be entered once a rank has left the outer one's loop."
    if flags & Flag.FOREIGN:
        return "It belongs to a part of weft that this Join was not given. Put that object into Join's list."
    if flags & Flag.OBJECTS:
        return "A joined rank has no object to give. Move it out of the loop."
    if flags & Flag.OPAQUE:
        return f"This form of {op} has no stand-in. {_ADVICE}"
    if op in _FROM_A_ROOT and description.root in joined:
        return f"Its root, rank {description.root}, has joined and has nothing to give. {_ADVICE}"
    if op in _GATHERS and not flags & Flag.ZEROS:
        return (
            "There is nothing that a joined rank could give to a gather without being seen. If zeros are "
            "right there, call it inside `with weft.join.shadowed():`; otherwise move it out of the loop."
        )
    if op in _WITH_NEUTRAL_VALUES and _neutral(description) is None:
        name = _REDUCE_OPS[description.reduce_op]
        return (
            f"No value is neutral in reduce op '{name}' of {_DTYPES[description.dtype]}. Use SUM, and divide."
        )
    if op not in (*_WITH_NEUTRAL_VALUES, *_GATHERS, *_FROM_A_ROOT, "barrier"):
        return f"Joined ranks can't stand in for {op}. {_ADVICE}"
    return None


_ADVICE = "Move it out of the loop, or make the object that calls it a Joinable with a hook of its own."


def format_call(description: CallDescription) -> str:
    """The call as a line of code."""
    op = OPS[description.op]
    if op in ("barrier", "Join") or description.flags & Flag.OPAQUE:
        return op
    dtype = str(_DTYPES[description.dtype]).removeprefix("torch.")
    parts = [f"{description.numel} of {dtype}", _REDUCE_OPS[description.reduce_op]]
    if description.root >= 0:
        parts.append(f"root {description.root}")
    return f"{op}({', '.join(part for part in parts if part)})"


def _neutral(description: CallDescription) -> float | int | bool | None:
    """What changes nothing when it is reduced with anything."""
    dtype, name = _DTYPES[description.dtype], _REDUCE_OPS[description.reduce_op]
    if name in ("sum", "bor", "bxor"):
        return 0
    if name == "product":
        return 1
    if name not in ("max", "min", "band") or dtype.is_complex:
        return None
    if name == "band":
        return None if dtype.is_floating_point else (True if dtype is torch.bool else -1)
    if dtype is torch.bool:
        return name == "min"
    if dtype.is_floating_point:
        return float("-inf") if name == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return limits.min if name == "max" else limits.max


def shadow_call(description: CallDescription, group: dist.ProcessGroup, join_device: torch.device) -> None:
    """Make the described call with neutral values, and wait for it. The result is nobody's."""
    op, root = OPS[description.op], description.root
    size, numel = group.size(), description.numel
    kind, dtype = _DEVICES[description.device], _DTYPES[description.dtype]
    device = join_device if join_device.type == kind else torch.device(kind)
    value = (_neutral(description) or 0) if op in _WITH_NEUTRAL_VALUES else 0
    reduce_op: Any = getattr(dist.ReduceOp, _REDUCE_OPS[description.reduce_op].upper(), None)

    def filled(numel: int) -> torch.Tensor:
        return torch.full((numel,), value, dtype=dtype, device=device)

    def parts() -> list[torch.Tensor]:
        return [filled(numel) for _ in range(size)]

    # Not through the door, through which the active ranks' call may not have come either: the door
    # counts calls, and its counts must stay equal on all ranks.
    if description.flags & Flag.DOOR:
        next(state_of(group).numbers)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(filled(numel), reduce_op, group),
        "reduce": lambda: dist.reduce(filled(numel), root, reduce_op, group),
        "reduce_scatter": lambda: dist.reduce_scatter(filled(numel), parts(), reduce_op, group),
        "reduce_scatter_tensor": lambda: reduce_scatter_single(
            filled(numel // size), filled(numel), reduce_op, group
        ).wait(),
        "broadcast": lambda: dist.broadcast(filled(numel), root, group),
        "scatter": lambda: dist.scatter(filled(numel), None, root, group),
        "all_gather": lambda: dist.all_gather(parts(), filled(numel), group),
        "all_gather_into_tensor": lambda: all_gather_single(
            filled(size * numel), filled(numel), group
        ).wait(),
        "barrier": lambda: dist.barrier(group),
    }
    calls[op]()

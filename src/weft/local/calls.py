"""The collectives that the local group knows, as numbers on the board, and in words."""

from __future__ import annotations

from enum import IntEnum, auto

import torch

from weft.local.board import Signature


class Op(IntEnum):
    """A collective."""

    BARRIER = auto()
    ALL_REDUCE = auto()
    REDUCE = auto()
    REDUCE_SCATTER = auto()
    ALL_GATHER = auto()
    GATHER = auto()
    BROADCAST = auto()
    SCATTER = auto()
    ALL_TO_ALL = auto()
    ALL_REDUCE_SPARSE = auto()
    SEND = auto()
    RECV = auto()
    EXCHANGE_ROWS = auto()
    ALL_GATHER_SPREAD = auto()
    REDUCE_SCATTER_SPREAD = auto()


_DTYPES: tuple[torch.dtype, ...] = tuple(
    sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
)
_DTYPE_NUMBER = {dtype: number for number, dtype in enumerate(_DTYPES, start=1)}


_DEVICES = ("cpu", "cuda", "a shared GPU")
_NUMBERS_A_DEVICE = 1024


def dtype_number(dtype: torch.dtype, device_number: int = 0) -> int:
    """Dtype and kind of device as a number that is equal on every rank (they run the same torch)."""
    return _DTYPE_NUMBER[dtype] + device_number * _NUMBERS_A_DEVICE


def describe(signature: Signature, reduce_names: dict[int, str]) -> str:
    """A call in words, for an error."""
    parts: list[str] = []
    if signature.reduce_op:
        parts.append(reduce_names.get(signature.reduce_op, "?"))
    if signature.numel >= 0 and signature.dtype:
        parts.append(f"{signature.numel} elements")
    if signature.dtype:
        device, dtype = divmod(signature.dtype, _NUMBERS_A_DEVICE)
        parts.append(f"{str(_DTYPES[dtype - 1]).removeprefix('torch.')} on {_DEVICES[device]}")
    if signature.root >= 0:
        parts.append(f"root {signature.root}")
    return f"{Op(signature.op).name.lower()}({', '.join(parts)}), call {signature.number}"

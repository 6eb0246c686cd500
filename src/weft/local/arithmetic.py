"""How tensors of several ranks become one. Pure: an operator and a dtype in, a Fold out.

Ranks are folded in rank order, so the result has the same bits on every rank,
whatever the size of the tensor and whichever rank computed it. 8- and 16-bit
floats are summed in float32 where rounding at each rank would show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch
from torch.distributed import ReduceOp

from weft.errors import ConfigError

_BITWISE = ("BAND", "BOR", "BXOR")
_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_TOP_BIT = -(2**63)
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64}
REDUCE_NUMBER = {name: number for number, name in enumerate(_COMBINE, start=1)}
REDUCE_NAME = {number: name for name, number in REDUCE_NUMBER.items()}


def _minimum_of_uint64(one: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    signed, other_signed = one.view(torch.int64), other.view(torch.int64)
    # With the top bit flipped, signed numbers are ordered as the unsigned ones are.
    is_less = (signed ^ _TOP_BIT) < (other_signed ^ _TOP_BIT)
    torch.where(is_less, signed, other_signed, out=out.view(torch.int64))
    return out


def _maximum_of_uint64(one: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    signed, other_signed = one.view(torch.int64), other.view(torch.int64)
    is_less = (signed ^ _TOP_BIT) < (other_signed ^ _TOP_BIT)
    torch.where(is_less, other_signed, signed, out=out.view(torch.int64))
    return out


_UINT64_ORDER: dict[str, Callable[..., torch.Tensor]] = {"MIN": _minimum_of_uint64, "MAX": _maximum_of_uint64}


@dataclass(frozen=True, slots=True)
class Fold:
    """One reduction: what combines two tensors, in which dtype, and what ends it."""

    name: str
    combine: Callable[..., torch.Tensor]
    dtype: torch.dtype  # of the tensors
    wide_dtype: torch.dtype  # of the running result
    divisor: int  # 1 for all but AVG
    is_scaled: bool  # each rank's tensor is multiplied by that rank's factor

    @property
    def is_plain(self) -> bool:
        """Whether two tensors can be combined in place with nothing before or after."""
        return self.wide_dtype is self.dtype and self.divisor == 1 and not self.is_scaled

    def start(self, first: torch.Tensor, factor: float, accumulator: torch.Tensor) -> torch.Tensor:
        """The running result after the first rank, in `accumulator` (of wide_dtype)."""
        accumulator.copy_(first)
        return accumulator.mul_(factor) if self.is_scaled else accumulator

    def add(self, accumulator: torch.Tensor, other: torch.Tensor, factor: float) -> None:
        """Fold another rank's tensor in."""
        if other.dtype is not accumulator.dtype:
            other = other.to(accumulator.dtype)
        if self.is_scaled:
            torch.add(accumulator, other, alpha=factor, out=accumulator)
        else:
            self.combine(accumulator, other, out=accumulator)

    def finish(self, accumulator: torch.Tensor) -> None:
        """End the running result: the division of an average."""
        if self.divisor != 1:
            if accumulator.is_floating_point() or accumulator.is_complex():
                if self.divisor & (self.divisor - 1) == 0:
                    accumulator.mul_(1 / self.divisor)  # the same bits, in half the time
                else:
                    accumulator.div_(self.divisor)
            else:
                accumulator.div_(self.divisor, rounding_mode="trunc")


@lru_cache(maxsize=256)
def plan_fold(name: str, dtype: torch.dtype, size: int) -> Fold:
    """The fold of a reduce operator over tensors of `dtype` from `size` ranks.

    Raises ConfigError for pairs that have no meaning, such as BAND of floats.
    """
    is_number_like = dtype.is_floating_point or dtype.is_complex
    if name in _BITWISE and is_number_like:
        raise ConfigError(f"reduce op {name} needs integers or booleans, got {_words(dtype)}.")
    if name in ("MIN", "MAX") and dtype.is_complex:
        raise ConfigError(f"reduce op {name} has no meaning for {_words(dtype)}: it has no order.")
    if name == "AVG" and dtype is torch.bool:
        raise ConfigError("reduce op AVG has no meaning for bool; reduce uint8 or float instead.")
    if name == "PREMUL_SUM" and not is_number_like:
        raise ConfigError(f"reduce op PREMUL_SUM needs floats or complex numbers, got {_words(dtype)}.")
    if dtype is torch.uint64 and name == "AVG":
        raise ConfigError("reduce op AVG can't be computed for uint64: torch has no division for it.")
    return Fold(
        name=name,
        combine=_UINT64_ORDER[name] if dtype is torch.uint64 and name in _UINT64_ORDER else _COMBINE[name],
        dtype=dtype,
        wide_dtype=_wide_dtype(name, dtype, size),
        divisor=size if name == "AVG" else 1,
        is_scaled=name == "PREMUL_SUM",
    )


def with_arithmetic(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor, or its memory as another dtype that torch can compute `name` in.

    torch has no arithmetic for wide unsigned integers. Sums, products and bit
    operations have the same bits signed; the others are widened, see `_wide_dtype`.
    """
    signed = _SIGNED.get(tensor.dtype)
    if signed is None or name not in ("SUM", "PRODUCT", *_BITWISE):
        return tensor
    return tensor.view(signed)


def _wide_dtype(name: str, dtype: torch.dtype, size: int) -> torch.dtype:
    if dtype in _WIDER:
        return _WIDER[dtype]
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.float32  # torch has no arithmetic in 8-bit floats
    if dtype in (torch.float16, torch.bfloat16) and name in ("SUM", "AVG", "PREMUL_SUM", "PRODUCT"):
        # Two ranks' sum is rounded once either way; an average must not overflow on the way.
        return dtype if size <= 2 and name in ("SUM", "PRODUCT") else torch.float32
    if name == "AVG" and dtype in (torch.int8, torch.int16, torch.int32, torch.uint8):
        return torch.int64
    if dtype is torch.complex32:
        return torch.complex64
    return dtype


_NAME_OF_KIND: dict[object, str] = {getattr(ReduceOp.RedOpType, name): name for name in _COMBINE}


def resolve_reduce_op(op: object) -> tuple[str, float]:
    """The name of a c10d reduce op, and its factor (PREMUL_SUM's; 1 otherwise)."""
    kind, factor = op, None
    # ReduceOp.SUM is a kind and no ReduceOp, though isinstance says otherwise.
    if type(op) is ReduceOp:
        # __getstate__ is the one form of a ReduceOp's parts that torch 2.11 to 2.13 share.
        kind, factor = cast("tuple[object, object]", op.__getstate__())
    name = _NAME_OF_KIND.get(kind)
    if name is None:
        raise ConfigError(f"unknown reduce op {op!r}; the local group has {', '.join(_COMBINE)}.")
    if factor is None:
        return name, 1.0
    if isinstance(factor, torch.Tensor):
        if factor.numel() != 1:
            raise ConfigError(
                f"PREMUL_SUM: the factor must be a number or a tensor of one element, got shape "
                f"{tuple(factor.shape)}."
            )
        factor = factor.item()
    return name, float(cast("float", factor))


def _words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""What ranks put into collectives, and what one process computes from it by hand.

Inputs are small whole numbers, which every dtype holds exactly and whose sum over
four ranks it holds too: so results are compared bit by bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

# Around every threshold that a transport may have, and odd ones.
SIZES = [0, 1, 7, 1000, 8191, 8192, 8193, 20000, 300001]
LARGE = 1 << 20
SOME_SIZES = [0, 1, 7, 8193, 300001]

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
FLOATS_OF_8_BITS = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *FLOATS_OF_8_BITS, *INTEGERS, *COMPLEX, torch.bool]
GLOO_DTYPES = [*FLOATS, torch.uint8, torch.int8, torch.int32, torch.int64]

# torch 2.13 renamed them, and warns about the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
functional_all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor

Shape = int | Sequence[int]
Op = dist.ReduceOp.RedOpType
SUM, PRODUCT, MIN, MAX = dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX
BAND, BOR, BXOR = dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR
BITWISE = [BAND, BOR, BXOR]


def sizes() -> list[int]:
    """Sizes to try; the largest only where few ranks share the cores."""
    return [*SIZES, LARGE] if num_ranks() == 2 else SIZES


def dtypes() -> list[torch.dtype]:
    """The dtypes that the default group's backend has to reduce."""
    return GLOO_DTYPES if dist.get_backend() == "gloo" else DTYPES


def ops_of(dtype: torch.dtype) -> list[Op]:
    """The reductions that mean something for a dtype, AVG aside."""
    if dtype in COMPLEX:
        return [SUM]
    if dtype in (*FLOATS, *FLOATS_OF_8_BITS):
        return [SUM, PRODUCT, MIN, MAX]
    return [SUM, PRODUCT, MIN, MAX, *BITWISE]


def sample(rank: int, shape: Shape, dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    """What a rank gives: 0, 1 or 2 everywhere, the same whenever asked."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    generator = torch.Generator().manual_seed(100 * salt + rank)
    whole = torch.randint(0, 3, shape, generator=generator, dtype=torch.int64)
    if dtype in COMPLEX:
        return torch.complex(whole.double(), 2.0 - whole.double()).to(dtype)
    return whole.to(dtype)


def samples(shape: Shape, dtype: torch.dtype = torch.float32, salt: int = 0) -> list[torch.Tensor]:
    """What all ranks of the default group give."""
    return [sample(rank, shape, dtype, salt) for rank in range(dist.get_world_size())]


def reduced(tensors: Sequence[torch.Tensor], op: Op = SUM) -> torch.Tensor:
    """The reduction, computed in a dtype that is wide enough for it."""
    dtype = tensors[0].dtype
    if dtype == torch.bool:
        return _reduced_bool(tensors, op)
    wide_dtype = torch.complex128 if dtype in COMPLEX else torch.int64
    wide = [tensor.to(wide_dtype) for tensor in tensors]
    return functools.reduce(_STEPS[op], wide).to(dtype)


def _reduced_bool(tensors: Sequence[torch.Tensor], op: Op) -> torch.Tensor:
    if op in (SUM, MAX, BOR):
        return functools.reduce(torch.logical_or, tensors)
    if op in (PRODUCT, MIN, BAND):
        return functools.reduce(torch.logical_and, tensors)
    return functools.reduce(torch.logical_xor, tensors)


_STEPS: dict[Op, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    SUM: torch.add,
    PRODUCT: torch.mul,
    MIN: torch.minimum,
    MAX: torch.maximum,
    BAND: torch.bitwise_and,
    BOR: torch.bitwise_or,
    BXOR: torch.bitwise_xor,
}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bytes, in logical order."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def assert_same(got: torch.Tensor, want: torch.Tensor, what: object = "") -> None:
    """Fail unless shape, dtype and every bit are the same."""
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    if torch.equal(as_bytes(got), as_bytes(want)):
        return
    differ = (as_bytes(got) != as_bytes(want)).reshape(math.prod(got.shape), -1).any(dim=1)
    first = int(differ.nonzero()[0])
    got_first, want_first = got.reshape(-1)[first].item(), want.reshape(-1)[first].item()
    raise AssertionError(
        f"{what}: {int(differ.sum())} of {got.numel()} elements of {tuple(got.shape)} {got.dtype} differ, "
        f"the first at {first}: {got_first}, want {want_first}"
    )


def finish(work: dist.Work | None) -> None:
    """Wait for what async_op=True gave; without it there is nothing to wait for."""
    if work is not None:
        work.wait()


def me() -> int:
    return dist.get_rank()


def num_ranks() -> int:
    return dist.get_world_size()


def assert_still_usable() -> None:
    """Fail unless the default group still reduces, small and large."""
    for numel in (3, 100_003):
        tensor = sample(me(), numel)
        dist.all_reduce(tensor)
        assert_same(tensor, reduced(samples(numel)), "all_reduce after what was tested")

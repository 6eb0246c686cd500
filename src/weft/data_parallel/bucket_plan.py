"""Assign parameters to gradient buckets. Pure: sizes and an order in, a plan out.

Invariant: every rank makes the same plan from the same specs and order, every parameter is in exactly one
bucket, and buckets stand in the order in which they fill when gradients arrive in the planned order. They
are started in that order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from weft.errors import ConfigError
from weft.tensors import dense_strides

MB = 1024 * 1024
DEFAULT_CAP_MB = 25
FIRST_CAP_BYTES = MB  # small, so that the first reduction starts early in the backward


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter as the plan sees it."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # of its gradient in the bucket
    dtype: torch.dtype
    device: torch.device
    is_sparse: bool = False  # its gradients are
    is_delayed: bool = False  # its reduction goes after all others
    piece: str = ""  # which shard of what, where the parameter is a DTensor: the spec is of its local tensor

    @property
    def numel(self) -> int:
        """Elements of its gradient."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of its gradient."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BucketCaps:
    """Sizes of buckets. The first parameter that doesn't fit may still close a bucket."""

    first_bytes: int = FIRST_CAP_BYTES
    rest_bytes: int = DEFAULT_CAP_MB * MB
    each_bytes: tuple[int, ...] = ()  # bucket_cap_mb_list: of the first buckets, one by one

    def of(self, bucket: int) -> int:
        """The cap of the bucket with this index."""
        if bucket < len(self.each_bytes):
            return self.each_bytes[bucket]
        return self.first_bytes if bucket == 0 and not self.each_bytes else self.rest_bytes


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket: its parameters and their offsets."""

    params: tuple[int, ...]  # indices into the specs
    offsets: tuple[int, ...]  # of each in the flat buffer
    numel: int
    dtype: torch.dtype
    device: torch.device
    is_sparse: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradients."""
        return self.numel * self.dtype.itemsize


@dataclass(slots=True)
class _OpenBucket:
    params: list[int] = field(default_factory=list[int])
    num_bytes: int = 0


def param_spec(
    name: str, param: torch.Tensor, *, is_sparse: bool = False, is_delayed: bool = False, piece: str = ""
) -> ParamSpec:
    """The spec of this parameter, or of the local tensor of one."""
    shape = tuple(param.shape)
    strides = shape and dense_strides(shape, param.stride())
    return ParamSpec(name, shape, strides, param.dtype, param.device, is_sparse, is_delayed, piece)


def resolve_caps(cap_mb: float | None, cap_mb_list: Sequence[float] | None) -> BucketCaps:
    """The caps that the user's arguments mean."""
    for cap in (*([cap_mb] if cap_mb is not None else []), *(cap_mb_list or ())):
        if isinstance(cap, bool) or not isinstance(cap, int | float) or not cap >= 0:  # type: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"bucket_cap_mb must be a number of megabytes, it is {cap!r}.")
    each = tuple(_in_bytes(cap) for cap in cap_mb_list or ())
    if cap_mb is None:
        return BucketCaps(each_bytes=each)
    # A cap that the user gives holds for the first bucket too, as in torch.
    return BucketCaps(_in_bytes(cap_mb), _in_bytes(cap_mb), each)


def _in_bytes(cap_mb: float) -> int:
    return int(min(cap_mb * MB, 2**62))


def plan_buckets(
    specs: Sequence[ParamSpec], order: Sequence[int], caps: BucketCaps, *, is_greedy: bool = False
) -> tuple[BucketPlan, ...]:
    """Fill buckets up to the caps in this order: one dtype and device each, sparse ones alone.

    Parameters of several dtypes fill several buckets side by side. A bucket is closed before it
    would exceed its cap, unless it is not half full: small collectives are latency-bound. It is closed as
    well behind a parameter of more than half its cap: waiting for small ones would hold back a large
    gradient's memory and its reduction. `is_greedy` fills each bucket until its cap is reached: in a
    compiled graph buckets cost no memory of their own.
    """
    if sorted(order) != list(range(len(specs))):
        raise ConfigError(
            f"plan_buckets: the order must name each of the {len(specs)} parameters once: {order}"
        )
    closed: list[list[int]] = []
    open_: dict[tuple[torch.dtype, torch.device, bool], _OpenBucket] = {}
    place = {index: at for at, index in enumerate(order)}
    for index in sorted(order, key=lambda index: (specs[index].is_delayed, place[index])):
        spec = specs[index]
        if spec.is_sparse:
            closed.append([index])
            continue
        key = (spec.dtype, spec.device, spec.is_delayed)
        bucket = open_.setdefault(key, _OpenBucket())
        cap = caps.of(len(closed))
        is_full = 2 * bucket.num_bytes >= cap < bucket.num_bytes + spec.num_bytes
        if is_full and bucket.params and not is_greedy:
            closed.append(bucket.params)
            bucket = open_[key] = _OpenBucket()
            cap = caps.of(len(closed))
        bucket.params.append(index)
        bucket.num_bytes += spec.num_bytes
        if bucket.num_bytes >= cap or (2 * spec.num_bytes > cap and not is_greedy):
            closed.append(open_.pop(key).params)
    closed += [bucket.params for bucket in open_.values()]
    # A bucket starts at its last gradient.
    closed.sort(key=lambda params: max((specs[index].is_delayed, place[index]) for index in params))
    return tuple(_lay_out(specs, params) for params in closed)


def follows(plan: Sequence[BucketPlan], order: Sequence[int]) -> bool:
    """Whether buckets fill about as early as they can when gradients arrive in this order."""
    place = {index: at for at, index in enumerate(order)}
    slack = max(4, len(order) // 20)
    num_before = 0
    for bucket in plan:
        num_before += len(bucket.params)
        if max(place[index] for index in bucket.params) >= num_before + slack:
            return False
    return True


def _lay_out(specs: Sequence[ParamSpec], params: list[int]) -> BucketPlan:
    offsets: list[int] = []
    numel = 0
    for index in params:
        offsets.append(numel)
        numel += specs[index].numel
    first = specs[params[0]]
    return BucketPlan(tuple(params), tuple(offsets), numel, first.dtype, first.device, first.is_sparse)

"""Mixed precision for DDP: parameters in one dtype, forward and backward in another.

While the module runs, its parameters are replaced by casts of them to the low dtype, which autograd
records. So gradients arrive in the parameters' dtype, and the optimizer never sees the low one. A submodule
that runs on its own, as when checkpointing recomputes it in backward, has its parameters replaced for that
time.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft import comm
from weft.comm_hooks.bucket import GradBucket
from weft.comm_hooks.in_order import launch_in_order
from weft.comm_hooks.mean import FEATURE, is_lossy_safe
from weft.data_parallel.reducer import Reducer


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """The dtypes of parameters in forward, of the reduction, and of buffers; None: unchanged."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


class CastParameters:
    """Replaces the parameters of a module by casts of them while it, or a module in it, runs."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None, ignored: Collection[str]) -> None:
        self._dtype = dtype
        self._depth = 0
        self._replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        names = {id(param): name for name, param in module.named_parameters()}
        self._slots = {
            child: [
                (owner._parameters, name, param)
                for owner in child.modules()
                for name, param in owner._parameters.items()
                if param is not None and names.get(id(param)) not in ignored
            ]
            for child in module.modules()
        }
        for child in self._slots if dtype is not None else ():
            child.register_forward_pre_hook(_Enter(weakref.ref(self)))
            child.register_forward_hook(_Leave(weakref.ref(self)), always_call=True)

    @contextmanager
    def running(self) -> Generator[None]:
        """Restore the parameters at the end of the module's forward, whatever ends it."""
        try:
            yield
        finally:
            self._restore()

    def enter(self, module: nn.Module) -> None:
        """A module begins to run. Inside of another that runs, its parameters are replaced already."""
        self._depth += 1
        if self._depth > 1:
            return
        low: dict[int, torch.Tensor] = {}
        for owner, name, param in self._slots.get(module, ()):
            if id(param) not in low:
                low[id(param)] = cast_floating(param, self._dtype)
            owner[name] = low[id(param)]  # type: ignore[assignment]
            self._replaced.append((owner, name, param))

    def leave(self) -> None:
        """A module has run."""
        self._depth -= 1
        if self._depth == 0:
            self._restore()

    def _restore(self) -> None:
        self._depth = 0
        for owner, name, param in self._replaced:
            owner[name] = param
        self._replaced = []


class _Hook:
    """A hook that does nothing once its `CastParameters` is gone, and in a copy of the module."""

    def __init__(self, cast_params: weakref.ref[CastParameters] | None = None) -> None:
        self.cast_params = cast_params

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()

    def find(self) -> CastParameters | None:
        """The `CastParameters`, if it lives."""
        return None if self.cast_params is None else self.cast_params()


class _Enter(_Hook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        cast_params = self.find()
        if cast_params is not None:
            cast_params.enter(module)


class _Leave(_Hook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        cast_params = self.find()
        if cast_params is not None:
            cast_params.leave()


def install_mixed_precision(
    module: nn.Module, precision: Any, ignored: Collection[str], reducer: Reducer
) -> CastParameters:
    """Run the module in this precision as long as the result lives. Ignored tensors stay as they are."""
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and (f"{prefix}.{name}" if prefix else name) not in ignored:
                child._buffers[name] = cast_floating(buffer, precision.buffer_dtype)
    reduce_dtype = precision.reduce_dtype or precision.param_dtype
    if reduce_dtype is not None and reducer.group.size() > 1:
        reducer.set_hook(_reduce_in_dtype, (reduce_dtype, weakref.ref(reducer)))
    return CastParameters(module, precision.param_dtype, ignored)


def _reduce_in_dtype(state: Any, bucket: GradBucket) -> Any:
    """The mean, computed in a dtype of its own."""
    dtype, reducer = state[0], state[1]()
    group, divisor = reducer.group, reducer.find_divisor()  # both may have changed
    buffer = bucket.buffer()
    low = buffer / divisor if not is_lossy_safe(buffer) else buffer.to(dtype).div_(divisor)
    return launch_in_order(
        group, low, lambda: comm.all_reduce(low, group=group, feature=FEATURE, label=bucket.label)
    )


def cast_floating(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A floating tensor in this dtype; any other, and where dtype is None, as it is."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

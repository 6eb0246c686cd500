"""Mixed precision for DDP: forward and backward in one dtype, parameters and their gradients in another.

While the module runs, its parameters are exchanged for copies in the low dtype, made by a cast that
autograd knows. So gradients arrive in the parameters' dtype, and the optimizer never sees the low one.
A submodule that runs on its own, as when checkpointing recomputes it in backward, is exchanged for
that time.
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
    """The dtypes of parameters in forward, of the reduction, and of buffers; None leaves each as it is."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None


class ParameterExchange:
    """Exchanges the parameters of a module, and of those below it, while one of them runs."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None, ignored: Collection[str]) -> None:
        self._dtype = dtype
        self._depth = 0
        self._exchanged: list[tuple[dict[str, Any], str, nn.Parameter]] = []
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
        """Around the module's forward: whatever ends it, the parameters are the user's own again."""
        try:
            yield
        finally:
            self._put_back()

    def enter(self, module: nn.Module) -> None:
        """A module begins to run; within another that does it has been exchanged already."""
        self._depth += 1
        if self._depth > 1:
            return
        low: dict[int, torch.Tensor] = {}
        for owner, name, param in self._slots.get(module, ()):
            if id(param) not in low:
                low[id(param)] = cast_floating(param, self._dtype)
            owner[name] = low[id(param)]  # type: ignore[assignment]
            self._exchanged.append((owner, name, param))

    def leave(self) -> None:
        """A module has run."""
        self._depth -= 1
        if self._depth == 0:
            self._put_back()

    def _put_back(self) -> None:
        self._depth = 0
        for owner, name, param in self._exchanged:
            owner[name] = param
        self._exchanged = []


class _Hook:
    """A hook of a module that does nothing when its exchange is gone, or was left behind by a copy."""

    def __init__(self, exchange: weakref.ref[ParameterExchange] | None = None) -> None:
        self.exchange = exchange

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()

    def find(self) -> ParameterExchange | None:
        """The exchange, if it is there."""
        return None if self.exchange is None else self.exchange()


class _Enter(_Hook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        exchange = self.find()
        if exchange is not None:
            exchange.enter(module)


class _Leave(_Hook):
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        exchange = self.find()
        if exchange is not None:
            exchange.leave()


def install_precision(
    module: nn.Module, precision: Any, ignored: Collection[str], reducer: Reducer
) -> ParameterExchange:
    """Run the module in this precision as long as the exchange lives. What is ignored stays as it is."""
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and (f"{prefix}.{name}" if prefix else name) not in ignored:
                child._buffers[name] = cast_floating(buffer, precision.buffer_dtype)
    reduce_dtype = precision.reduce_dtype or precision.param_dtype
    if reduce_dtype is not None and reducer.group.size() > 1:
        reducer.set_hook(_reduce_in_dtype, (reduce_dtype, weakref.ref(reducer)))
    return ParameterExchange(module, precision.param_dtype, ignored)


def _reduce_in_dtype(state: Any, bucket: GradBucket) -> Any:
    """The mean, computed in a dtype of its own."""
    dtype, reducer = state[0], state[1]()
    group, divisor = reducer.group, reducer.find_divisor()  # which may be others than at the start
    buffer = bucket.buffer()
    low = buffer / divisor if not is_lossy_safe(buffer) else buffer.to(dtype).div_(divisor)
    return launch_in_order(
        group, low, lambda: comm.all_reduce(low, group=group, feature=FEATURE, label=bucket.label)
    )


def cast_floating(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A real tensor in this dtype; others, and all where there is none, as they are."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

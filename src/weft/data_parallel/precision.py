"""Mixed precision for DDP: forward and backward in one dtype, parameters and their gradients in another.

While a module runs, its own parameters are exchanged for copies in the low dtype, made by a
cast that autograd knows. So gradients arrive in the parameters' dtype, recomputation under
checkpointing casts again, and the optimizer never sees the low dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.comm_hooks.bucket import GradBucket
from weft.data_parallel.replica import Replica


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """The dtypes of parameters in forward, of the reduction, and of buffers; None leaves each as it is."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None

    def cast_input(self, tensor: torch.Tensor) -> torch.Tensor:
        """An input in the forward's dtype."""
        return _cast(tensor, self.param_dtype)


def install_precision(module: nn.Module, precision: Any, replica: Replica) -> None:
    """Run the module in this precision from now on. What data parallel ignores stays as it is."""
    ignored = set(replica.options.ignored_names)
    for prefix, child in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        names = [name for name in child._parameters if dot + name not in ignored]
        if names and precision.param_dtype is not None:
            _install_exchange(child, names, precision.param_dtype)
        for name, buffer in child._buffers.items():
            if buffer is not None and dot + name not in ignored:
                child._buffers[name] = _cast(buffer, precision.buffer_dtype)
    reduce_dtype = precision.reduce_dtype or precision.param_dtype
    if reduce_dtype is not None and replica.group.size() > 1:
        replica.reducer.set_hook(_reduce_in(reduce_dtype), replica.group)


def _install_exchange(module: nn.Module, names: list[str], dtype: torch.dtype) -> None:
    kept: list[dict[str, nn.Parameter | None]] = []

    def exchange(_: nn.Module, args: Any) -> None:
        own = {name: module._parameters[name] for name in names}
        kept.append(own)
        for name, param in own.items():
            if param is not None:
                module._parameters[name] = _cast(param, dtype)  # type: ignore[assignment]

    def put_back(_: nn.Module, args: Any, output: Any) -> None:
        module._parameters.update(kept.pop())

    module.register_forward_pre_hook(exchange)
    module.register_forward_hook(put_back, always_call=True)


def _reduce_in(dtype: torch.dtype) -> Callable[[Any, GradBucket], Any]:
    from weft import comm

    def reduce_in_dtype(group: Any, bucket: GradBucket) -> Any:
        buffer = bucket.buffer()
        if buffer.layout is not torch.strided or not buffer.is_floating_point():
            low = buffer / group.size()
        else:
            low = buffer.to(dtype).div_(group.size())
        return comm.all_reduce(low, group=group, feature="ddp").future()

    return reduce_in_dtype


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

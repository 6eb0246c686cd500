"""Hooks by name: `register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, model)`."""

from __future__ import annotations

from enum import Enum, member
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup

from weft.comm_hooks import debugging_hooks, default_hooks, powerSGD_hook, quantization_hooks
from weft.comm_hooks.bucket import GradHook
from weft.errors import ConfigError


def _register(comm_hook: GradHook, model: Any, state: Any) -> None:
    model.register_comm_hook(state, comm_hook)


def _register_power_sgd(
    comm_hook: GradHook,
    model: Any,
    state: ProcessGroup | None,
    matrix_approximation_rank: int,
    start_powerSGD_iter: int = 1_000,
) -> None:
    options = powerSGD_hook.PowerSGDState(
        process_group=state,
        matrix_approximation_rank=matrix_approximation_rank,
        start_powerSGD_iter=start_powerSGD_iter,
    )
    model.register_comm_hook(options, comm_hook)


_per_matrix = partial(_register_power_sgd, comm_hook=powerSGD_hook.powerSGD_hook)
_batched = partial(_register_power_sgd, comm_hook=powerSGD_hook.batched_powerSGD_hook)


class DDPCommHookType(Enum):
    """The hooks that have a name. A member's value registers it: `value(model=model, state=group)`."""

    ALLREDUCE = member(partial(_register, comm_hook=default_hooks.allreduce_hook))
    FP16_COMPRESS = member(partial(_register, comm_hook=default_hooks.fp16_compress_hook))
    BF16_COMPRESS = member(partial(_register, comm_hook=default_hooks.bf16_compress_hook))
    QUANTIZE_PER_TENSOR = member(partial(_register, comm_hook=quantization_hooks.quantization_pertensor_hook))
    QUANTIZE_PER_CHANNEL = member(
        partial(_register, comm_hook=quantization_hooks.quantization_perchannel_hook)
    )
    POWER_SGD = member(partial(_per_matrix, matrix_approximation_rank=1))
    POWER_SGD_RANK2 = member(partial(_per_matrix, matrix_approximation_rank=2))
    BATCHED_POWER_SGD = member(partial(_batched, matrix_approximation_rank=1))
    BATCHED_POWER_SGD_RANK2 = member(partial(_batched, matrix_approximation_rank=2))
    NOOP = member(partial(_register, comm_hook=debugging_hooks.noop_hook))


def register_ddp_comm_hook(comm_hook_type: DDPCommHookType, model: Any, state: Any = None) -> None:
    """Register a hook on a data-parallel model. `state` is a process group, None for the whole world."""
    if not isinstance(comm_hook_type, DDPCommHookType):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"register_ddp_comm_hook: comm_hook_type must be a weft.comm_hooks.DDPCommHookType; got "
            f"{comm_hook_type!r}. A hook function is registered with model.register_comm_hook(state, hook)."
        )
    comm_hook_type.value(model=model, state=state)

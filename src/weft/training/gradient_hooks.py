"""Gradient hooks by a short name, for `weft train --hook`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from weft.comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from weft.errors import ConfigError
from weft.training.layout import Layout
from weft.training.strategies import Placed


def _power_sgd(group: dist.ProcessGroup | None) -> Any:
    return powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=4, start_powerSGD_iter=2)


def _int8(group: dist.ProcessGroup | None) -> Any:
    return quantization_hooks.QuantizationState(group, error_feedback=True)


def _itself(group: dist.ProcessGroup | None) -> Any:
    return group


# The hook, and what makes its state of the group that it averages over.
_HOOKS: Mapping[str, tuple[Callable[..., Any], Callable[[dist.ProcessGroup | None], Any]]] = {
    "fp16": (default_hooks.fp16_compress_hook, _itself),
    "bf16": (default_hooks.bf16_compress_hook, _itself),
    "int8": (quantization_hooks.quantization_perchannel_hook, _int8),
    "powersgd": (powerSGD_hook.powerSGD_hook, _power_sgd),
}
HOOKS = ("none", *_HOOKS)


def check_hook(name: str, layout: Layout) -> None:
    """Raise ConfigError for a hook that isn't there, or that would have nothing to do."""
    if name not in HOOKS:
        raise ConfigError(f"train: there is no hook {name!r}; there are {', '.join(HOOKS)}.")
    if name != "none" and layout.kind.data is None:
        raise ConfigError(
            f"train: hook {name} changes how gradients travel, and strategy {layout.strategy} sends none: "
            "each rank has the whole batch. Leave the hook out, or take ddp+tp or fsdp+tp."
        )


def register_hook(name: str, placed: Placed) -> Any:
    """Register the hook on a placed model; gives its state, None where it has none that must be saved."""
    if name == "none":
        return None
    hook, make_state = _HOOKS[name]
    state = make_state(placed.data_group)
    placed.module.register_comm_hook(state, hook)  # type: ignore[operator]
    return state if hasattr(state, "state_dict") else None

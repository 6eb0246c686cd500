"""What ZeroRedundancyOptimizer checks before it changes anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from weft.errors import ConfigError, ConfigTypeError


def check_params(params: Iterable[Any]) -> list[Any]:
    """The parameters, or groups of them, as a list that can be read again."""
    if isinstance(params, torch.Tensor):
        raise ConfigTypeError(
            f"`params` argument should be an iterable of Tensors, but got {torch.typename(params)}. Wrap it "
            "in a list."
        )
    try:
        given = list(params)
    except TypeError as error:
        raise ConfigTypeError(
            f"`params` argument should be an iterable of Tensors or dicts, but got {torch.typename(params)}."
        ) from error
    if not given:
        raise ConfigError("ZeroRedundancyOptimizer got an empty parameter list. Pass model.parameters().")
    if all(isinstance(one, dict) for one in given):
        given = [_read_group(group) for group in given]
        tensors = [param for group in given for param in group["params"]]
    else:
        tensors = given
    if not all(isinstance(one, torch.Tensor) for one in tensors):
        odd = next(type(one).__name__ for one in tensors if not isinstance(one, torch.Tensor))
        raise ConfigTypeError(
            f"`params` argument should be an iterable of Tensors or dicts; there is a {odd} in it. Pass all "
            "of one kind."
        )
    for param in tensors:
        if param.layout is not torch.strided:
            raise ConfigError(
                "ZeroRedundancyOptimizer only supports using the same dense type for all parameters but got "
                f"{torch.typename(param)} of layout {param.layout}. Leave sparse tensors to another "
                "optimizer."
            )
    return given


def _read_group(group: dict[str, Any]) -> dict[str, Any]:
    if "params" not in group:
        raise ConfigError(
            "Each parameter group passed-in via `params` must have a 'params' key mapping to the "
            f"parameters in the group; one has {sorted(group)}."
        )
    params = group["params"]
    return {**group, "params": [params] if isinstance(params, torch.Tensor) else list(params)}

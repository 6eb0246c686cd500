"""Models to plan for, by name: those of `weft train`, well-known sizes, or a function of the user's."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from weft.errors import ConfigError, WeftError
from weft.planning.job import Job
from weft.training.model import SIZES, ModelSize, make_model, next_byte_loss
from weft.training.strategies import transformer_plan

# The transformer of `weft train`, so with bytes for tokens; about as many parameters as the names say.
LARGE_SIZES: Mapping[str, ModelSize] = {
    "gpt-125m": ModelSize(width=768, depth=12, num_heads=12, hidden=3072, context=1024),
    "gpt-1.3b": ModelSize(width=2048, depth=24, num_heads=16, hidden=5632, context=2048),
    "gpt-7b": ModelSize(width=4096, depth=32, num_heads=32, hidden=11008, context=4096),
    "gpt-13b": ModelSize(width=5120, depth=40, num_heads=40, hidden=13824, context=4096),
    "gpt-70b": ModelSize(width=8192, depth=80, num_heads=64, hidden=24576, context=4096),
}


class ModelError(ConfigError):
    """The user's function could not make a model."""


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from. `make_job` is called once for each strategy, in an imagined world."""

    name: str
    make_job: Callable[[], Job]
    num_heads: int | None = None  # where it is known that heads are shared out


def find_model(name: str, context: int | None = None) -> ModelSource:
    """The model of this name: a size, FILE.py:FUNCTION or module:FUNCTION.

    The function takes nothing and gives a Job, or (model, inputs, targets, loss). Raises ConfigError.
    """
    size = {**SIZES, **LARGE_SIZES}.get(name)
    if size is not None:
        if context is not None:
            size = replace(size, context=context)
        return ModelSource(name, lambda: _transformer(size), size.num_heads)
    if ":" not in name:
        raise ConfigError(
            f"plan: there is no model {name!r}; there are {', '.join((*SIZES, *LARGE_SIZES))}, and yours as "
            "FILE.py:FUNCTION or module:FUNCTION."
        )
    if context is not None:
        raise ConfigError(f"plan: --context is for models by size; {name} makes its own inputs.")
    function = _find_function(name)
    return ModelSource(name, lambda: _as_job(name, _call(name, function)))


def _transformer(size: ModelSize) -> Job:
    tokens = torch.zeros(1, size.context, dtype=torch.long)
    return Job(make_model(size, 0), tokens, tokens, next_byte_loss, transformer_plan())


def _find_function(name: str) -> Callable[[], Any]:
    where, _, function_name = name.rpartition(":")
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"plan: {where} has no function {function_name!r}.")
    return function


def _load_module(where: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except Exception as error:
        raise ConfigError(f"plan: module {where} can't be imported: {_in_a_line(error)}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"plan: there is no file {path}. Give FILE.py:FUNCTION.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"plan: {path} can't be run: {_in_a_line(error)}") from error
    return module


def _call(name: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except WeftError:
        raise
    except Exception as error:
        raise ModelError(f"plan: {name} raised {_in_a_line(error)}") from error


def _in_a_line(error: Exception) -> str:
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def _as_job(name: str, made: Any) -> Job:
    if isinstance(made, Job):
        return made
    if isinstance(made, tuple) and len(made) == 4 and isinstance(made[0], nn.Module):  # type: ignore[reportUnknownArgumentType]
        return Job(*made)  # type: ignore[reportUnknownArgumentType]
    raise ConfigError(
        f"plan: {name} gave {type(made).__name__}; it must give (model, inputs, targets, loss), or a "
        "weft.planning.Job."
    )

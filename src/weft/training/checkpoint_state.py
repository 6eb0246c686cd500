"""What a checkpoint holds: tensors under names that no strategy and no number of ranks changes.

    blocks.0.mlp.up.weight                  a parameter or a buffer, as the bare model calls it
    optimizer/blocks.0.mlp.up.weight/step   what the optimizer knows of it
    groups/                                 the optimizer's settings, packed (rates, say)
    hook/int8/ddp/1-of-2                    the state of a gradient hook, packed: each rank's own

Saving reads the live tensors of a model. Loading fills fresh ones, which are copied when all are there.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from weft.errors import ConfigError
from weft.training.saved_values import SavedError, read_saved
from weft.training.trainer import Trainer
from weft.training.updates import Part

# What an optimizer's groups have that is no setting of the training: how it is computed here.
_OF_THIS_RUN = ("params", "foreach", "fused", "capturable", "differentiable")
_MOST_BESIDE = 64  # limit on other state, in times the model's bytes: optimizers keep two or three
Saved = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # sizes and dtypes of the saved tensors, by name


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The tensors that this rank writes to a checkpoint."""
    state: dict[str, torch.Tensor] = {}
    for part in trainer.update.parts():
        state |= part.tensors
        state[_groups_name(part)] = _pack(_settings_of(part))
        for name, param in part.params.items():
            for key, value in part.optimizer.state.get(param, {}).items():
                state[_optimizer_name(name, key)] = torch.as_tensor(value)
    if trainer.hook_state is not None:
        state[_hook_name(trainer)] = _pack(trainer.hook_state.state_dict())
    return state


def make_places(trainer: Trainer, saved: Saved, where: str) -> dict[str, torch.Tensor]:
    """Fresh tensors to load a checkpoint into. Raises ConfigError for one of another model.

    The live model is not loaded into: it would be half overwritten where a later part is damaged.
    """
    _check_sizes(trainer, saved)
    known: set[str] = set()
    places: dict[str, torch.Tensor] = {}
    for part in trainer.update.parts():
        _check_fits(part, saved, where)
        known |= part.tensors.keys()
        places |= {name: torch.empty_like(tensor) for name, tensor in part.tensors.items()}
        places |= _empty_optimizer_state(part, saved)
        places |= _empty_packed(_groups_name(part), saved)
    for name in saved:
        if "/" not in name and name not in known and not name.startswith(trainer.update.elsewhere):
            raise ConfigError(f"train: {where} has '{name}', which this model has not: it is of another one.")
    if trainer.hook_state is not None:
        places |= _empty_packed(_hook_name(trainer), saved)
    return places


@dataclass(frozen=True)
class Loaded:
    """A whole checkpoint for a trainer, read and checked: `apply_loaded` can't fail halfway."""

    tensors: Mapping[str, torch.Tensor]
    settings: Mapping[str, list[dict[str, Any]]]  # by the part's name
    hook_state: Any | None  # None where no matching state was saved


def unpack_loaded(trainer: Trainer, loaded: Mapping[str, torch.Tensor]) -> Loaded:
    """Unpack and check what was loaded. Raises ValueError where it does not fit the trainer."""
    settings: dict[str, list[dict[str, Any]]] = {}
    for part in trainer.update.parts():
        if _groups_name(part) in loaded:
            settings[part.name] = _checked_settings(part, _unpack(loaded[_groups_name(part)]))
    packed = loaded.get(_hook_name(trainer)) if trainer.hook_state is not None else None
    return Loaded(loaded, settings, None if packed is None else _unpack(packed))


def apply_loaded(trainer: Trainer, found: Loaded) -> bool:
    """Copy what was loaded into the trainer; returns False where a hook has a state and none was saved."""
    loaded = found.tensors
    if (
        found.hook_state is not None
    ):  # first: a hook may refuse its state, and the model must be unchanged then
        trainer.hook_state.load_state_dict(found.hook_state)
    for part in trainer.update.parts():
        with torch.no_grad():
            for name, tensor in part.tensors.items():
                tensor.copy_(loaded[name])
        for name, param in part.params.items():
            prefix = _optimizer_name(name, "")
            state = {
                full.removeprefix(prefix): value
                for full, value in loaded.items()
                if full.startswith(prefix)
            }  # fmt: skip
            if state:
                part.optimizer.state[param] = cast(Any, state)
        for group, saved in zip(part.optimizer.param_groups, found.settings.get(part.name, ()), strict=False):
            group.update(saved)
    return trainer.hook_state is None or found.hook_state is not None


def _check_sizes(trainer: Trainer, saved: Saved) -> None:
    """Raise ValueError for a checkpoint with more optimizer and hook state than any optimizer keeps."""
    beside = model = 0
    for part in trainer.update.parts():
        model += sum(tensor.numel() * tensor.itemsize for tensor in part.tensors.values())
    for name, (size, dtype) in saved.items():
        if name.startswith(("optimizer/", "groups/", "hook/")):
            beside += math.prod(size) * dtype.itemsize
    # The hooks' states are all ranks'; each loads only its own.
    most = (model + 2**20) * _MOST_BESIDE * trainer.world.size
    if beside > most:
        raise SavedError(
            f"it has {beside:,} bytes of optimizer and hook state; {most:,} are the limit for this model"
        )


def _check_fits(part: Part, saved: Saved, where: str) -> None:
    for name, tensor in part.tensors.items():
        if name not in saved:
            raise ConfigError(f"train: {where} has no '{name}': it is of another model.")
        size, _ = saved[name]
        if size != tuple(tensor.shape):
            raise ConfigError(
                f"train: '{name}' is {list(size)} in {where} and {list(tensor.shape)} in this model: "
                "it is of another one."
            )


def _empty_optimizer_state(part: Part, saved: Saved) -> dict[str, torch.Tensor]:
    """Tensors for the saved state of the part's parameters, sharded as these are."""
    found: dict[str, torch.Tensor] = {}
    for name, param in part.params.items():
        prefix = _optimizer_name(name, "")
        for full, (size, dtype) in saved.items():
            if full.startswith(prefix):
                is_like_param = size == tuple(param.shape)
                found[full] = (
                    torch.zeros_like(param.detach(), dtype=dtype)
                    if is_like_param
                    else torch.zeros(size, dtype=dtype)
                )
    return found


def _empty_packed(name: str, saved: Saved) -> dict[str, torch.Tensor]:
    return {name: torch.empty(saved[name][0], dtype=torch.uint8)} if name in saved else {}


def _settings_of(part: Part) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key not in _OF_THIS_RUN}
        for group in part.optimizer.param_groups
    ]


def _checked_settings(part: Part, saved: Any) -> list[dict[str, Any]]:
    """Check saved settings against the optimizer's. Raises ValueError where they don't fit."""
    groups = part.optimizer.param_groups
    if type(saved) is not list or len(saved) != len(groups):  # type: ignore[reportUnknownArgumentType]
        raise SavedError("it has settings of another optimizer")
    for group, settings in zip(groups, saved, strict=True):  # type: ignore[reportUnknownArgumentType]
        if type(settings) is not dict or not {*settings}.isdisjoint(_OF_THIS_RUN):  # type: ignore[reportUnknownArgumentType]
            raise SavedError("it has settings of another optimizer")
        for name, value in settings.items():  # type: ignore[reportUnknownVariableType]
            if type(name) is not str or not _is_like(value, group.get(name)):
                raise SavedError(
                    f"the optimizer's setting {name!r} has a value of another type: {value!r:.100}"
                )
    return saved  # type: ignore[reportUnknownVariableType]


def _is_like(value: Any, now: Any) -> bool:
    """Whether a saved setting is of a type that can replace the present one."""
    if value is None or now is None:
        return True
    if isinstance(now, list | tuple):
        both: Any = value
        return isinstance(both, list | tuple) and all(map(_is_like, both, now))  # type: ignore[reportUnknownArgumentType]
    if isinstance(now, int | float | torch.Tensor):
        return isinstance(value, int | float | torch.Tensor)
    return type(value) is type(now)


def _optimizer_name(param: str, key: str) -> str:
    return f"optimizer/{param}/{key}"


def _groups_name(part: Part) -> str:
    return f"groups/{part.name}"


def _hook_name(trainer: Trainer) -> str:
    """Buckets follow from the strategy and the ranks, and so does what a hook keeps of them."""
    world = trainer.world
    return f"hook/{trainer.hook}/{trainer.layout.strategy}/{world.rank}-of-{world.size}"


def _pack(value: Any) -> torch.Tensor:
    packed = io.BytesIO()
    torch.save(value, packed)
    return torch.frombuffer(bytearray(packed.getvalue()), dtype=torch.uint8)


def _unpack(packed: torch.Tensor) -> Any:
    # Tensors come to the CPU: the device they were on may not be there. What uses them moves them.
    return read_saved(packed.numpy().tobytes())

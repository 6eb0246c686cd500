"""What a checkpoint holds: tensors under names that no strategy and no number of ranks changes.

    blocks.0.mlp.up.weight                  a parameter or a buffer, as the bare model calls it
    optimizer/blocks.0.mlp.up.weight/step   what the optimizer knows of it
    groups/                                 the optimizer's settings, packed (rates, say)
    hook/int8/ddp/1-of-2                    the state of a gradient hook, packed: each rank's own

Tensors of a model are the live ones: saving reads them, loading writes into them.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, cast

import torch

from weft.errors import ConfigError
from weft.training.trainer import Trainer
from weft.training.updates import Part

# What an optimizer's groups have that is no setting of the training: how it is computed here.
_OF_THIS_RUN = ("params", "foreach", "fused", "capturable", "differentiable")
Saved = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # sizes and dtypes of the saved tensors, by name


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All that this rank gives to a checkpoint."""
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


def places_for(trainer: Trainer, saved: Saved, where: str) -> dict[str, torch.Tensor]:
    """Tensors to load a checkpoint into. Raises ConfigError, changing nothing, for one of another model."""
    known: set[str] = set()
    places: dict[str, torch.Tensor] = {}
    for part in trainer.update.parts():
        _check_fits(part, saved, where)
        known |= part.tensors.keys()
        places |= part.tensors
        places |= _empty_optimizer_state(part, saved)
        places |= _empty_packed(_groups_name(part), saved)
    for name in saved:
        if "/" not in name and name not in known and not name.startswith(trainer.update.elsewhere):
            raise ConfigError(f"train: {where} has '{name}', which this model has not: it is of another one.")
    if trainer.hook_state is not None:
        places |= _empty_packed(_hook_name(trainer), saved)
    return places


def take(trainer: Trainer, loaded: Mapping[str, torch.Tensor]) -> bool:
    """Go on with what was loaded; gives whether a hook that has a state has found it."""
    for part in trainer.update.parts():
        for name, tensor in part.tensors.items():
            if tensor is not loaded[name]:
                with torch.no_grad():
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
        if _groups_name(part) in loaded:
            _set_settings(part, _unpack(loaded[_groups_name(part)]))
    if trainer.hook_state is None:
        return True
    packed = loaded.get(_hook_name(trainer))
    if packed is not None:
        trainer.hook_state.load_state_dict(_unpack(packed))
    return packed is not None


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


def _set_settings(part: Part, settings: list[dict[str, Any]]) -> None:
    for group, saved in zip(part.optimizer.param_groups, settings, strict=True):
        group.update(saved)


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
    # To the CPU: the device it was on may not be there. What uses it moves it where it is needed.
    return torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)

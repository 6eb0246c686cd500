"""Which parameters and buffers of a module are replicated, and what is said of each."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from weft.data_parallel.members import Member, make_member
from weft.errors import ConfigError, StateError, UnfitError
from weft.tensors import local_of

Slot = tuple[dict[str, nn.Parameter | None], str, nn.Parameter]  # a module's dictionary, a name in it


@dataclass(frozen=True)
class ModuleParts:
    """A module's replicated parameters and buffers, in the order of `named_parameters`."""

    members: tuple[Member, ...]  # parameters that need gradients
    slots: tuple[Slot, ...]  # where they hang
    frozen: tuple[tuple[str, nn.Parameter], ...]
    buffer_slots: tuple[tuple[nn.Module, str], ...]  # where buffers hang: they may be reassigned

    def buffers(self) -> list[torch.Tensor]:
        """The buffers as they are now; of DTensors, what this rank holds."""
        found = (module._buffers.get(name) for module, name in self.buffer_slots)
        return [local_of(buffer) for buffer in found if buffer is not None]

    def states(self) -> Iterator[torch.Tensor]:
        """All parameters; of DTensors, what this rank holds."""
        yield from (local_of(param) for _, param in self.named())

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All parameters, with their names."""
        yield from ((member.spec.name, member.param) for member in self.members)
        yield from self.frozen

    @functools.cached_property
    def tied_slots(self) -> tuple[Slot, ...]:
        """Those of parameters that hang in several places."""
        counts = Counter(id(param) for _, _, param in self.slots)
        return tuple(slot for slot in self.slots if counts[id(slot[2])] > 1)

    def check_tied(self) -> None:
        """As `check_in_place`, for tied parameters: what is left of them may still be used."""
        self.check_in_place(self.tied_slots)

    def check_in_place(self, slots: Iterable[Slot] | None = None) -> None:
        """Raise for a parameter that has been replaced by another: nobody reduces that one's gradient."""
        for owner, name, param in self.slots if slots is None else slots:
            found = owner.get(name)
            # A plain tensor is there for one call only: torch.func.functional_call put it in.
            if found is not param and isinstance(found, nn.Parameter) and found.requires_grad:
                fqn = next(member.spec.name for member in self.members if member.param is param)
                raise StateError(
                    f"parameter '{fqn}' is another one than when the module was wrapped; it would not be "
                    "reduced. Change values in place (param.data.copy_), or wrap the module again. If "
                    "fully_shard was applied to the module, or around it, leave out one of the two."
                )

    def check_frozen(self) -> None:
        """Raise for a parameter that was frozen at the start and needs a gradient now."""
        for name, param in self.frozen:
            if param.requires_grad:
                raise StateError(
                    f"parameter '{name}' was frozen when the module was wrapped and requires a gradient "
                    "now; it would not be reduced. Wrap the module again after thawing, or freeze it after "
                    "wrapping."
                )


def find_parts(
    module: nn.Module, ignored_names: Collection[str], delayed_names: Collection[str] = ()
) -> ModuleParts:
    """Sort out a module's parameters and buffers. Shared ones count once."""
    sparse = _with_sparse_gradients(module)
    members: list[Member] = []
    frozen: list[tuple[str, nn.Parameter]] = []
    for name, param in module.named_parameters():
        if name in ignored_names:
            continue
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise UnfitError(
                "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
                f"Run a dummy forward pass to correctly initialize the modules: '{name}' is uninitialized."
            )
        if not param.requires_grad:
            frozen.append((name, param))
            continue
        is_sparse, is_delayed = id(param) in sparse, name in delayed_names
        members.append(make_member(name, param, is_sparse=is_sparse, is_delayed=is_delayed))
    missing = set(delayed_names) - {member.spec.name for member in members}
    if missing:
        raise ConfigError(
            f"delay_all_reduce_named_params names {sorted(missing)}, which are not parameters of the module "
            "that are reduced. Take the names from module.named_parameters()."
        )
    buffer_slots = tuple(_buffer_slots(module, ignored_names))
    slots = _parameter_slots(module, {id(member.param) for member in members})
    return ModuleParts(tuple(members), tuple(slots), tuple(frozen), buffer_slots)


def _with_sparse_gradients(module: nn.Module) -> set[int]:
    return {
        id(child.weight)
        for child in module.modules()
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse
    }


def _parameter_slots(module: nn.Module, wanted: Collection[int]) -> Iterator[Slot]:
    for child in module.modules():
        for name, param in child._parameters.items():
            if param is not None and id(param) in wanted:
                yield child._parameters, name, param


def _buffer_slots(module: nn.Module, ignored_names: Collection[str]) -> Iterator[tuple[nn.Module, str]]:
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            fqn = f"{prefix}.{name}" if prefix else name
            if buffer is None or id(buffer) in seen or fqn in ignored_names:
                continue
            seen.add(id(buffer))
            yield child, name

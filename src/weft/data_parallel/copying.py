"""Copies of a DDP module, by deepcopy and by pickle: module and options are copied, ties made anew."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

from torch import nn

from weft.comm.group import resolve_group
from weft.data_parallel.replica import Replica, ReplicaOptions
from weft.join import Joinable

if TYPE_CHECKING:
    from weft.data_parallel.ddp import DistributedDataParallel

_TIES = ("_own_replica", "_precision_exchange", "process_group", "device_mesh", "_join_config")


def copy_wrapper(ddp: DistributedDataParallel, memo: dict[int, Any]) -> DistributedDataParallel:
    """A copy in the same group. It talks to the other ranks' copies, so they must make theirs too."""
    new = type(ddp).__new__(type(ddp))
    memo[id(ddp)] = new
    nn.Module.__init__(new)
    for name, value in ddp.__dict__.items():
        if name not in _TIES:
            vars(new)[name] = copy.deepcopy(value, memo)
    vars(new)["device_mesh"] = ddp.device_mesh
    options = dataclasses.replace(ddp._replica.options, group=ddp._replica.group)
    _retie(new, options, ddp._replica)
    return new


def pickle_wrapper(ddp: DistributedDataParallel) -> dict[str, Any]:
    """All but the ties: they belong to this process."""
    state = {name: value for name, value in ddp.__dict__.items() if name not in _TIES}
    options = ddp._replica.options
    state["_options"] = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if field.name != "group"
    }
    return state


def unpickle_wrapper(ddp: DistributedDataParallel, state: dict[str, Any]) -> None:
    """Tie an unpickled module to the world's ranks, without changing its values. All ranks must do so."""
    state = dict(state)
    options = ReplicaOptions(group=resolve_group(None), **state.pop("_options"))
    nn.Module.__setstate__(ddp, state)  # type: ignore[arg-type]
    vars(ddp)["device_mesh"] = None
    _retie(ddp, options, None)


def _retie(ddp: DistributedDataParallel, options: ReplicaOptions, before: Replica | None) -> None:
    Joinable.__init__(ddp)
    ddp._attach(dataclasses.replace(options, syncs_at_start=False))
    is_ours = ddp.mixed_precision is not None  # a hook that the module has already
    if before is not None and before.reducer.hook is not None and not is_ours:
        ddp._replica.reducer.set_hook(before.reducer.hook, before.reducer.hook_state)
    if before is not None:
        ddp._replica.buffer_hook = before.buffer_hook

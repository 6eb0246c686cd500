"""Every rank's few integers, to every rank: what ranks must know of each other before they go on.

A control message, not traffic of the model: it passes by torch's dispatcher, so that
those who count collectives there (CommDebugMode) don't count it. It is waited for
inside the call.

Private names of torch, used here and in traced.py: `ProcessGroup._get_backend` (the
backend that a group has for a device).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from weft.comm.door import launch_call
from weft.comm.group import resolve_group, state_of

# gloo groups beside groups that can't move the CPU's memory, such as nccl's.
_beside: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()


def exchange_rows(
    row: Sequence[int],
    group: ProcessGroup | None = None,
    *,
    feature: str = "user",
    name: str = "",
    label: str = "",
) -> list[list[int]]:
    """Every rank's integers, by rank. All ranks give equally many, and wait for each other.

    `name` says what they are about, in records and errors; it must agree between ranks. `label` stands in its
    place as the label of records.
    """
    if torch.compiler.is_compiling():
        eager: Any = torch.compiler.disable(
            exchange_rows, reason="ranks tell each other numbers that no graph has"
        )
        return eager(row, group, feature=feature, name=name, label=label)
    group = resolve_group(group)
    mine = torch.tensor(row, dtype=torch.int64)
    rows = mine.repeat(group.size(), 1)
    handle = launch_call(
        "exchange_rows",
        group,
        feature,
        lambda: _start(rows, mine, group),
        rows,
        (mine,),
        (rows,),
        name,
        label=label or name,
    )
    return handle.wait().tolist()


def _start(rows: torch.Tensor, mine: torch.Tensor, group: ProcessGroup) -> Any:
    if group.size() == 1:
        return None
    native = getattr(group, "exchange_rows", None)  # the local group's
    if native is not None:
        return native(rows, mine)
    return _gatherer(group).allgather([list(rows)], [mine])


def _gatherer(group: ProcessGroup) -> Any:
    """Whoever gathers tensors of the CPU for the group: its backend, itself, or a group beside it."""
    backend = _cpu_backend(group)
    if backend is not None:
        return backend
    if type(group) is not ProcessGroup:
        return group  # written in Python, and called without a detour
    found = _beside.get(group)
    if found is None:
        # Only the members meet to make it, and all of them come here at the same call.
        made = dist.new_group(list(state_of(group).ranks), backend="gloo", use_local_synchronization=True)
        assert isinstance(made, ProcessGroup)
        found = _beside[group] = made
    return _cpu_backend(found)


def _cpu_backend(group: ProcessGroup) -> Any:
    """The group's backend for the CPU, None where it has none."""
    try:
        return group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None

"""Process groups as the door sees them: which one is meant, who is in it, its store.

The private names of torch that weft needs for groups are used here and nowhere
else: `_get_default_group`, `_get_process_group_store` (the store that a group was made
with) and `_world.pg_map` (the groups that are there).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

from weft.errors import ConfigError, StateError

# Before torch 2.13 Dynamo doesn't find a mesh's group among those that are there.
_IS_BLIND = torch.__version__ < "2.13"


@dataclass(eq=False, slots=True)
class GroupState:
    """What the door remembers of a group."""

    rank: int  # in the group
    global_rank: int
    ranks: tuple[int, ...]  # all members, as ranks of the world
    name: str
    numbers: Iterator[int] = field(default_factory=itertools.count)  # counts the collectives
    message_numbers: Iterator[int] = field(default_factory=itertools.count)  # and the messages

    def words(self) -> str:
        """How messages call the group."""
        return f"group '{self.name}' of {len(self.ranks)} ranks"


_states: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState] = weakref.WeakKeyDictionary()


def resolve_group(group: object) -> dist.ProcessGroup:
    """The group that a call means: the given one, or the whole world."""
    if group is None:
        if not dist.is_initialized():
            raise StateError(
                "no process group is there. Call weft.init() first, or run the function with weft.launch()."
            )
        return c10d._get_default_group()
    if not isinstance(group, dist.ProcessGroup):  # new_group gives outsiders a number instead
        raise ConfigError(
            f"rank {dist.get_rank()} is not a member of this group; only its members may call collectives."
        )
    if not (_IS_BLIND and torch.compiler.is_compiling()) and group not in c10d._world.pg_map:
        raise StateError("this process group was destroyed. Make a new one with torch.distributed.new_group.")
    return group


def state_of(group: dist.ProcessGroup) -> GroupState:
    """What the door remembers of the group; made when first asked for."""
    state = _states.get(group)
    if state is None:
        ranks = tuple(dist.get_process_group_ranks(group))
        rank = group.rank()
        state = _states[group] = GroupState(rank, ranks[rank], ranks, group.group_name)
    return state


def store_of(group: dist.ProcessGroup) -> Store:
    """The store that the group was made with. It is up as long as the world's first rank, or its launcher."""
    return c10d._get_process_group_store(group)


def has_imagined_peers(group: dist.ProcessGroup) -> bool:
    """Whether the group's other ranks are not there: a plan's, whose large tensors have no values."""
    return getattr(group, "has_imagined_peers", False)


def allocate(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """A zeroed tensor from memory that suits the group best.

    On a local group (backend 'weft') peers read and write it in place; on any other
    it is an ordinary tensor. Only this rank is concerned.
    """
    group = resolve_group(group)
    native = getattr(group, "allocate", None)
    if native is None:
        return torch.zeros(*shape, dtype=dtype, device=device)
    return native(*shape, dtype=dtype, device=device)

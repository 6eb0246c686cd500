"""Who makes a collective under Join, read from the call stack.

A Joinable's own calls are its hook's to stand in for; everything else in the loop is not.
Both come through the same torch.distributed functions, so the stack is what tells them
apart. A call belongs to a Joinable when

* it came through the door under the name of a part of weft, or
* a strategy of weft called the user's function that made it, a gradient hook say; but not a
  model's forward, whose calls are the user's own, or
* a method of a Joinable of the user's, or of its hook, is on the stack.

The private places of torch that are known here, watched by tests/join/test_shadow.py: the
file of SyncBatchNorm's autograd function, and the names of c10d's object collectives.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum, auto
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules import _functions as sync_batch_norm

from weft.comm.door import launch_call
from weft.join.protocol import Joinable, JoinHook

_DOOR: CodeType = launch_call.__code__
_MAX_FRAMES_TO_THE_DOOR = 12
_SYNC_BATCH_NORM = str(sync_batch_norm.__file__)
_C10D = str(c10d.__file__)
_OBJECT_CALLS = frozenset(
    (
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
        "scatter_object_list",
    )
)
_TORCH = str(Path(torch.__file__).parent)
_WEFT = f"{Path(__file__).parent.parent}{os.sep}"
# Parts of weft that call a user's function within a step: a gradient hook, a hook of autograd, an optimizer.
# What other parts call, a command or a launcher, may be the user's whole program.
_STRATEGIES = (
    *("autograd", "comm_hooks", "compiler", "data_parallel", "fsdp", "modules", "optimizers"),
    "tensor_parallel",
)


class Origin(Enum):
    """Where a collective comes from."""

    COVERED = auto()  # from a Joinable: its hook makes the call on joined ranks
    IN_STEP = auto()  # from a SyncBatchNorm inside a Joinable's forward, or a backward: within a step
    SYNC_BATCH_NORM = auto()  # from another SyncBatchNorm
    SHADOWED = auto()  # from a block of shadowed()
    OBJECTS = auto()  # one of the collectives that move pickled objects
    FOREIGN = auto()  # from a part of weft that no Joinable of this Join covers
    USER = auto()


class Caller(NamedTuple):
    """Who makes a collective."""

    origin: Origin
    is_through_door: bool


_is_shadowed: ContextVar[bool] = ContextVar("weft_join_is_shadowed", default=False)


@contextmanager
def shadowed() -> Generator[None]:
    """Let joined ranks answer the collectives of this block with zeros, gathers too.

    Reductions outside of it get neutral values anyway. Does nothing outside of a Join.
    """
    token = _is_shadowed.set(True)
    try:
        yield
    finally:
        _is_shadowed.reset(token)


class Callers:
    """What belongs to the Joinables of one Join."""

    def __init__(self, joinables: Iterable[Joinable], hooks: Iterable[JoinHook]) -> None:
        given = list(joinables)
        self._owners: list[object] = [*given, *hooks]  # held, so that their ids stay theirs
        self._owner_ids = {id(owner) for owner in self._owners}
        covered = [one.join_features for one in given]
        self._features = None if None in covered else {name for some in covered if some for name in some}

    def find_caller(self) -> Caller:
        """Who makes the collective that is being made now, on this thread."""
        frame: FrameType | None = sys._getframe(1)
        # Weft's own calls are by far the most, so they are looked for first.
        door = _door_above(frame)
        is_through_door = door is not None
        if door is not None and (feature := door.f_locals["feature"]) != "user":
            is_covered = self._features is None or feature in self._features
            return Caller(Origin.COVERED if is_covered else Origin.FOREIGN, True)
        moves_objects = False
        while frame is not None:
            code = frame.f_code
            if code.co_filename == _SYNC_BATCH_NORM:
                return Caller(self._origin_of_norm(frame), is_through_door)
            elif code.co_filename == _C10D:
                moves_objects |= code.co_name in _OBJECT_CALLS
            elif code.co_filename.startswith(_WEFT):
                if code.co_name != "forward" and _part_of(code.co_filename) in _STRATEGIES:
                    return Caller(Origin.COVERED, is_through_door)
            elif not code.co_filename.startswith(_TORCH) and self._is_owners(frame):
                return Caller(Origin.COVERED, is_through_door)
            frame = frame.f_back
        if moves_objects:
            return Caller(Origin.OBJECTS, is_through_door)
        return Caller(Origin.SHADOWED if _is_shadowed.get() else Origin.USER, is_through_door)

    def _origin_of_norm(self, frame: FrameType) -> Origin:
        if frame.f_code.co_name == "backward":
            return Origin.IN_STEP  # of what a forward of this step computed
        caller = frame.f_back
        while caller is not None:
            if not caller.f_code.co_filename.startswith(_TORCH) and self._is_owners(caller):
                return Origin.IN_STEP
            caller = caller.f_back
        return Origin.SYNC_BATCH_NORM

    def _is_owners(self, frame: FrameType) -> bool:
        """Whether the frame runs a method of a Joinable or of a hook."""
        code = frame.f_code
        if not code.co_argcount:
            return False
        owner = frame.f_locals.get(code.co_varnames[0])
        # A function that is given a model as its first argument is not one of the model's methods.
        classes = [cls.__qualname__ for cls in type(owner).__mro__]
        return id(owner) in self._owner_ids and code.co_qualname.rpartition(".")[0] in classes


def _door_above(frame: FrameType) -> FrameType | None:
    """The frame of the door that the call came through: between the two are only torch's and the door's."""
    above: FrameType | None = frame
    for _ in range(_MAX_FRAMES_TO_THE_DOOR):
        if above is None or above.f_code is _DOOR:
            return above
        above = above.f_back
    return None


def _part_of(filename: str) -> str:
    return filename[len(_WEFT) :].partition(os.sep)[0]

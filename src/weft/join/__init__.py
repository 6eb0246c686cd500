"""Uneven inputs: ranks that run out of them stand in for themselves until all are done."""

from weft.join.callers import shadowed
from weft.join.context import Join
from weft.join.protocol import Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable", "shadowed"]

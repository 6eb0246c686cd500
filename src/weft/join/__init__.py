"""Uneven inputs: ranks that run out of them stand in for themselves until all are done."""

from weft.join.context import Join, Joinable, JoinHook
from weft.join.watch import shadowed

__all__ = ["Join", "JoinHook", "Joinable", "shadowed"]

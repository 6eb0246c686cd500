"""Notices: the small messages between agents, which name what is to be done and to what.

They are plain data: reading one builds nothing but numbers, texts and tuples.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

from weft.rpc.owned import GlobalId
from weft.rpc.packing import load_plain

REMOTE_IDS = struct.Struct("<QQ")  # of the value and of the caller's RRef, in front of the body of a REMOTE


def write_notice(notice: tuple[Any, ...]) -> bytes:
    """A notice as bytes."""
    return pickle.dumps(tuple([tuple(part) if isinstance(part, GlobalId) else part for part in notice]), 5)


def read_notice(body: bytes | memoryview) -> tuple[Any, ...]:
    """The notice in the body of a CONTROL message."""
    return load_plain(body)

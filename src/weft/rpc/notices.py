"""Notices: the small messages between agents, which name what is to be done and to what.

They are plain data: reading one builds nothing but numbers, texts and tuples.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

from weft.rpc.data_unpickler import load_data
from weft.rpc.message_forms import check_notice
from weft.rpc.owned import GlobalId
from weft.rpc.packing import load_plain

REMOTE_IDS = struct.Struct("<QQ")  # of the value and of the caller's RRef, in front of the body of a REMOTE


def write_notice(notice: tuple[Any, ...]) -> bytes:
    """A notice as bytes."""
    return pickle.dumps(tuple([tuple(part) if isinstance(part, GlobalId) else part for part in notice]), 5)


def read_notice(body: bytes | memoryview, *, is_fenced: bool = False) -> tuple[Any, ...]:
    """Decode the notice in a CONTROL message. Raises for anything else; `is_fenced`: without pickle."""
    return check_notice(load_data(body) if is_fenced else load_plain(body))

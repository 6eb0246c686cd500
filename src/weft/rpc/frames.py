"""Split the parts of a message into frames of bounded size, and join them again. Pure.

A zmq socket has one limit on the size of a frame, before and after the handshake. To keep it small, a part of
FRAME_BYTES or more is sent as several frames: full ones, and a shorter last one, which may be empty. A
shorter part is a single frame.

Invariant: whatever list of parts is split, joining gives it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

Part = bytes | memoryview

FRAME_BYTES = 512 * 1024


def split_parts(parts: Sequence[Part], frame_bytes: int = FRAME_BYTES) -> Sequence[Part]:
    """Return the frames of these parts. Nothing is copied."""
    if max(map(len, parts)) < frame_bytes:
        return parts
    return list(chain.from_iterable(_split(part, frame_bytes) for part in parts))


def _split(part: Part, frame_bytes: int) -> list[Part]:
    if len(part) < frame_bytes:
        return [part]
    view = memoryview(part)
    return [view[start : start + frame_bytes] for start in range(0, len(view) + 1, frame_bytes)]


def join_frames(frames: Sequence[Part], frame_bytes: int = FRAME_BYTES) -> list[bytes]:
    """Return the parts of these frames, each copied once. A missing short last frame is tolerated."""
    parts: list[bytes] = []
    start = 0
    for place, frame in enumerate(frames):
        if len(frame) < frame_bytes or place == len(frames) - 1:
            parts.append(bytes(frame) if start == place else b"".join(frames[start : place + 1]))
            start = place + 1
    return parts

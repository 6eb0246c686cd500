"""Parts become frames of bounded size, and come back the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.rpc.frames import FRAME_BYTES, join_frames, split_parts


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=6), st.integers(1, 12))
def test_parts_come_back(parts: list[bytes], frame_bytes: int) -> None:
    frames = split_parts(parts, frame_bytes)
    assert max(map(len, frames)) <= frame_bytes
    assert join_frames([bytes(frame) for frame in frames], frame_bytes) == parts


def test_small_parts_are_not_touched_and_large_ones_not_copied() -> None:
    small, large = b"a" * (FRAME_BYTES - 1), bytearray(2 * FRAME_BYTES)
    assert split_parts([small])[0] is small
    frames = split_parts([small, large])
    assert list(map(len, frames)) == [FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES, 0]
    large[0] = 7
    assert frames[1][0] == 7


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=6))
def test_frames_that_nobody_splits_are_parts_all_the_same(frames: list[bytes]) -> None:
    """Whoever sends them; what they mean is for others to check."""
    assert b"".join(join_frames(frames, 4)) == b"".join(frames)

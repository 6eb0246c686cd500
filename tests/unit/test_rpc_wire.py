"""A message comes back from its parts, large buffers uncopied, and nothing else is taken for a message."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rpc_bodies import wire_fuzz
from weft.rpc import wire
from weft.rpc.wire import (
    INLINE_BYTES,
    Kind,
    Message,
    WireError,
    decode_message,
    encode_message,
)

HEADER_BYTES = len(encode_message(Message(Kind.CALL, 1, 2, 3, b""))[0])

u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
sizes = st.one_of(st.integers(0, 40), st.sampled_from([INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1]))
messages = st.builds(
    Message,
    st.sampled_from(list(Kind)),
    u32,
    u64,
    u64,
    st.binary(max_size=100),
    st.lists(sizes.map(lambda size: bytes([size % 251]) * size), max_size=6),
)


def same(one: Message, other: Message) -> bool:
    buffers = [[bytes(buffer) for buffer in message.buffers] for message in (one, other)]
    return one[:4] == other[:4] and bytes(one.body) == bytes(other.body) and buffers[0] == buffers[1]


@given(messages)
def test_a_message_comes_back(message: Message) -> None:
    parts = encode_message(message)
    assert len(parts) == 1 + sum(len(buffer) > INLINE_BYTES for buffer in message.buffers)
    assert same(decode_message(parts), message)
    assert same(decode_message([memoryview(bytearray(part)) for part in parts]), message)


def test_large_buffers_are_not_copied() -> None:
    small, large = bytearray(INLINE_BYTES), bytearray(INLINE_BYTES + 1)
    message = Message(Kind.RESULT, 1, 2, 3, b"body", [memoryview(small), memoryview(large)])
    parts = encode_message(message)
    assert len(parts) == 2
    decoded = decode_message(parts)
    small[0], large[0] = 7, 7
    assert (decoded.buffers[0][0], decoded.buffers[1][0]) == (0, 7)


def test_body_and_buffers_are_views() -> None:
    first = bytearray(encode_message(Message(Kind.CALL, 1, 2, 3, b"body", [b"buffer"]))[0])
    decoded = decode_message([memoryview(first)])
    first[-1], first[-7] = ord("!"), ord("?")
    assert bytes(decoded.body) == b"bod?"
    assert bytes(decoded.buffers[0]) == b"buffe!"


def altered(
    change: Callable[[bytearray], object], buffers: list[bytes] | None = None
) -> list[memoryview | bytes]:
    first, *rest = encode_message(Message(Kind.CALL, 1, 2, 3, b"body", buffers or []))
    changed = bytearray(first)
    change(changed)
    return [memoryview(changed), *rest]


def put(at: int, form: str, value: int) -> Callable[[bytearray], object]:
    return lambda first: struct.pack_into(form, first, at, value)


LARGE = bytes(INLINE_BYTES + 1)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([], "no parts"),
        ([b""], "0 bytes where a header has 40"),
        ([b"weft" + bytes(35)], "39 bytes where a header has 40"),
        (altered(put(0, "<I", 0)), "begins with"),
        (altered(put(4, "<H", 2)), "version 2"),
        (altered(put(6, "<H", 0)), "kind 0"),
        (altered(put(6, "<H", 6)), "kind 6"),
        (altered(lambda first: first.pop()), "43 bytes where the header says 44"),
        (altered(lambda first: first.append(0)), "45 bytes where the header says 44"),
        (altered(put(32, "<Q", 1 << 63)), "where the header says"),
        ([*encode_message(Message(Kind.CALL, 1, 2, 3, b"")), b""], "2 parts where there are no buffers"),
        (altered(put(12, "<I", 1)), "1 buffers said to be"),
        (altered(put(12, "<I", (1 << 32) - 1)), "4294967295 buffers said to be"),
        (altered(lambda first: first.append(0), [b"a"]), "a first part of 54 bytes where the lengths say 53"),
        (altered(lambda first: first.pop(), [b"a"]), "a first part of 52 bytes where the lengths say 53"),
        (altered(put(40, "<Q", 1 << 62), [b"a"]), "1 parts where the lengths say 2"),
        (altered(put(40, "<Q", INLINE_BYTES), [LARGE]), "2 parts where the lengths say 1"),
        (altered(put(40, "<Q", INLINE_BYTES + 2), [LARGE]), "16385 bytes where the lengths say 16386"),
        (encode_message(Message(Kind.CALL, 1, 2, 3, b"", [LARGE]))[:1], "1 parts where the lengths say 2"),
        ([memoryview(bytes(40)).cast("I")], "must be plain bytes"),
        ([memoryview(bytes(80))[::2]], "must be plain bytes"),
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(parts: list[bytes | memoryview], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode_message(parts)


def test_more_buffers_than_the_limit_are_refused_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BUFFERS", 100)
    with pytest.raises(WireError, match="at most"):
        encode_message(Message(Kind.CALL, 1, 2, 3, b"", [b""] * 101))
    (first,) = encode_message(Message(Kind.CALL, 1, 2, 3, b"", [b""] * 100))
    assert len(decode_message([first]).buffers) == 100
    longer = bytearray(first) + bytes(8)
    struct.pack_into("<I", longer, 12, 101)
    with pytest.raises(WireError, match="buffers said to be"):
        decode_message([longer])


@pytest.mark.parametrize(
    "message",
    [
        Message(Kind.CALL, 1 << 32, 0, 0, b""),
        Message(Kind.CALL, -1, 0, 0, b""),
        Message(Kind.CALL, 0, 1 << 64, 0, b""),
        Message(Kind.CALL, 0, 0, 1 << 64, b""),
    ],
)
def test_a_number_that_does_not_fit_is_refused(message: Message) -> None:
    with pytest.raises(WireError, match="doesn't fit"):
        encode_message(message)


def test_no_frame_fools_the_decoder() -> None:
    tally = wire_fuzz.run_frames(100_000, seed=20)
    assert tally.frames == 100_000
    # Both ways must have been gone often, or the frames show nothing.
    assert tally.accepted > 5_000
    assert tally.refused > 50_000


def test_the_fuzzer_names_the_frame_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode_without_looking(parts: list[bytes]) -> Message:
        return Message(Kind.CALL, 0, 0, 0, bytes(parts[0])[HEADER_BYTES:])

    monkeypatch.setattr(wire_fuzz, "decode_message", decode_without_looking)
    with pytest.raises(AssertionError) as caught:
        wire_fuzz.run_frames(100, seed=3)
    assert "--seed 3 --batch 0, frame 0" in caught.value.__notes__[0]

"""A message comes back from its parts, large buffers uncopied, and nothing else is taken for a message.

Parts become frames of bounded size; what messages hold beside pickles has one form.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.rpc import wire_fuzz
from weft.errors import RefusedError
from weft.rpc import wire
from weft.rpc.frames import FRAME_BYTES, join_frames, split_parts
from weft.rpc.message_forms import (
    check_bools,
    check_buffers,
    check_descriptors,
    check_direct,
    check_forks,
    check_index,
    check_notice,
    check_stub,
)
from weft.rpc.notices import read_notice, write_notice
from weft.rpc.owned import GlobalId
from weft.rpc.tensors import Route, TensorPost
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


# -- parts become frames of bounded size, and come back the same -------------------------------------


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


# -- what messages hold beside pickles has one form, and nothing else passes -------------------------


FAR = Route(1, "worker1", False, {})
DENSE = ("float32", (2, 3), None, False, None, None)


def change(descriptor: tuple[Any, ...], place: int, value: object) -> tuple[Any, ...]:
    return (*descriptor[:place], value, *descriptor[place + 1 :])


TENSORS = [
    torch.ones(2, 3),
    torch.ones(3, 2).t(),
    torch.ones(10, 10)[::2, ::3],
    torch.ones(0, 5),
    torch.tensor(1.0),
    torch.ones(3, dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.ones(2, dtype=torch.complex64),
    torch.ones(5, 5).expand(3, 5, 5),
    torch.empty(3, 3, device="meta"),
    torch.eye(3).to_sparse(),
    torch.ones(100_000),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.layout} {tuple(tensor.shape)}")
def test_what_workers_send_passes(tensor: torch.Tensor) -> None:
    post = TensorPost(0)
    descriptors, buffers = post.pack([tensor], FAR)
    assert check_descriptors(descriptors) == 1
    check_buffers(descriptors, list(map(len, buffers)))
    (again,) = post.unpack(descriptors, buffers, FAR)
    check_bools([again])
    with pytest.raises(RefusedError, match="the bytes of its tensors"):
        check_buffers(descriptors, [*map(len, buffers), 8])
    post.close()


COO = ("sparse_coo", (3,), False, False, (("int64", (1, 1), None, False, None, None), DENSE))


@pytest.mark.parametrize(
    "descriptor",
    [
        *[change(DENSE, 0, dtype) for dtype in ("float99", "qint8", 1, None, ["float32"], "__class__")],
        *[change(DENSE, 1, shape) for shape in ([2, 3], (-1,), (True,), (1.0,), ("2",), (1 << 63,), None)],
        *[change(DENSE, 1, shape) for shape in ((1 << 40, 1 << 40), (0, 1 << 40, 1 << 40), (1,) * 65)],
        *[
            change(DENSE, 2, strides)
            for strides in ((1,), (-1, 1), (1 << 62, 1), (True, 1), [3, 1], (1.0, 1))
        ],
        *[change(DENSE, 3, flag) for flag in (1, None, "True")],
        *[
            change(DENSE, 4, device)
            for device in ("cpu", "cuda:99", "cuda", "cuda:-1", "mps", 0, "meta:0", "")
        ],
        *[change(DENSE, 5, place) for place in ((), ("device", 1), ("back", 1), (1,) * 8, "/etc/passwd", 0)],
        *[change(COO, 0, layout) for layout in ("strided", "sparse_xyz", 1, ["sparse_coo"], None)],
        *[change(COO, 1, shape) for shape in ((-1,), (1 << 62, 4), "3")],
        *[change(COO, 2, flag) for flag in (1, None)],
        *[change(COO, 4, parts) for parts in ((), (DENSE,), (DENSE,) * 3, (COO, COO), [DENSE, DENSE])],
        (),
        None,
        DENSE[:4],
        [*DENSE],
    ],
    ids=repr,
)
def test_descriptions_of_other_forms_are_refused(descriptor: Any) -> None:
    with pytest.raises(RefusedError, match=r"has not the form|memory outside"):
        check_descriptors((descriptor,))


def test_bools_are_bools() -> None:
    check_bools([torch.tensor([True, False]), torch.ones(3)])
    lying = torch.tensor([1, 2], dtype=torch.uint8).view(torch.bool)
    for tensor in (
        lying,
        torch.sparse_coo_tensor(torch.tensor([[0, 1]]), lying, (2,), check_invariants=False),
    ):
        with pytest.raises(RefusedError, match="bools"):
            check_bools([tensor])


CALL: tuple[Any, ...] = (("module", "name"), (1, None), (1,), {"by": 2}, (DENSE,), None)
FORK = (1, (1, 2), (3, 4), 5, False)


def test_indexes_pass() -> None:
    assert check_direct(CALL)[:6] == CALL
    assert check_direct((*CALL, ((0, FORK),)))[6:] == (((0, FORK),), True)
    assert check_direct((0, (None,), (0,), {}, (DENSE,), (7, (0,))))
    assert check_index(((DENSE,), [FORK], (1, (0,)))) == ((DENSE,), [FORK], (1, (0,)))
    check_forks([FORK], 5)
    check_stub(None, 0)


@pytest.mark.parametrize(
    "index",
    [
        None, [], (), CALL[:5], [*CALL], (*CALL, (), ()), (*CALL, [(0, FORK)]), (*CALL, ((9, FORK),)),
        (*CALL, ((0, FORK), (0, FORK))), (*CALL, ((0, FORK, 1),)),
        change(CALL, 0, "name"), change(CALL, 0, ("a",)), change(CALL, 0, (1, 2)), change(CALL, 0, 7),
        change(CALL, 0, True), change(CALL, 0, 0), change(CALL, 1, [1, None]), change(CALL, 1, None),
        change(CALL, 2, (-1,)), change(CALL, 2, (5,)), change(CALL, 2, (True,)), change(CALL, 2, [1]),
        change(CALL, 2, (1, 1)), change(CALL, 2, ()), change(CALL, 3, {1: 2}), change(CALL, 3, []),
        change(CALL, 4, None), change(CALL, 4, (DENSE, DENSE)), change(CALL, 4, [DENSE]),
        change(CALL, 5, (1, ())), change(CALL, 5, (1, (1,))), change(CALL, 5, (-1, (0,))),
        change(CALL, 5, (1, [0])), change(CALL, 5, "x"),
    ],
    ids=repr,
)  # fmt: skip
def test_indexes_of_other_forms_are_refused(index: Any) -> None:
    with pytest.raises(RefusedError, match="has not the form"):
        check_direct(index)
    with pytest.raises(RefusedError, match="has not the form"):
        check_index(index)


@pytest.mark.parametrize(
    "fork",
    [(), None, FORK[:4], change(FORK, 0, -1), change(FORK, 1, (1,)), change(FORK, 2, [3, 4]),
     change(FORK, 3, 6),
     change(FORK, 4, 0), change(FORK, 0, "1"), change(FORK, 1, (1, 1 << 64))],
    ids=repr,
)  # fmt: skip
def test_forged_rrefs_are_refused(fork: Any) -> None:
    with pytest.raises(RefusedError, match="an RRef"):
        check_forks([fork], 5)


NOTICES: list[tuple[Any, ...]] = [
    ("hello", b"{}", None),
    ("hello", b"{}", (1, 2, 3, 4, 5)),
    ("ring",),
    ("to ring",),
    ("fetch", (1, 2), 0),
    ("bye", None),
    ("bye", "it failed"),
    ("lost",),
    ("drop", [((1, 2), (3, 4))]),
    ("fork", (1, 2), (3, 4), 5),
    ("forked", (1, 2), True),
    ("accept", (1, 2)),
    ("context ended", 7),
    ("context reached", 7),
    ("backward failed", 1, 2, 3, ["a", "b", b"c"]),
]


@pytest.mark.parametrize("notice", NOTICES, ids=repr)
@pytest.mark.parametrize("is_fenced", [False, True])
def test_notices_pass(notice: tuple[Any, ...], is_fenced: bool) -> None:
    assert read_notice(write_notice(notice), is_fenced=is_fenced) == notice
    said = tuple([GlobalId(*part) if part == (1, 2) else part for part in notice])
    assert read_notice(write_notice(said), is_fenced=is_fenced) == notice


@pytest.mark.parametrize("notice", NOTICES, ids=repr)
def test_notices_of_other_forms_are_refused(notice: tuple[Any, ...]) -> None:
    others = [
        (*notice, 1),
        notice[:-1],
        *[
            change(notice, place, value)
            for place in range(1, len(notice))
            for value in (-1, (), [1], {}, "\0" * 3)
        ],
    ]
    for other in others:
        if other in (("bye", "\0" * 3),):
            continue
        with pytest.raises(RefusedError):
            check_notice(other)

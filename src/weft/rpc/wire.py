"""Messages to parts, and back. Pure: nothing is sent here, and nothing is ever unpickled.

A message is one part, and one more for each large buffer:

    part 0    header | lengths of the buffers | body | the small buffers, in order
    part 1..  the buffers of more than INLINE_BYTES, in order, uncopied

Invariant: a message has one encoding. Whatever `decode_message` accepts, `encode_message` gives back byte for
byte; it raises WireError for everything else, whoever sent it.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

INLINE_BYTES = 16 * 1024
MAX_BUFFERS = 1 << 20

_MAGIC = b"weft"
_VERSION = 1
# magic, version, kind, sender, number of buffers, call_id, epoch, bytes of the body
_HEADER = struct.Struct("<4sHHIIQQQ")


class WireError(Exception):
    """Something that is no message: the text says where it stops being one."""


class Kind(enum.IntEnum):
    """What a message is about."""

    CALL = 1
    RESULT = 2
    FAILURE = 3
    REMOTE = 4
    CONTROL = 5


_KINDS = {int(kind): kind for kind in Kind}


class Message(NamedTuple):
    """What one worker says to another. Body and buffers are bytes, whatever they mean.

    A tuple, since a frozen dataclass takes as long to make as all the rest of a message takes to encode.
    """

    kind: Kind
    sender: int  # 32 bits
    call_id: int  # 64 bits
    epoch: int  # 64 bits
    body: bytes | memoryview
    buffers: Sequence[bytes | memoryview] = ()


def encode_message(message: Message) -> list[bytes | memoryview]:
    """The parts of a message. Large buffers are not copied: they must not change until they are sent.

    Raises WireError when a number doesn't fit its field, or there are too many buffers.
    """
    return encode_parts(*message)


def encode_parts(
    kind: Kind,
    sender: int,
    call_id: int,
    epoch: int,
    body: bytes | memoryview,
    buffers: Sequence[bytes | memoryview],
) -> list[bytes | memoryview]:
    """The same of a message that was not put together."""
    if len(buffers) > MAX_BUFFERS:
        raise WireError(f"{len(buffers)} buffers in one message; at most {MAX_BUFFERS} fit")
    try:
        header = _HEADER.pack(_MAGIC, _VERSION, kind, sender, len(buffers), call_id, epoch, len(body))
    except struct.error as error:
        raise WireError(f"{kind!r} from {sender}: a number doesn't fit ({error})") from error
    if not buffers:
        return [header + body]  # the usual case, without a loop
    lengths = list(map(len, buffers))
    table = struct.pack(f"<{len(lengths)}Q", *lengths)
    if max(lengths) <= INLINE_BYTES:
        return [b"".join((header, table, body, *buffers))]
    small = [buffer for buffer in buffers if len(buffer) <= INLINE_BYTES]
    large = [buffer for buffer in buffers if len(buffer) > INLINE_BYTES]
    return [b"".join((header, table, body, *small)), *large]


def decode_message(parts: Sequence[bytes | memoryview]) -> Message:
    """The message whose parts these are. Its body and buffers are views of them.

    Raises WireError for anything that is not exactly one message.
    """
    if not parts:
        raise WireError("a message of no parts")
    first = memoryview(parts[0]) if type(parts[0]) is bytes else _check_bytes(parts[0])
    if len(first) < _HEADER.size:
        raise WireError(f"{len(first)} bytes where a header has {_HEADER.size}")
    magic, version, number, sender, num_buffers, call_id, epoch, body_bytes = _HEADER.unpack_from(first)
    if magic != _MAGIC:
        raise WireError(f"it begins with {magic!r} instead of {_MAGIC!r}")
    if version != _VERSION:
        raise WireError(f"version {version} of the format; this is version {_VERSION}")
    kind = _KINDS.get(number)
    if kind is None:
        raise WireError(f"no message is of kind {number}")
    if num_buffers:
        body_end, buffers = _decode_buffers(first, parts, num_buffers, body_bytes)
        return Message(kind, sender, call_id, epoch, first[body_end - body_bytes : body_end], buffers)
    if len(parts) != 1:
        raise WireError(f"{len(parts)} parts where there are no buffers")
    if len(first) != _HEADER.size + body_bytes:
        raise WireError(f"{len(first)} bytes where the header says {_HEADER.size + body_bytes}")
    return Message(kind, sender, call_id, epoch, first[_HEADER.size :])


def _decode_buffers(
    first: memoryview, parts: Sequence[bytes | memoryview], num_buffers: int, body_bytes: int
) -> tuple[int, list[memoryview]]:
    """Where the body ends, and the buffers."""
    # Counts are checked against what is there before anything of that size is made.
    body_start = _HEADER.size + 8 * num_buffers
    if num_buffers > MAX_BUFFERS or body_start > len(first):
        raise WireError(f"{num_buffers} buffers said to be in a first part of {len(first)} bytes")
    lengths = struct.unpack_from(f"<{num_buffers}Q", first, _HEADER.size)
    large_lengths = [length for length in lengths if length > INLINE_BYTES]
    num_parts = 1 + len(large_lengths)
    first_bytes = body_start + body_bytes + sum(lengths) - sum(large_lengths)
    if len(parts) != num_parts:
        raise WireError(f"{len(parts)} parts where the lengths say {num_parts}")
    if len(first) != first_bytes:
        raise WireError(f"a first part of {len(first)} bytes where the lengths say {first_bytes}")
    buffers: list[memoryview] = []
    start, large = body_start + body_bytes, iter(parts[1:])
    for length in lengths:
        if length <= INLINE_BYTES:
            buffers.append(first[start : start + length])
            start += length
        else:
            buffers.append(_check_bytes(next(large)))
            if len(buffers[-1]) != length:
                raise WireError(f"a buffer of {len(buffers[-1])} bytes where the lengths say {length}")
    return body_start + body_bytes, buffers


def _check_bytes(part: bytes | memoryview) -> memoryview:
    view = memoryview(part)
    if type(part) is not bytes and (view.format != "B" or view.ndim != 1 or not view.contiguous):
        raise WireError(f"a part of format {view.format!r} and {view.ndim} dims; it must be plain bytes")
    return view

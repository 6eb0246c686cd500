"""Scalars of a run as TensorBoard's event files, written without TensorBoard.

An event file is a row of records: the length (8 bytes), its checksum, the bytes, their checksum.
Each record is an `Event` in protobuf's wire format, of which four fields are needed:

    Event:   1 wall_time (double), 2 step (int64), 3 file_version (string), 5 summary (Summary)
    Summary: 1 value (Value, repeated)        Value: 1 tag (string), 2 simple_value (float)

Checksums are CRC-32C (Castagnoli), turned and shifted as TFRecord files have them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from weft.errors import ConfigError
from weft.observe.plain_files import opened_folder, write_whole
from weft.observe.reading import RankLog, Run, StepRow

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, with its bits in reverse


def write_tensorboard(run: Run, directory: Path) -> list[Path]:
    """Write one event file for each rank, each into a directory of its own: a run to TensorBoard."""
    paths: list[Path] = []
    for log in run.logs:
        folder = directory / f"rank-{log.rank:05d}"
        begun = log.steps[0].start if log.steps else log.clock
        # By its name TensorBoard knows an event file, and the same run gives the same name again.
        path = folder / f"events.out.tfevents.{int(begun)}.weft"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with opened_folder(folder) as opened:
                write_whole(path, encode_rank(log), folder=opened)
        except OSError as error:
            raise ConfigError(f"can't write into {folder}: {error.strerror or error}.") from error
        paths.append(path)
    return paths


def encode_rank(log: RankLog) -> Iterator[bytes]:
    """The event file of one rank, record by record."""
    begun = log.steps[0].start if log.steps else 0.0
    yield encode_record(encode_event(begun, version="brain.Event:2"))
    for step in log.steps:
        yield encode_record(encode_event(step.end, step.step, _scalars(step)))


def _scalars(step: StepRow) -> dict[str, float]:
    scalars = {
        "step_secs": step.secs,
        "compute_secs": step.compute_secs,
        "comm_secs": step.comm_secs,
        "wait_secs": step.wait_secs,
        "memory_bytes": float(step.memory_bytes),
        **step.scalars,
    }
    if "tokens" in step.scalars and step.secs > 0:
        scalars["tokens_per_sec"] = step.scalars["tokens"] / step.secs
    return scalars


def encode_event(
    wall_secs: float, step: int = 0, scalars: dict[str, float] | None = None, version: str = ""
) -> bytes:
    """An Event: a file's first, with its version, or the scalars of a step."""
    event = _key(1, 1) + struct.pack("<d", wall_secs)
    if step:
        event += _key(2, 0) + encode_varint(step & (2**64 - 1))
    if version:
        event += _sized(3, version.encode())
    if scalars is not None:
        values = b"".join(
            _sized(1, _sized(1, tag.encode()) + _key(2, 5) + struct.pack("<f", _as_float32(value)))
            for tag, value in scalars.items()
        )
        event += _sized(5, values)
    return event


def encode_record(content: bytes) -> bytes:
    """The bytes with their length and both checksums."""
    length = struct.pack("<Q", len(content))
    return length + _checksum(length) + content + _checksum(content)


def encode_varint(number: int) -> bytes:
    """A number of no fixed length: seven bits a byte, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def crc32c(content: bytes) -> int:
    """Castagnoli's CRC of the bytes."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _make_table() -> tuple[int, ...]:
    table: list[int] = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_TABLE = _make_table()


def _checksum(content: bytes) -> bytes:
    crc = crc32c(content)
    turned = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return struct.pack("<I", (turned + 0xA282EAD8) & 0xFFFFFFFF)


def _key(number: int, wire_type: int) -> bytes:
    return encode_varint(number << 3 | wire_type)


def _sized(number: int, content: bytes) -> bytes:
    return _key(number, 2) + encode_varint(len(content)) + content


def _as_float32(value: float) -> float:
    """What fits: a float32 that can't hold a number is infinite."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return value

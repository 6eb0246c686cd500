"""Pickles written by hand, opcode by opcode: what no pickler would write."""

from __future__ import annotations

import pickle
import struct


def program(*opcodes: bytes) -> bytes:
    """A pickle of these opcodes."""
    return b"\x80\x05" + b"".join(opcodes) + pickle.STOP


def text(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return pickle.SHORT_BINUNICODE + struct.pack("B", len(encoded)) + encoded


def number(value: int) -> bytes:
    return pickle.LONG1 + b"\x08" + value.to_bytes(8, "little", signed=True)


def named(module: str, qualname: str) -> bytes:
    return text(module) + text(qualname) + pickle.STACK_GLOBAL


def parts(*items: bytes) -> bytes:
    """A tuple."""
    return pickle.MARK + b"".join(items) + pickle.TUPLE


def listed(*items: bytes) -> bytes:
    return pickle.EMPTY_LIST + pickle.MARK + b"".join(items) + pickle.APPENDS


def mapped(**items: bytes) -> bytes:
    pairs = b"".join(text(name) + value for name, value in items.items())
    return pickle.EMPTY_DICT + pickle.MARK + pairs + pickle.SETITEMS


def call(function: bytes, *args: bytes) -> bytes:
    return function + parts(*args) + pickle.REDUCE


def made(kind: bytes, *args: bytes) -> bytes:
    return kind + parts(*args) + pickle.NEWOBJ


def built(target: bytes, state: bytes) -> bytes:
    return target + state + pickle.BUILD

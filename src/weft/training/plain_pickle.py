"""Decode the pickles of checkpoints to plain data: nothing is imported, called or built.

A class or a function becomes a Name, and a call of one a Made with its arguments. Their interpretation is the
caller's, who expects few of them. Only the opcodes that torch writes for such files are known.

Invariant: time and memory are linear in the number of bytes, for any bytes. Values may be shared, and may
contain themselves: code that walks them must count its steps.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

_MARK = object()
_MOST_INT_BYTES = 9  # of an integer: 64 bits and its sign


class Name(str):
    """A class or a function, as "module.name"."""

    __slots__ = ()


class Made:
    """A call that was not made: `name` with `args`, and the state that its result would have been given."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: Name, args: tuple[Any, ...]) -> None:
        self.name = name
        self.args = args
        self.state: Any = None


class Persistent:
    """A persistent id: the key of an object outside of the pickle."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key


class PickleError(ValueError):
    """The bytes are not a pickle of a checkpoint."""


def read_pickle(content: bytes) -> Any:
    """Decode a pickle to dicts, lists, tuples, texts, numbers, Name, Made and Persistent.

    Raises PickleError for anything else.
    """
    try:
        return _Reading(content).run()
    except (IndexError, struct.error, UnicodeError, TypeError, OverflowError) as error:
        raise PickleError(f"a pickle that ends early, or is damaged ({type(error).__name__})") from None


class _Reading:
    """One pickle being decoded: a stack of values and marks, and the memo."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        content = self._content
        while True:
            opcode = content[self._at]
            self._at += 1
            if opcode == _STOP:
                if len(self._stack) != 1 or self._stack[0] is _MARK:
                    raise PickleError("a pickle that does not hold exactly one value")
                return self._stack[0]
            act = _ACTS.get(opcode)
            if act is None:
                raise PickleError(f"a pickle with opcode {opcode:#04x}, which no checkpoint has")
            act(self)

    def take(self, count: int) -> bytes:
        end = self._at + count
        if count > len(self._content) - self._at:
            raise PickleError("a pickle that ends early")
        piece = self._content[self._at : end]
        self._at = end
        return piece

    def number(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise PickleError("a pickle whose marks don't match")
        return value

    def top(self, kind: type[Any]) -> Any:
        value = self._stack[-1]
        if type(value) is not kind:
            raise PickleError(f"a pickle that uses a {type(value).__name__} as a {kind.__name__}")
        return value

    def pop_to_mark(self) -> list[Any]:
        stack = self._stack
        at = len(stack) - 1
        while stack[at] is not _MARK:  # raises IndexError if the stack is empty
            at -= 1
            if at < 0:
                raise PickleError("a pickle that lacks a mark")
        values = stack[at + 1 :]
        del stack[at:]
        return values

    def memoize(self, number: int) -> None:
        if self._stack[-1] is _MARK:
            raise PickleError("a pickle with a mark in its memo")
        self._memo[number] = self._stack[-1]

    def memoize_next(self) -> None:
        self.memoize(len(self._memo))

    def push_memo(self, number: int) -> None:
        if number not in self._memo:
            raise PickleError("a pickle that refers to a memo entry that does not exist")
        self.push(self._memo[number])

    def push_text(self, size: int) -> None:
        self.push(self.take(size).decode())

    def push_long(self) -> None:
        size = self.number("<B")
        if size > _MOST_INT_BYTES:
            raise PickleError(
                f"a pickle with an integer of {size} bytes, of which {_MOST_INT_BYTES} are the limit"
            )
        self.push(int.from_bytes(self.take(size), "little", signed=True))

    def push_global(self) -> None:
        """GLOBAL: two lines of text."""
        lines: list[str] = []
        for _ in range(2):
            end = self._content.find(b"\n", self._at, self._at + 300)
            if end < 0:
                raise PickleError("a pickle with a name that does not end")
            lines.append(self.take(end - self._at).decode())
            self._at += 1
        self.push(Name(".".join(lines)))

    def push_stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        if type(name) is not str or type(module) is not str or len(name) + len(module) > 300:
            raise PickleError("a pickle with a global name that is not a short text")
        self.push(Name(f"{module}.{name}"))

    def make(self) -> None:
        """REDUCE and NEWOBJ."""
        args, name = self.pop(), self.pop()
        if type(args) is not tuple or type(name) is not Name:
            raise PickleError("a pickle that calls something other than a global name with a tuple")
        self.push(Made(name, args))

    def build(self) -> None:
        state, made = self.pop(), self.top(Made)
        if made.state is not None:
            raise PickleError("a pickle that sets the state of an object twice")
        made.state = state

    def tuple_of(self, count: int) -> None:
        values = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(values)))

    def append(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        if len(values) % 2:
            raise PickleError("a pickle with a key that has no value")
        found = self.top(dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            # Keys whose hashes can't be chosen to collide, which would make a dict slow.
            is_small = type(key) is int and abs(key) < 2**31
            if not is_small and type(key) not in (str, Made):
                raise PickleError(f"a pickle with a {type(key).__name__} as a key")
            found[key] = value


_STOP = ord(".")
_ACTS: Mapping[int, Callable[[_Reading], None]] = {
    0x80: lambda pickle: _ignore(pickle.take(1)),  # PROTO
    0x95: lambda pickle: _ignore(pickle.take(8)),  # FRAME
    ord("("): lambda pickle: pickle.push(_MARK),
    ord("}"): lambda pickle: pickle.push({}),
    ord("]"): lambda pickle: pickle.push([]),
    ord(")"): lambda pickle: pickle.push(()),
    ord("N"): lambda pickle: pickle.push(None),
    0x88: lambda pickle: pickle.push(True),
    0x89: lambda pickle: pickle.push(False),
    ord("K"): lambda pickle: pickle.push(pickle.number("<B")),
    ord("M"): lambda pickle: pickle.push(pickle.number("<H")),
    ord("J"): lambda pickle: pickle.push(pickle.number("<i")),
    ord("G"): lambda pickle: pickle.push(pickle.number(">d")),
    0x8A: _Reading.push_long,
    0x8C: lambda pickle: pickle.push_text(pickle.number("<B")),
    ord("X"): lambda pickle: pickle.push_text(pickle.number("<I")),
    ord("c"): _Reading.push_global,
    0x93: _Reading.push_stack_global,
    0x94: _Reading.memoize_next,
    ord("q"): lambda pickle: pickle.memoize(pickle.number("<B")),
    ord("r"): lambda pickle: pickle.memoize(pickle.number("<I")),
    ord("h"): lambda pickle: pickle.push_memo(pickle.number("<B")),
    ord("j"): lambda pickle: pickle.push_memo(pickle.number("<I")),
    0x85: lambda pickle: pickle.tuple_of(1),
    0x86: lambda pickle: pickle.tuple_of(2),
    0x87: lambda pickle: pickle.tuple_of(3),
    ord("t"): lambda pickle: pickle.push(tuple(pickle.pop_to_mark())),
    ord("a"): lambda pickle: pickle.append([pickle.pop()]),
    ord("e"): lambda pickle: pickle.append(pickle.pop_to_mark()),
    ord("s"): lambda pickle: pickle.set_items([*reversed([pickle.pop(), pickle.pop()])]),
    ord("u"): lambda pickle: pickle.set_items(pickle.pop_to_mark()),
    ord("R"): _Reading.make,
    0x81: _Reading.make,
    ord("b"): _Reading.build,
    ord("Q"): lambda pickle: pickle.push(Persistent(pickle.pop())),
}


def _ignore(_: bytes) -> None:
    """An operand that is not needed: the protocol, or the length of a frame."""

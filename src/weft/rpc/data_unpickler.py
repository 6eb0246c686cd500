"""Unpickler for plain data: interprets the opcodes that weft's workers write, and refuses all others.

Values are built here, opcode by opcode, in Python: numbers, texts, bytes and containers of them. Opcodes that
look something up, call it or change it are refused; fenced_unpickler.py allows some of them.

Invariants, for any bytes:

- nothing is looked up, imported, called or changed but the containers that this message itself has made;
- memory is bounded by the message's length: a length field is checked against the bytes left before anything
  is allocated, the memo can only be appended to, and a container referred to several times counts each time,
  so that a short message can't expand without limit;
- no container contains itself or is nested deeper than MAX_DEPTH, so that any walk through it ends.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

from weft.errors import RefusedError

MAX_DEPTH = 256
MAX_CONTAINERS = 1 << 22
MAX_INT_BYTES = 16 << 10  # turning a number into text, or dividing it, takes the square of its length
_MAX_KEY_PARTS = 10_000  # hashing a tuple goes through all that is in it, each time
_FREE_PARTS = 1 << 20  # parts of containers that even the shortest message may have

_ATOMS = frozenset((int, float, bool, str, bytes, complex, type(None)))
_U8, _U16, _U32, _U64 = (struct.Struct(f"<{code}") for code in "BHIQ")
_I32, _F64 = struct.Struct("<i"), struct.Struct(">d")
_MUTABLE = frozenset((list, dict, set))

Handler = Callable[[Any], None]


def refusal(why: str) -> RefusedError:
    """Make the error for a message that is refused."""
    return RefusedError(
        f"a message of a peer was refused: {why}. This worker reads only what its option `allow` lists, and "
        "plain data (TensorPipeRpcBackendOptions(allow=[...]))."
    )


class DataUnpickler:
    """Reads one pickle. Raises RefusedError for anything but plain data in protocol 5."""

    def __init__(self, body: bytes | memoryview) -> None:
        self._body = bytes(body)  # a copy: the sender may still be able to write to the original
        self._at = 2
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the parts of the stack under each mark
        self._memo: list[Any] = []
        self._sizes: dict[int, tuple[int, int]] = {}  # of containers, by id: parts written out, depth
        self._made: list[Any] = []  # keeps them alive, so that no id is reused
        self._open: set[int] = set()  # ids of those that may still be filled: they are in no other one yet
        self._max_parts = _FREE_PARTS + 8 * len(self._body)
        self._calling = False  # users' code runs, or has raised: its errors pass through

    def load(self) -> Any:
        """Return the value that the pickle holds."""
        body = self._body
        if body[:2] != b"\x80\x05":
            raise refusal("it is not a pickle of protocol 5")
        try:
            while True:
                code = body[self._at]
                self._at += 1
                if code == 0x2E:
                    break
                _HANDLERS[code](self)
            (value,) = self._stack
        except (IndexError, ValueError) as error:
            if self._calling or isinstance(error, RefusedError):
                raise
            raise refusal("it ends too early, or takes more from the stack than there is") from error
        if self._below or self._at != len(body):
            raise refusal("it has bytes behind its end, or an open mark")
        return value

    # Opcodes beyond plain data: FencedUnpickler allows some

    def find_global(self, module: object, name: object) -> Any:
        """Look up a global name."""
        raise refusal(f"it names {module}.{name} where only plain data is expected")

    def call(self, function: Any, args: object) -> Any:
        """Return the result of a call."""
        raise refusal(f"it calls {_shown(function)}")

    def make(self, kind: Any, args: object, kwargs: object) -> Any:
        """Return a new object of a class."""
        raise refusal(f"it makes a {_shown(kind)}")

    def set_state(self, target: Any, state: Any) -> None:
        """Give an object its state."""
        raise refusal(f"it tried to change {_shown(target)}")

    def extend(self, target: Any, items: list[Any]) -> None:
        """Append items to an object other than a list of this message."""
        raise refusal(f"it tried to change {_shown(target)}")

    def update(self, target: Any, items: list[Any]) -> None:
        """Set alternating keys and values of an object other than a dict of this message."""
        raise refusal(f"it tried to change {_shown(target)}")

    def next_buffer(self) -> Any:
        """Return the next of the message's buffers."""
        raise refusal("it refers to a buffer that the message does not have")

    # Bytes

    def _bytes(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._body):
            raise refusal(f"a field of {num_bytes} bytes is longer than the rest of the message")
        found = self._body[self._at : end]
        self._at = end
        return found

    def _number(self, form: struct.Struct) -> int:
        (number,) = form.unpack(self._bytes(form.size))
        return number

    def _counted(self, form: struct.Struct) -> bytes:
        return self._bytes(self._number(form))

    # Containers

    def add_container(self, made: Any, items: Sequence[Any], *, is_open: bool = False) -> Any:
        """Register an object that holds these; `is_open`: it may be filled until it is put into another."""
        parts, depth = self.measure(items)
        if len(self._made) >= MAX_CONTAINERS:
            raise refusal(f"it has more than {MAX_CONTAINERS:,} containers")
        self._made.append(made)
        self._sizes[id(made)] = parts, depth
        if is_open:
            self._open.add(id(made))
        return made

    def measure(self, items: Sequence[Any]) -> tuple[int, int]:
        """Return the number of parts and the depth of a container with these items; closes the items."""
        parts, depth = 1 + len(items), 1
        for item in items:
            if type(item) not in _ATOMS and (size := self._sizes.get(id(item))) is not None:
                parts += size[0]
                if size[1] >= depth:
                    depth = size[1] + 1
                self._open.discard(id(item))
        if depth > MAX_DEPTH:
            raise refusal(f"containers are nested more than {MAX_DEPTH} deep")
        if parts > self._max_parts:
            raise refusal("it would be many times as long if everything in it were written out")
        return parts, depth

    def fill(self, target: Any, items: Sequence[Any]) -> None:
        """Register items that are added to an open container."""
        size = self._sizes.get(id(target))
        parts, depth = self.measure(items)
        # After measuring: a container that is put into itself is closed by then.
        if size is None or id(target) not in self._open:
            raise refusal(
                "it fills a container that is not of this message, or that is in another one already"
            )
        if parts + size[0] > self._max_parts:
            raise refusal("it would be many times as long if everything in it were written out")
        self._sizes[id(target)] = parts + size[0], max(depth, size[1])

    def is_open(self, target: Any) -> bool:
        """Whether this is a container of this message that may still be filled."""
        return id(target) in self._open

    def check_key(self, key: Any) -> None:
        """Refuse a key that can't be hashed, or takes long to hash."""
        if type(key) in _ATOMS:
            return
        num_left, pending = _MAX_KEY_PARTS, [key]
        while pending:
            part = pending.pop()
            if type(part) in _MUTABLE or type(part) is bytearray:
                raise refusal(f"a {type(part).__name__} is used as a key")
            if type(part) is tuple:
                pending += cast("tuple[Any, ...]", part)
                num_left -= len(cast("tuple[Any, ...]", part))
                if num_left < 0:
                    raise refusal(f"a key has more than {_MAX_KEY_PARTS:,} parts")

    def pop_mark(self) -> list[Any]:
        """Remove the last mark; return the values above it."""
        items, self._stack = self._stack, self._below.pop()
        return items

    # Opcodes: each pops its operands and pushes its result

    def _refuse(self) -> NoReturn:
        code = self._body[self._at - 1]
        if code in (0x82, 0x83, 0x84):
            raise refusal(f"it names something by the number {self._body[self._at]}")
        raise refusal(f"it has the opcode {code:#04x}, which weft's workers don't write")

    def _on_frame(self) -> None:
        if self._number(_U64) > len(self._body) - self._at:
            raise refusal("a frame is longer than the message")

    def _on_mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _on_pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self.pop_mark()

    def _on_long(self, form: struct.Struct) -> None:
        num_bytes = self._number(form)
        if num_bytes > MAX_INT_BYTES:
            raise refusal(f"a number of {num_bytes:,} bytes; {MAX_INT_BYTES:,} are the limit")
        self._stack.append(int.from_bytes(self._bytes(num_bytes), "little", signed=True))

    def _on_text(self, form: struct.Struct) -> None:
        try:
            self._stack.append(self._counted(form).decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            raise refusal("a text is not UTF-8") from None

    def _on_tuple(self, num_items: int) -> None:
        stack = self._stack
        items = tuple(stack[-num_items:])
        if len(items) < num_items:
            raise IndexError(num_items)
        stack[-num_items:] = [self.add_container(items, items)]

    def _on_marked_tuple(self) -> None:
        items = tuple(self.pop_mark())
        self._stack.append(self.add_container(items, items))

    def _on_list(self) -> None:
        self._stack.append(self.add_container([], (), is_open=True))

    def _on_dict(self) -> None:
        self._stack.append(self.add_container({}, (), is_open=True))

    def _on_set(self) -> None:
        self._stack.append(self.add_container(set(), (), is_open=True))

    def _on_frozenset(self) -> None:
        items = self.pop_mark()
        for item in items:
            self.check_key(item)
        self._stack.append(self.add_container(frozenset(items), items))

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is list:
            self.fill(target, items)
            target.extend(items)
        else:
            self.extend(target, items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if len(items) % 2:
            raise refusal("a key has no value")
        if type(target) is not dict:
            self.update(target, items)
            return
        self.fill(target, items)
        for at in range(0, len(items), 2):
            self.check_key(items[at])
            target[items[at]] = items[at + 1]

    def _on_set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items([key, value])

    def _on_set_items(self) -> None:
        self._set_items(self.pop_mark())

    def _on_add_items(self) -> None:
        items = self.pop_mark()
        target = self._stack[-1]
        if type(target) is not set:
            raise refusal(f"it tried to change {_shown(target)}")
        self.fill(target, items)
        for item in items:
            self.check_key(item)
        target.update(items)

    def _on_get(self, form: struct.Struct) -> None:
        number = self._number(form)
        if number >= len(self._memo):
            raise refusal("it refers to a memo entry that does not exist")
        self._stack.append(self._memo[number])

    def _on_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._stack.append(self.find_global(module, name))

    def _on_reduce(self) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        self._stack.append(self.call(function, args))

    def _on_new(self) -> None:
        args, kind = self._stack.pop(), self._stack.pop()
        self._stack.append(self.make(kind, args, {}))

    def _on_new_named(self) -> None:
        kwargs, args, kind = self._stack.pop(), self._stack.pop(), self._stack.pop()
        self._stack.append(self.make(kind, args, kwargs))

    def _on_build(self) -> None:
        state = self._stack.pop()
        self.set_state(self._stack[-1], state)

    def _on_buffer(self) -> None:
        self._stack.append(self.next_buffer())

    def _on_readonly(self) -> None:
        buffer = self._stack[-1]
        if type(buffer) is not bytearray and type(buffer) is not memoryview:
            raise refusal(f"it uses a {type(buffer).__name__} as a buffer")
        self._stack[-1] = memoryview(buffer).toreadonly()


def _shown(value: object) -> str:
    """Describe a value for an error without its __repr__, which may be users' code."""
    name = getattr(value, "__qualname__", None) if isinstance(value, type | Callable) else None
    return name if type(name) is str else f"a {type(value).__name__}"


def _make_handlers() -> list[Handler]:
    own = DataUnpickler
    table: list[Handler] = [own._refuse] * 256  # pyright: ignore[reportPrivateUsage]

    def push(make: Callable[[Any], Any]) -> Handler:
        return lambda reader: reader._stack.append(make(reader))

    def with_form(handler: Callable[[Any, Any], None], form: Any) -> Handler:
        return lambda reader: handler(reader, form)

    for code, handler in {
        0x95: own._on_frame,
        0x28: own._on_mark,
        0x30: own._on_pop,
        0x31: lambda reader: reader.pop_mark(),
        0x4E: push(lambda _: None),
        0x88: push(lambda _: True),
        0x89: push(lambda _: False),
        0x4A: push(lambda reader: reader._number(_I32)),
        0x4B: push(lambda reader: reader._bytes(1)[0]),
        0x4D: push(lambda reader: reader._number(_U16)),
        0x8A: with_form(own._on_long, _U8),
        0x8B: with_form(own._on_long, _U32),
        0x47: push(lambda reader: reader._number(_F64)),
        0x43: push(lambda reader: reader._counted(_U8)),
        0x42: push(lambda reader: reader._counted(_U32)),
        0x8E: push(lambda reader: reader._counted(_U64)),
        0x96: push(lambda reader: bytearray(reader._counted(_U64))),
        0x97: own._on_buffer,
        0x98: own._on_readonly,
        0x8C: with_form(own._on_text, _U8),
        0x58: with_form(own._on_text, _U32),
        0x8D: with_form(own._on_text, _U64),
        0x29: push(lambda _: ()),
        0x85: with_form(own._on_tuple, 1),
        0x86: with_form(own._on_tuple, 2),
        0x87: with_form(own._on_tuple, 3),
        0x74: own._on_marked_tuple,
        0x5D: own._on_list,
        0x61: lambda reader: reader._append([reader._stack.pop()]),
        0x65: lambda reader: reader._append(reader.pop_mark()),
        0x7D: own._on_dict,
        0x73: own._on_set_item,
        0x75: own._on_set_items,
        0x8F: own._on_set,
        0x90: own._on_add_items,
        0x91: own._on_frozenset,
        0x94: lambda reader: reader._memo.append(reader._stack[-1]),
        0x68: with_form(own._on_get, _U8),
        0x6A: with_form(own._on_get, _U32),
        0x93: own._on_global,
        0x52: own._on_reduce,
        0x81: own._on_new,
        0x92: own._on_new_named,
        0x62: own._on_build,
    }.items():
        table[code] = handler
    return table


_HANDLERS = _make_handlers()


def load_data(body: bytes | memoryview) -> Any:
    """Read a pickle of plain data. Raises RefusedError for anything else."""
    return DataUnpickler(body).load()

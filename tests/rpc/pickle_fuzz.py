"""Feed pickles that no worker wrote to the fence of a worker with `allow=`.

    scripts/fence_fuzz --pickles 1000000 --seed 7

Most are programs of opcodes, made by a grammar that knows what each opcode takes: names of all kinds, calls,
states, items, references, lengths that lie. The others are pickles of real objects that were changed a
little. Whatever is in them: no code runs but that of the listed names, nothing that was there before is
changed, and the process neither dies nor grows.

Pickles come in batches; the seed of a batch follows from the run's seed and the batch's number, so that a
failure can be had again with `--batch`.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import pickle
import random
import resource
import struct
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.rpc.canary import canary
from tests.rpc.pickle_opcodes import number, parts, program, text
from weft.errors import RefusedError
from weft.rpc.fence import Fence
from weft.rpc.pickling import pickle_object

BATCH_PICKLES = 2_000
GROWTH_BYTES = 64 << 20


class Unlisted(Exception):
    """Raised by what no message may run."""


def listed(*args: object, **kwargs: object) -> object:
    """The function that may be called."""
    return args[0] if args else None


def unlisted(*args: object, **kwargs: object) -> object:
    raise Unlisted


class Listed:
    total = 0
    __slots__ = ("__dict__", "item")

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.item = args

    def method(self, *args: object) -> int:
        return len(args)

    @property
    def prop(self) -> int:
        raise Unlisted

    @prop.setter
    def prop(self, value: object) -> None:
        raise Unlisted


class ListedDict(dict[Any, Any]):
    pass


class ListedList(list[Any]):
    pass


class ListedError(Exception):
    pass


class Stateful:
    def __setstate__(self, state: object) -> None:
        self.state = state


HERE = __name__
ALLOW = [
    f"{HERE}.{name}" for name in ("listed", "Listed", "ListedDict", "ListedList", "ListedError", "Stateful")
]
NAMES: list[tuple[str, str]] = [
    *[(HERE, name) for name in ("listed", "Listed", "ListedDict", "ListedList", "ListedError", "Stateful")]
    * 3,
    *[
        (HERE, name)
        for name in (
            "unlisted",
            "listed.__globals__",
            "Listed.__init__",
            "Listed.method",
            "Listed.prop",
            "Listed.__dict__",
            "pickle.loads",
            "torch.load",
            "ALLOW",
            "Unlisted",
        )
    ],
    *[
        ("builtins", name)
        for name in (
            "eval",
            "exec",
            "getattr",
            "type",
            "object",
            "list",
            "dict",
            "set",
            "range",
            "slice",
            "complex",
            "bytes",
            "bytearray",
            "int",
            "str",
            "ValueError",
            "ImportError",
            "OSError",
            "SyntaxError",
            "UnicodeDecodeError",
            "SystemExit",
            "ExceptionGroup",
            "StopIteration",
            "AttributeError",
            "Ellipsis",
            "open",
        )
    ],
    *[
        ("collections", name)
        for name in ("OrderedDict", "Counter", "deque", "defaultdict", "abc.sys.modules")
    ],
    *[("datetime", name) for name in ("date", "datetime", "time", "timedelta", "timezone")],
    *[("torch", name) for name in ("Size", "device", "float32", "load", "classes", "Tensor", "strided")],
    *[
        ("torch._utils", name)
        for name in ("_rebuild_parameter", "_rebuild_parameter_with_state", "_rebuild_tensor")
    ],
    *[("weft.errors", name) for name in ("PeerError", "LaunchError", "RefusedError", "annotations")],
    *[("weft.rpc.pickling", name) for name in ("_tensor_at", "_named", "unpickle_object")],
    *[("weft.rpc.proxy", name) for name in ("call_method", "run_backward", "registry.current_agent")],
    ("decimal", "Decimal"),
    ("fractions", "Fraction"),
    ("uuid", "UUID"),
    ("os", "system"),
    ("posix", "system"),
    ("weft.rpc.rref", "rebuild_rref"),
    ("weft.rpc.rref", "RRef"),
    ("weft.rpc.workers", "WorkerInfo"),
    ("weft.rpc.remote_module", "RemoteModule"),
    ("weft.rpc.remote_module", "receive_remote_module"),
    ("copyreg", "_reconstructor"),
    ("functools", "partial"),
    ("subprocess", "Popen"),
    ("ctypes", "CDLL"),
    ("", ""),
]
TEXTS = (
    "",
    "x",
    "item",
    "total",
    "prop",
    "__class__",
    "__dict__",
    "method",
    "_metadata",
    "int",
    "name",
    "name_from",
    "args",
    "__cause__",
    "__notes__",
    "os",
    "system",
    "cpu",
    "cuda",
    "1e9",
    "-1/2",
    "\udc80",
    "a" * 200,
)
NUMBERS = (0, 1, -1, 2, 7, 255, 1 << 31, (1 << 63) - 1, -(1 << 63))
LENGTHS = (0, 1, 255, 1 << 16, (1 << 31) - 1, (1 << 32) - 1)
ATOMS = (
    b"N",
    pickle.NEWTRUE,
    pickle.NEWFALSE,
    b")",
    b"]",
    b"}",
    pickle.EMPTY_SET,
    b"G" + bytes(8),
    b"C\x04\x07\xe6\x02\x01",
    b"C\x0a\x07\xe6\x02\x01" + bytes(6),
    b"\x96" + struct.pack("<Q", 2) + b"ab",
    b"\x97",
    b"\x8a\x00",
)


class Grammar:
    """Makes opcodes that leave one object on the stack, most of them well formed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._num_memoized = 0

    def value(self, depth: int) -> bytes:
        """The opcodes of one object."""
        rng = self._rng
        make = rng.choice(_KINDS) if depth > 0 else rng.choice(_SIMPLE)
        opcodes = make(self, depth - 1)
        if rng.random() < 0.25:
            self._num_memoized += 1
            opcodes += pickle.MEMOIZE
        return opcodes

    def _atom(self, depth: int) -> bytes:
        return self._rng.choice(ATOMS)

    def _number(self, depth: int) -> bytes:
        rng = self._rng
        return number(rng.choice(NUMBERS)) if rng.random() < 0.7 else b"K" + bytes([rng.randrange(256)])

    def _text(self, depth: int) -> bytes:
        return text(self._rng.choice(TEXTS))

    def _get(self, depth: int) -> bytes:
        return pickle.BINGET + bytes([self._rng.randrange(max(1, min(256, self._num_memoized + 1)))])

    def _name(self, depth: int) -> bytes:
        rng = self._rng
        module, name = rng.choice(NAMES)
        if rng.random() < 0.03:
            return b"c" + module.encode() + b"\n" + name.encode() + b"\n"
        return text(module) + text(name) + pickle.STACK_GLOBAL

    def _values(self, depth: int) -> bytes:
        return b"".join(self.value(depth) for _ in range(self._rng.choice((0, 1, 1, 2, 3, 4))))

    def _pairs(self, depth: int) -> bytes:
        return b"".join(self._text(0) + self.value(depth) for _ in range(self._rng.choice((0, 1, 2))))

    def _tuple(self, depth: int) -> bytes:
        return parts(self._values(depth))

    def _list(self, depth: int) -> bytes:
        return b"](" + self._values(depth) + b"e"

    def _dict(self, depth: int) -> bytes:
        return b"}(" + self._pairs(depth) + b"u"

    def _set(self, depth: int) -> bytes:
        return pickle.EMPTY_SET + b"(" + self._values(depth) + pickle.ADDITEMS

    def _frozenset(self, depth: int) -> bytes:
        return b"(" + self._values(depth) + pickle.FROZENSET

    def _call(self, depth: int) -> bytes:
        function = self._name(0) if self._rng.random() < 0.9 else self.value(depth)
        return function + self._tuple(depth) + pickle.REDUCE

    def _new(self, depth: int) -> bytes:
        if self._rng.random() < 0.2:
            return self._name(0) + self._tuple(depth) + self._dict(depth) + pickle.NEWOBJ_EX
        return self._name(0) + self._tuple(depth) + pickle.NEWOBJ

    def _build(self, depth: int) -> bytes:
        target = self._rng.choice((Grammar._new, Grammar._call, Grammar.value))(self, depth)
        state = self._rng.choice((Grammar._dict, Grammar._tuple, Grammar.value, Grammar._slots))(self, depth)
        return target + state + pickle.BUILD

    def _slots(self, depth: int) -> bytes:
        return self._dict(depth) + self._dict(depth) + pickle.TUPLE2

    def _fill(self, depth: int) -> bytes:
        target = self._rng.choice((Grammar._new, Grammar._call, Grammar.value))(self, depth)
        if self._rng.random() < 0.5:
            return target + b"(" + self._values(depth) + b"e"
        return target + b"(" + self._pairs(depth) + b"u"

    def _lie(self, depth: int) -> bytes:
        rng = self._rng
        code = rng.choice((b"X", b"B", b"\x8b", b"\x8d", b"\x8e", b"\x96", b"\x95", b"j", b"r"))
        return code + struct.pack("<Q", rng.choice(LENGTHS))[: 8 if code in b"\x8d\x8e\x96\x95" else 4]

    def _double(self, depth: int) -> bytes:
        first = self._num_memoized
        times = self._rng.randrange(2, 60)
        self._num_memoized += times
        if first + times > 255:
            return b"N"
        links = (
            pickle.BINGET + bytes([first + index]) + b"\x86" + pickle.MEMOIZE for index in range(times - 1)
        )
        return b")" + pickle.MEMOIZE + b"".join(links)

    def _deep(self, depth: int) -> bytes:
        return b")" + b"\x85" * self._rng.choice((10, 300, 5000))

    def _noise(self, depth: int) -> bytes:
        return self._rng.randbytes(self._rng.choice((1, 2, 5)))


_SIMPLE: list[Callable[[Grammar, int], bytes]] = [
    *[Grammar._atom, Grammar._number, Grammar._text] * 2,
    Grammar._get,
    Grammar._name,
]
_KINDS: list[Callable[[Grammar, int], bytes]] = [
    *_SIMPLE,
    *[Grammar._tuple, Grammar._list, Grammar._dict, Grammar._call, Grammar._new, Grammar._build] * 3,
    Grammar._set,
    Grammar._frozenset,
    Grammar._fill,
    Grammar._fill,
    Grammar._lie,
    Grammar._double,
    Grammar._deep,
    Grammar._noise,
]


def _make_seeds() -> list[bytes]:
    ordered: Any = collections.OrderedDict(a=1)
    ordered._metadata = {"": {"version": 1}}
    made = Listed(1)
    made.more = made  # pyright: ignore[reportAttributeAccessIssue]
    values: list[Any] = [
        (listed, (1, "x", [2, {3: 4}]), {"by": 5}),
        made,
        ListedDict(a=1),
        ListedList([1, 2]),
        ListedError("x"),
        ordered,
        {1, 2},
        frozenset((3,)),
        collections.deque([1], 3),
        collections.defaultdict(list, a=[1]),
        datetime.datetime.now(datetime.UTC),
        datetime.timedelta(1),
        uuid.uuid4(),
        1 + 2j,
        range(5),
        [[]] * 4,
        ValueError("x"),
        ImportError("x", name="y"),
        torch.Size([1]),
        torch.device("cpu"),
        torch.float32,
        torch.nn.Parameter(torch.ones(1)),
        {"k" * 30: b"v" * 300},
        1 << 100,
        ("a", ("b", ("c",))),
    ]
    return [pickle_object(value).body for value in values]


@dataclass
class Tally:
    """What became of the pickles."""

    pickles: int = 0
    read: int = 0
    refused: int = 0
    failed: int = 0  # of what the listed names raised, or the keys of users' own


def make_pickle(rng: random.Random, seeds: list[bytes]) -> bytes:
    """One pickle: of the grammar, of an object and changed, or both."""
    if rng.random() < 0.7:
        return program(Grammar(rng).value(rng.choice((1, 2, 3, 4))))
    body = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(2, len(body))
        draw = rng.random()
        if draw < 0.4:
            body[at] ^= 1 << rng.randrange(8)
        elif draw < 0.6:
            body[at:at] = Grammar(rng).value(1)
        elif draw < 0.8:
            del body[at : at + rng.choice((1, 2, 9))]
        else:
            body[at] = rng.randrange(256)
        if len(body) < 4:
            break
    return bytes(body)


def check_pickle(fence: Fence, body: bytes, tensors: list[torch.Tensor], tally: Tally) -> None:
    """Read one pickle, and hold the fence to its promise."""
    tally.pickles += 1
    try:
        fence.unpickle(body, [b"xy"], tensors)
    except RefusedError:
        tally.refused += 1
    except (TypeError, AttributeError, ValueError, LookupError):  # of the listed code
        tally.failed += 1
    else:
        tally.read += 1


def run_batch(seed: int, batch: int, num_pickles: int, tally: Tally) -> None:
    rng = random.Random(f"{seed}/{batch}")
    fence, tensors, seeds = Fence(ALLOW, _no_rref), [torch.ones(2), torch.zeros(1)], _make_seeds()
    before = _all_there_is()
    for index in range(num_pickles):
        body = make_pickle(rng, seeds)
        try:
            with canary() as heard:
                check_pickle(fence, body, tensors, tally)
            assert heard == [], f"it did {heard}"
            if index % 50 == 0:
                assert before == _all_there_is(), "what was there before has changed"
        except BaseException as error:
            error.add_note(f"--seed {seed} --batch {batch}, pickle {index} of it: {body[:400].hex()}")
            raise
    assert before == _all_there_is(), "what was there before has changed"


def _no_rref(index: int) -> Any:
    raise RefusedError(f"there is no RRef {index} here")


def _all_there_is() -> list[Any]:
    kinds = (
        Listed,
        ListedDict,
        ListedList,
        ListedError,
        Stateful,
        ValueError,
        collections.OrderedDict,
        Fence,
    )
    return [{**vars(thing)} for thing in (*kinds, listed, unlisted)]


def run_pickles(num_pickles: int, seed: int, progress: Callable[[Tally], None] | None = None) -> Tally:
    """Check so many pickles. Raises what one led to that it must not, with the seed in its notes."""
    tally = Tally()
    start_bytes = 0
    for batch in range(-(-num_pickles // BATCH_PICKLES)):
        run_batch(seed, batch, min(BATCH_PICKLES, num_pickles - tally.pickles), tally)
        if batch == 4:
            start_bytes = _peak_bytes()
        elif batch > 4 and (grown := _peak_bytes() - start_bytes) > GROWTH_BYTES:
            raise AssertionError(f"the process grew by {grown:,} bytes in {tally.pickles:,} pickles")
        if progress is not None:
            progress(tally)
    return tally


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/fence_fuzz", description="Fuzz the fence of allow=.")
    parser.add_argument("--pickles", type=int, default=1_000_000, help="how many pickles to check")
    parser.add_argument("--seed", type=int, default=None, help="repeat a run; a new one by default")
    parser.add_argument("--batch", type=int, default=None, help="only this batch of the run")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    if options.batch is not None:
        tally = Tally()
        run_batch(seed, options.batch, BATCH_PICKLES, tally)
        print(f"batch {options.batch}: {tally}")
        return
    started_at = said_at = time.monotonic()

    def say(tally: Tally) -> None:
        nonlocal said_at
        now = time.monotonic()
        if now - said_at >= 5 or tally.pickles >= options.pickles:
            said_at = now
            print(
                f"{tally.pickles:>12,} pickles, {tally.read:,} read, {tally.refused:,} refused, "
                f"{tally.failed:,} failed, {tally.pickles / (now - started_at):,.0f} a second, "
                f"{_peak_bytes() >> 20} MiB, seed {seed}",
                flush=True,
            )

    run_pickles(options.pickles, seed, say)
    print(f"ok: {options.pickles:,} pickles, seed {seed}")


if __name__ == "__main__":
    main()

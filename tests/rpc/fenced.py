"""What a worker with `allow=` has in these tests, what of it is listed, and how it reads a message."""

from __future__ import annotations

import enum
import functools
import os
import pickle
import types
from collections.abc import Callable
from typing import Any, cast

from torch import nn

import weft
from tests.rpc.canary import canary
from tests.rpc.pickle_opcodes import (
    call,
    mapped,
    named,
    number,
    parts,
    text,
)
from weft.rpc.fence import Fence
from weft.rpc.pickling import pickle_object

RAN: list[str] = []


def harmless(*args: object, **kwargs: object) -> tuple[object, ...]:
    return args


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any) -> Any:
        raise PermissionError("the guard says no")

    return checked


@guarded
def behind_guard() -> str:
    RAN.append("what the guard keeps from peers")
    return "taken"


def forbidden(*args: object, **kwargs: object) -> str:
    RAN.append("a function that is not listed")
    return "ran"


class Order:
    total = 0
    __slots__ = ("__dict__", "item")

    def __init__(self, item: str = "") -> None:
        self.item = item

    @property
    def price(self) -> int:
        RAN.append("a property")
        return 1

    @price.setter
    def price(self, value: int) -> None:
        RAN.append("a property was set")

    def pay(self) -> str:
        return self.item


class Single:
    """One for all, that was there before."""

    only: Any = None

    def __new__(cls) -> Single:
        if cls.only is None:
            cls.only = super().__new__(cls)
        return cls.only


class Color(enum.Enum):
    RED = 1


class Bag(dict[str, Any]):
    pass


class LooksLikeRRef(Exception):
    """Listed, and has what an RRef has."""

    def local_value(self) -> Any:
        RAN.append("a value that is no RRef's")
        return os


class MyRRef(weft.rpc.RRef):  # pyright: ignore[reportMissingTypeArgument]
    pass


Alias = types.GenericAlias(MyRRef, (int,))


@functools.lru_cache
def remembering(value: int) -> int:
    return value


class Choices(enum.Enum):
    """Without members, so that a call of it makes another class."""


class Computed:
    """Gives what it computes."""

    def __get__(self, owner: object, kind: object = None) -> Any:
        RAN.append("a descriptor")
        return harmless


class Computes:
    """Of no listed name: a listed function may give one away."""

    cached = functools.cached_property(lambda self: RAN.append("a cached property"))
    computed = Computed()
    of_class = classmethod(cast(Any, property(lambda cls: RAN.append("a property of a class"))))

    @functools.singledispatchmethod
    def dispatched(self, value: object) -> str:
        return "any"


class MyRemote(weft.RemoteModule):
    pass


SHARED = [1, 2, 3]


def shared() -> list[int]:
    return SHARED


def single() -> Single:
    return Single()


HERE = __name__
NAMES = [
    f"{HERE}.{name}"
    for name in (
        "harmless",
        "behind_guard",
        "Order",
        "Single",
        "Color",
        "Bag",
        "LooksLikeRRef",
        "MyRRef",
        "MyRemote",
        "shared",
        "single",
    )
]


def make_fence(names: list[str] | None = None) -> Fence:
    return Fence(NAMES if names is None else names, no_rref)


def no_rref(index: int) -> Any:
    raise AssertionError("there is no RRef in this message")


def read(body: bytes, *, buffers: Any = (), tensors: Any = (), names: list[str] | None = None) -> Any:
    """Read one message, with the canary watching."""
    fence = make_fence(names)
    RAN.clear()
    with canary() as heard:
        try:
            return fence.unpickle(body, buffers, tensors)
        finally:
            assert heard == []
            assert RAN == []


class Reduced:
    """Pickled as it is told."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def reduced(*how: Any) -> bytes:
    return pickle.dumps(Reduced(*how), 5)


ORDER = named(HERE, "Order")
HARMLESS = named(HERE, "harmless")
FORBIDDEN = named(HERE, "forbidden")
SLOTS = parts(pickle.NONE, mapped(total=number(1)))
VALUE_ERROR = call(named("builtins", "ValueError"), text("x"))
MEMO = pickle.MEMOIZE


class Parent:
    def __init__(self) -> None:
        self.children = [Child(self)]


class Child:
    def __init__(self, parent: Parent) -> None:
        self.parent = parent


class Failed(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
        self.detail = {"rows": [1, 2]}


class Stateful:
    def __getstate__(self) -> tuple[str, int]:
        return ("state", 3)

    def __setstate__(self, state: tuple[str, int]) -> None:
        self.seen = state


class Point(tuple[int, ...]):
    pass


def travel(value: object, names: list[str]) -> Any:
    pickled = pickle_object(value)
    return read(pickled.body, buffers=pickled.buffers, tensors=pickled.tensors, names=names)


class Classes(type):
    """A metaclass in a module that is listed."""


class OnItself(nn.Module):
    """Its state is a dict that it takes over, as `nn.Module` does."""

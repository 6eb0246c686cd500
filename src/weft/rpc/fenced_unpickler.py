"""Unpickler for a worker with `allow=`.

To the plain data of data_unpickler.py it adds the following, and nothing else:

- global names that are allowed (allowed.py), and weft's own functions as the function of a call;
- calls of these: the user's with any arguments, plain types with the arguments that pickle writes
  (plain_types.py), weft's own with arguments that they check themselves;
- state and items of objects of the user's classes that this message has made, set as pickle does it: by the
  class's `__setstate__`, else by entries of `__dict__` and slots; never by setattr;
- the tensors and buffers that came with the message.
"""

from __future__ import annotations

import collections
import importlib
import types
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from weft.rpc.allowed import Allowed
from weft.rpc.data_unpickler import DataUnpickler, refusal
from weft.rpc.plain_types import (
    BY_ITEM,
    BY_KEY,
    EXCEPTIONS,
    FACTORIES,
    MAKERS,
    make_exception,
    make_parameter,
    num_copied,
    set_exception_state,
    set_metadata,
    set_uuid_state,
)
from weft.rpc.workers import WorkerInfo, check_name

# Functions that weft's own messages call, with any `allow`. Each checks its arguments.
OWN_CALLS = frozenset(
    (
        "weft.dist_autograd.messages.find_part",
        "weft.dist_autograd.messages.take_gradients",
        "weft.dist_autograd.optimizer.load_local_state",
        "weft.dist_autograd.optimizer.make_local_optimizer",
        "weft.dist_autograd.optimizer.read_local_state",
        "weft.dist_autograd.optimizer.step_local_optimizer",
        "weft.rpc.api._broadcast_to_followers",
        "weft.rpc.api._gather_to_leader",
        "weft.rpc.gathering.fail_gathering",
        "weft.rpc.proxy._rref_typeof_on_owner",
        "weft.rpc.proxy.call_async_method",
        "weft.rpc.proxy.call_method",
        "weft.rpc.proxy.call_plain_method",
        "weft.rpc.proxy._backward_on_owner",
    )
)
# Functions and classes in their arguments.
_PARTS = frozenset(
    (
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
        "weft.rpc.pickling._named",
        "weft.rpc.pickling._tensor_at",
        "weft.rpc.remote_module.RemoteModule",
        "weft.rpc.remote_module.receive_remote_module",
        "weft.rpc.rref.rebuild_rref",
        "weft.rpc.workers.WorkerInfo",
    )
)


_sealed: list[type] = []
_Class = TypeVar("_Class", bound=type)


def sealed(kind: _Class) -> _Class:
    """Mark a class: no message may make objects of it, nor of a user's class that inherits it."""
    _sealed.append(kind)
    return kind


@dataclass(frozen=True, slots=True)
class OwnName:
    """The name of a function or a class of weft's, not looked up yet: as a value it does nothing."""

    full_name: str

    def resolve(self) -> Any:
        """Look it up; the name is one of OWN_CALLS or _PARTS."""
        module, _, name = self.full_name.rpartition(".")
        return getattr(importlib.import_module(module), name)


class FencedUnpickler(DataUnpickler):
    """Reads one pickle of a peer. `rebuild_rref(index)` returns an RRef that came with the message."""

    def __init__(
        self,
        body: bytes | memoryview,
        buffers: Sequence[bytes | memoryview],
        tensors: Sequence[torch.Tensor],
        allow: Allowed,
        rebuild_rref: Callable[[int], Any] | None = None,
    ) -> None:
        super().__init__(body)
        self._buffers = iter(buffers)
        self._tensors = tensors
        self._allow = allow
        self._rebuild_rref = rebuild_rref
        self._num_copied = 0
        self._users: dict[int, Any] = {}  # globals of the user's list that the message names, by id
        self._fresh: dict[int, Any] = {}  # objects of the user's classes that have no state yet
        self._plain: dict[int, Any] = {}  # plain ones that pickle gives a state

    def next_buffer(self) -> Any:
        """Return the next of the message's buffers, copied to memory of this worker."""
        buffer = next(self._buffers, None)
        if buffer is None:
            return super().next_buffer()
        return bytearray(buffer)

    def find_global(self, module: object, name: object) -> Any:
        """Look up a name: of the user's list, a plain class or value, or one of weft's own."""
        if type(module) is not str or type(name) is not str:
            raise refusal("a global name in it is not a text")
        full_name = f"{module}.{name}"
        if full_name in _PARTS:
            return OwnName(full_name)
        if full_name in OWN_CALLS and len(self._memo) <= 2 and not self._stack and not self._below:
            return OwnName(full_name)  # the first thing in a message: the function that is called
        value, is_users = self._allow.find(module, name)
        if is_users:
            self._users[id(value)] = value
        return value

    # Calls

    def call(self, function: Any, args: object) -> Any:
        """Return the result of a call."""
        if type(args) is not tuple:
            raise refusal("the arguments of a call in it are not a tuple")
        args = cast("tuple[Any, ...]", args)
        if type(function) is OwnName:
            return self._call_own(function.full_name, args)
        if isinstance(function, type) and (function in MAKERS or function in EXCEPTIONS):
            return self._call_plain(function, args)
        if id(function) not in self._users:
            return super().call(function, args)
        check_sealed(function)
        return self._note_made(function, self._run(function, *args), args)

    def _call_own(self, name: str, args: tuple[Any, ...]) -> Any:
        name = name.rpartition(".")[2]
        kinds = [type(arg) for arg in args]
        if name == "_tensor_at" and kinds == [int] and 0 <= args[0] < len(self._tensors):
            return self._tensors[args[0]]
        if name == "_named" and kinds == [str, str]:
            if f"{args[0]}.{args[1]}" not in _PARTS:
                return self.find_global(*args)
        elif name == "rebuild_rref" and kinds == [int] and self._rebuild_rref is not None:
            return self._rebuild_rref(args[0])
        elif name == "receive_remote_module" and args:
            kind, *values = args
            if type(kind) is OwnName:
                kind = kind.resolve()
            elif id(kind) not in self._users:
                raise refusal("a RemoteModule of a class that is not allowed")
            return OwnName("weft.rpc.remote_module.receive_remote_module").resolve()(kind, *values)
        elif name == "_rebuild_parameter":
            return make_parameter(args, has_state=False)
        elif name == "_rebuild_parameter_with_state":
            return make_parameter(args, has_state=True)
        raise refusal(f"it calls weft's {name} with arguments that weft's workers don't send")

    def _call_plain(self, kind: type, args: tuple[Any, ...]) -> Any:
        if kind is collections.defaultdict and args:
            factory = args[0]
            is_known = isinstance(factory, type) and factory in FACTORIES
            if factory is not None and not is_known and id(factory) not in self._users:
                raise refusal("the factory of a defaultdict in it is not allowed")
        self._count_copied(num_copied(args))
        try:
            made = make_exception(kind, args) if kind in EXCEPTIONS else MAKERS[kind](args)
        except (ArithmeticError, LookupError, RuntimeError, TypeError) as error:
            raise refusal(f"a {kind.__name__} can't be made of its arguments ({error})") from None
        if kind in EXCEPTIONS:
            self._plain[id(made)] = made
        return self.add_container(made, args, is_open=kind in BY_ITEM or kind in BY_KEY)

    def _count_copied(self, num_parts: int) -> None:
        """Count what is copied into an object: a short message could have one thing copied many times."""
        self._num_copied += num_parts
        if self._num_copied > self._max_parts:
            raise refusal("it would have much of it copied many times over")

    def make(self, kind: Any, args: object, kwargs: object) -> Any:
        """Return a new object of a class."""
        if type(args) is not tuple or type(kwargs) is not dict:
            raise refusal("the arguments of a new object in it are not a tuple and a dict")
        args, kwargs = cast("tuple[Any, ...]", args), cast("dict[Any, Any]", kwargs)
        if not args and not kwargs and (kind is object or kind is uuid.UUID or _is_worker_info(kind)):
            made = object.__new__(WorkerInfo if type(kind) is OwnName else kind)
            self._plain[id(made)] = made
            return made
        if not isinstance(kind, type) or id(kind) not in self._users:
            return super().make(kind, args, kwargs)
        check_sealed(kind)
        if not all(type(name) is str for name in kwargs):
            raise refusal("the name of an argument is not a text")
        new = cast(Any, kind).__new__
        made = self._run(new, kind, *args, **kwargs)
        return self._note_made(kind, made, (*args, *kwargs.values()))

    def _note_made(self, function: Any, made: Any, parts: tuple[Any, ...]) -> Any:
        """Register an object that the message made: it may get a state. Other objects may not."""
        if type(made) is function and _always_makes(function):
            self._fresh[id(made)] = made
        if parts and id(made) not in self._sizes:
            self.add_container(made, parts)
        return made

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run users' code, whose errors pass through."""
        self._calling = True
        result = function(*args, **kwargs)
        self._calling = False
        return result

    # State and items

    def set_state(self, target: Any, state: Any) -> None:
        """Set the state of an object of this message, once."""
        self.measure((state,))
        if self._fresh.pop(id(target), None) is not None:
            self._set_users_state(target, state)
        elif type(target) is collections.OrderedDict and self.is_open(cast(object, target)):
            set_metadata(target, state)
        elif self._plain.pop(id(target), None) is None:
            super().set_state(target, state)
        elif type(target) is uuid.UUID:
            set_uuid_state(target, state)
        elif type(target) is WorkerInfo:
            _set_worker_info(target, state)
        elif isinstance(target, BaseException):
            set_exception_state(target, state, is_users=False)
        else:
            super().set_state(target, state)

    def _set_users_state(self, target: Any, state: Any) -> None:
        set_state = getattr(type(target), "__setstate__", None)
        if isinstance(target, BaseException) and not isinstance(set_state, types.FunctionType):
            set_exception_state(target, state, is_users=True)
            return
        if set_state is not None:
            self._run(set_state, target, state)
            return
        slots: Any = None
        if type(state) is tuple and len(cast("tuple[Any, ...]", state)) == 2:
            state, slots = cast("tuple[Any, Any]", state)
        if state is not None:
            names = _check_names(target, state)
            attributes = getattr(target, "__dict__", None)
            if type(attributes) is not dict:
                raise refusal(f"it sets attributes of a {type(target).__qualname__}, which has no __dict__")
            attributes.update(names)
        if slots is not None:
            for name, value in _check_names(target, slots).items():
                _slot_of(type(target), name).__set__(target, value)

    def extend(self, target: Any, items: list[Any]) -> None:
        """Append items to a deque of this message, or to an object of a user's class."""
        if type(target) in BY_ITEM:
            self.fill(target, items)
            target.extend(items)
        elif id(target) not in self._fresh:
            super().extend(target, items)
        elif hasattr(type(target), "extend"):
            self._run(target.extend, items)
        else:
            for item in items:
                self._run(target.append, item)

    def update(self, target: Any, items: list[Any]) -> None:
        """Set keys and values of a dict of this message, or of an object of a user's class."""
        for key in items[::2]:
            self.check_key(key)
        if type(target) in BY_KEY:
            self.fill(target, items)
        elif id(target) not in self._fresh:
            super().update(target, items)
        for at in range(0, len(items), 2):
            self._run(target.__setitem__, items[at], items[at + 1])


def check_sealed(kind: object) -> None:
    """Raise RefusedError for a class of which no peer may have objects made, and for an alias of one."""
    if not isinstance(kind, type):
        kind = getattr(kind, "__origin__", None)  # of an alias, such as Class[int]
    if not isinstance(kind, type):
        return
    if issubclass(kind, tuple(_sealed)):
        raise refusal(f"it makes a {kind.__qualname__}, which only weft itself may make")
    if issubclass(kind, type):  # the message would choose the module and the name of the new class
        raise refusal(f"it makes a class, by {kind.__qualname__}")


def _is_worker_info(kind: object) -> bool:
    return type(kind) is OwnName and kind.full_name == "weft.rpc.workers.WorkerInfo"


def _set_worker_info(target: WorkerInfo, state: Any) -> None:
    if type(state) is not list or [type(part) for part in cast("list[Any]", state)] != [str, int]:
        raise refusal("the state of a WorkerInfo is not a name and an id")
    name, worker_id = cast("list[Any]", state)
    check_name(name)
    object.__setattr__(target, "name", name)
    object.__setattr__(target, "id", worker_id)


def _always_makes(kind: Any) -> bool:
    """Whether a call of a class always makes a new object: neither it nor its metaclass overrides that."""
    return (
        isinstance(kind, type)
        and type(kind).__call__ is type.__call__
        and type(kind.__new__) is types.BuiltinFunctionType
    )


def _check_names(target: Any, state: Any) -> dict[str, Any]:
    if type(state) is not dict:
        raise refusal(f"the state of a {type(target).__qualname__} is not a dict")
    for name in cast("dict[Any, Any]", state):
        if type(name) is not str or (name.startswith("__") and name.endswith("__")):
            raise refusal(f"it sets {name!r} of a {type(target).__qualname__}")
    return cast("dict[str, Any]", state)


def _slot_of(kind: type, name: str) -> Any:
    """Find the slot of a class written in Python: members of C's classes may not be set."""
    for holder in kind.__mro__:
        slot = vars(holder).get(name)
        if slot is not None:
            if isinstance(slot, types.MemberDescriptorType) and "__slots__" in vars(holder):
                return slot
            break
    raise refusal(f"it sets '{name}' of a {kind.__qualname__}, which has no such slot")

"""Types of plain data that pickle rebuilds by a call, and a maker for each. Pure.

Any peer may name these classes. Their constructors take much more than pickle writes (a range of 10**18
numbers, "1e999999999" as a fraction, a file name to read), so objects are made by the makers here, which
accept only arguments of the form that pickling such an object gives.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import fractions
import uuid
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from weft import errors
from weft.errors import LaunchError, PeerError
from weft.rpc.data_unpickler import refusal
from weft.rpc.tensor_memory import shares_elements

Args = tuple[Any, ...]
_CONTAINERS = "bool bytearray bytes complex dict float frozenset int list object range set slice str tuple"
_OTHERS: tuple[type, ...] = (
    *(getattr(builtins, name) for name in _CONTAINERS.split()),
    *(collections.Counter, collections.OrderedDict, collections.defaultdict, collections.deque),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID, torch.Size, torch.device),
)
EXCEPTIONS: frozenset[type] = frozenset(
    value
    for module in (builtins, errors)
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, BaseException)
)
PLAIN_CLASSES: Mapping[str, type] = {
    f"{kind.__module__}.{kind.__qualname__}": kind for kind in (*_OTHERS, *EXCEPTIONS)
}
PLAIN_VALUES = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
# Factories that a defaultdict may have, beside those of the user's list.
FACTORIES = frozenset((bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple,
                       collections.Counter, collections.OrderedDict, collections.deque))  # fmt: skip
# Containers that are filled after they were made: by items, and by keys and values.
BY_ITEM = frozenset((collections.deque,))
BY_KEY = frozenset((collections.OrderedDict, collections.defaultdict))

# Attributes that exceptions keep outside of their __dict__. ImportError's name_from is not among them: to
# print a traceback Python imports the module of that name.
_OWN_ATTRIBUTES: Mapping[type, tuple[str, ...]] = {
    ImportError: ("name", "path"),
    AttributeError: ("name",),
    NameError: ("name",),
}
_MAX_TEXT_DIGITS = 4300  # Python's own limit on numbers in texts


def _need(is_right: bool, kind: type) -> None:
    if not is_right:
        raise refusal(f"the arguments or the state of a {kind.__name__} are not those that pickle writes")


def _are(args: Args, *kinds: type) -> bool:
    return len(args) == len(kinds) and all(type(arg) is kind for arg, kind in zip(args, kinds, strict=True))


def _complex(args: Args) -> Any:
    _need(_are(args, float, float), complex)
    return complex(*args)


def _range(args: Args) -> Any:
    _need(_are(args, int, int, int), range)
    return range(*args)


def _slice(args: Args) -> Any:
    _need(len(args) == 3, slice)
    return slice(*args)


def _counter(args: Args) -> Any:
    _need(_are(args, dict), collections.Counter)
    return collections.Counter(*args)


def _ordered(args: Args) -> Any:
    _need(not args, collections.OrderedDict)
    return collections.OrderedDict()


def _deque(args: Args) -> Any:
    is_bounded = _are(args, tuple, int) and not args[0] and 0 <= args[1] < 1 << 62
    _need(not args or is_bounded, collections.deque)
    return collections.deque(*args)


def _defaults(args: Args) -> Any:
    _need(len(args) <= 1, collections.defaultdict)  # the factory is the caller's to check
    return collections.defaultdict(*args)


def _whole(state: bytes) -> tuple[int, int, int]:
    return int.from_bytes(state[:2], "big"), state[2], state[3]


def _clock(state: bytes) -> tuple[int, int, int, int]:
    return state[0], state[1], state[2], int.from_bytes(state[3:6], "big")


def _is_state(args: Args, num_bytes: int) -> bool:
    has_zone = len(args) == 2 and isinstance(args[1], datetime.tzinfo)
    return (len(args) == 1 or has_zone) and type(args[0]) is bytes and len(args[0]) == num_bytes


def _date(args: Args) -> Any:
    _need(_is_state(args, 4) and len(args) == 1, datetime.date)
    return datetime.date(*_whole(args[0]))


def _datetime(args: Args) -> Any:
    _need(_is_state(args, 10), datetime.datetime)
    year, month, day = _whole(args[0])
    # Pickle stores the fold in the month's highest bit.
    return datetime.datetime(
        year, month & 0x7F, day, *_clock(args[0][4:]), *args[1:], fold=month >> 7
    )  # raises ValueError for an invalid date


def _time(args: Args) -> Any:
    _need(_is_state(args, 6), datetime.time)
    hour, minute, second, micro = _clock(args[0])
    return datetime.time(hour & 0x7F, minute, second, micro, *args[1:], fold=hour >> 7)


def _timedelta(args: Args) -> Any:
    _need(_are(args, int, int, int), datetime.timedelta)
    return datetime.timedelta(*args)


def _timezone(args: Args) -> Any:
    _need(_are(args, datetime.timedelta) or _are(args, datetime.timedelta, str), datetime.timezone)
    return datetime.timezone(*args)


def _decimal(args: Args) -> Any:
    _need(_are(args, str) and len(args[0]) <= 1 << 16, decimal.Decimal)
    try:
        return decimal.Decimal(*args)
    except decimal.InvalidOperation:
        raise refusal("the text of a Decimal is not a number") from None


def _fraction(args: Args) -> Any:
    if _are(args, str):  # as Python 3.11 pickles it
        digits = args[0].removeprefix("-").split("/")
        are_digits = len(digits) <= 2 and all(part.isascii() and part.isdigit() for part in digits)
        _need(are_digits and len(args[0]) <= 2 * _MAX_TEXT_DIGITS, fractions.Fraction)
        args = tuple([int(part) for part in args[0].split("/")])
    else:
        _need(_are(args, int, int), fractions.Fraction)
    _need(len(args) == 1 or args[1] > 0, fractions.Fraction)
    return fractions.Fraction(*args)


def _size(args: Args) -> Any:
    _need(
        _are(args, tuple)
        and len(args[0]) <= 64
        and all(type(size) is int and 0 <= size < 1 << 63 for size in args[0]),
        torch.Size,
    )
    return torch.Size(*args)


def _device(args: Args) -> Any:
    _need(
        (_are(args, str) or (_are(args, str, int) and 0 <= args[1] < 128)) and len(args[0]) < 32,
        torch.device,
    )
    return torch.device(*args)


MAKERS: Mapping[type, Callable[[Args], Any]] = {
    complex: _complex,
    range: _range,
    slice: _slice,
    collections.Counter: _counter,
    collections.OrderedDict: _ordered,
    collections.deque: _deque,
    collections.defaultdict: _defaults,
    datetime.date: _date,
    datetime.datetime: _datetime,
    datetime.time: _time,
    datetime.timedelta: _timedelta,
    datetime.timezone: _timezone,
    decimal.Decimal: _decimal,
    fractions.Fraction: _fraction,
    torch.Size: _size,
    torch.device: _device,
}


def make_exception(kind: Any, args: Args) -> BaseException:
    """Make an exception of Python or of weft. Classes that interpret their arguments have them checked."""
    is_right = True
    if issubclass(kind, PeerError):
        is_right = _are(args, str) or (_are(args, str, tuple) and all(type(rank) is int for rank in args[1]))
    elif issubclass(kind, LaunchError):
        is_right = _are(args, str, dict) and all(
            type(rank) is int and type(text) is str for rank, text in args[1].items()
        )
    elif issubclass(kind, BaseExceptionGroup):
        is_right = _are(args, str, list) or _are(args, str, tuple)
    elif issubclass(kind, SyntaxError):
        is_right = not args or _are(args, str)  # others name a file, of which a traceback shows a line
    elif issubclass(kind, UnicodeTranslateError):
        is_right = _are(args, str, int, int, str) and 0 <= args[1] <= args[2] <= len(args[0])
    elif issubclass(kind, UnicodeDecodeError | UnicodeEncodeError):
        content = bytes if issubclass(kind, UnicodeDecodeError) else str
        is_right = _are(args, str, content, int, int, str) and 0 <= args[2] <= args[3] <= len(args[1])
    _need(is_right, kind)
    return kind(*args)


def set_exception_state(error: BaseException, state: Any, *, is_users: bool) -> None:
    """Set an exception's attributes. Pickle would set any, and Python acts on some.

    Notes must be texts. Only on a user's own class may an attribute hide one that the class has.
    """
    if type(state) is not dict:
        raise refusal(f"the state of a {type(error).__name__} is not a dict")
    found = cast("dict[Any, Any]", state)
    own = [name for kind, names in _OWN_ATTRIBUTES.items() if isinstance(error, kind) for name in names]
    for name, value in found.items():
        if type(name) is not str:
            raise refusal(f"the name of an attribute of a {type(error).__name__} is not a text")
        if name in own and (value is None or type(value) is str):
            setattr(error, name, value)
            continue
        if name == "name_from" and isinstance(error, ImportError):
            continue
        is_note = (
            name == "__notes__"
            and type(value) is list
            and all(type(note) is str for note in cast("list[Any]", value))
        )
        if not is_note and (name.startswith("__") or (not is_users and hasattr(type(error), name))):
            raise refusal(f"it sets '{name}' of a {type(error).__name__}")
        error.__dict__[name] = value


def num_copied(args: Args) -> int:
    """How much a plain object copies of what it is made of: entries, characters, bytes of numbers."""
    sized = [len(cast("Any", arg)) for arg in args if isinstance(arg, dict | str | bytes)]
    return sum(sized) + sum([arg.bit_length() // 8 for arg in args if isinstance(arg, int)])


def make_parameter(args: Args, *, has_state: bool) -> nn.Parameter:
    """Make a parameter of a tensor of the message; with attributes, where it has a state."""
    num_args = 4 if has_state else 3
    is_right = (
        len(args) == num_args
        and type(args[0]) is torch.Tensor
        and type(args[1]) is bool
        and type(args[2]) is collections.OrderedDict
        and not args[2]
    )
    _need(is_right, nn.Parameter)
    _need(not shares_elements(args[0]), nn.Parameter)
    parameter = nn.Parameter(args[0], args[1])
    if has_state:
        state = cast(object, args[3])
        _need(type(state) is dict, nn.Parameter)
        for name, value in cast("dict[Any, Any]", state).items():
            if type(name) is not str or name.startswith("__") or hasattr(parameter, name):
                raise refusal(f"it sets {name!r} of a Parameter")
            cast("dict[str, Any]", parameter.__dict__)[name] = value
    return parameter


def set_uuid_state(target: uuid.UUID, state: Any) -> None:
    """Set the number of a new UUID."""
    number = cast("dict[Any, Any]", state).get("int") if type(state) is dict else None
    _need(type(number) is int and 0 <= number < 1 << 128, uuid.UUID)
    uuid.UUID.__setstate__(target, {"int": number})  # pyright: ignore


def set_metadata(target: Any, state: Any) -> None:
    """Set the `_metadata` that `nn.Module.state_dict` keeps on its OrderedDict: dicts by module name."""
    found = cast("dict[Any, Any]", state)
    is_right = type(state) is dict and [*found] == ["_metadata"]
    metadata = found["_metadata"] if is_right else None
    is_right = is_right and type(metadata) in (dict, collections.OrderedDict)
    is_right = is_right and all(
        type(name) is str and type(value) is dict and all(type(key) is str for key in value)
        for name, value in cast("dict[Any, Any]", metadata).items()
    )
    _need(is_right, collections.OrderedDict)
    target._metadata = metadata

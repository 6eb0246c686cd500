"""Peers name what is allowed and nothing else, however they put it."""

from __future__ import annotations

import collections
import copyreg
import datetime
import functools
import operator
import os
import pickle
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch._utils

from weft.errors import ConfigError, ConfigTypeError, PeerError, RefusedError
from weft.rpc.allowed import Allowed
from weft.rpc.fenced_unpickler import FencedUnpickler, OwnName
from weft.rpc.pickling import Pickled, pickle_object


def price(item: str, times: int = 1) -> str:
    return item * times


class Order:
    total = 0

    def __init__(self, item: str) -> None:
        self.item = item

    def paid(self) -> str:
        return self.item

    @staticmethod
    def empty() -> Order:
        return Order("")


def secret_door() -> str:
    return "open"


ALLOWED = [f"{__name__}.price", f"{__name__}.Order", "torch.add", "torch.nn.Linear"]


def load(pickled: Pickled, names: list[str] | None = None) -> Any:
    allow = Allowed(ALLOWED if names is None else names)
    return FencedUnpickler(pickled.body, pickled.buffers, pickled.tensors, allow).load()


def load_text(*opcodes: bytes, names: list[str] | None = None) -> Any:
    return load(Pickled(b"\x80\x05" + b"".join(opcodes) + b".", [], []), names)


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"\x8c" + struct.pack("B", len(encoded)) + encoded


def name(module: str, qualname: str) -> bytes:
    return text(module) + text(qualname) + pickle.STACK_GLOBAL


def call(function: bytes, *args: bytes) -> bytes:
    return function + b"(" + b"".join(args) + b"t" + pickle.REDUCE


HERE = name(__name__, "price")


@pytest.mark.parametrize(
    "data",
    [
        [1, "a", b"b", 2.5, True, None, {"k": {1, 2}}],
        [frozenset([1]), bytearray(b"c"), 1 + 2j, range(3), ...],
        slice(1, 2, 3),
        collections.OrderedDict(a=1),
        collections.defaultdict(list, {"a": [1]}),
        collections.deque([1, 2]),
        collections.Counter("aab"),
        datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC),
        datetime.timedelta(1),
        torch.float32,
        torch.channels_last,
        torch.sparse_coo,
        torch.device("cuda", 1),
        torch.Size([1, 2]),
    ],
    ids=repr,
)
def test_plain_data_needs_no_leave(data: object) -> None:
    assert load(pickle_object(data), []) == data


def test_tensors_and_parameters_need_no_leave() -> None:
    tensor, parameter = load(pickle_object([torch.ones(2), torch.nn.Parameter(torch.zeros(2))]), [])
    assert tensor.tolist() == [1, 1]
    assert type(parameter) is torch.nn.Parameter
    assert parameter.requires_grad


@pytest.mark.parametrize("error", [ValueError("a", 1), KeyError("k"), TimeoutError(), PeerError("gone", [3])])
def test_exceptions_need_no_leave(error: Exception) -> None:
    loaded = load(pickle_object(error), [])
    assert type(loaded) is type(error)
    assert loaded.args == error.args


def test_what_is_listed_can_be_used() -> None:
    function, order, add, linear, method, empty = load(
        pickle_object([price, Order("tea"), torch.add, torch.nn.Linear, Order.paid, Order.empty])
    )
    assert function("a", 2) == "aa"
    assert order.paid() == "tea"
    assert add is torch.add
    assert linear is torch.nn.Linear
    assert method is Order.paid
    assert empty is Order.empty


def test_a_module_covers_what_is_in_it() -> None:
    assert load(pickle_object([price, Order("tea")]), [__name__])[0] is price
    assert load(pickle_object(torch.Tensor.add), ["torch.Tensor.add"]) is torch.Tensor.add
    assert load(pickle_object(torch.nn.functional.gelu), ["torch.nn.functional.gelu"])


@pytest.mark.parametrize(
    "thing",
    [
        os.system,
        subprocess.Popen,
        secret_door,
        eval,
        exec,
        getattr,
        setattr,
        open,
        compile,
        type,
        print,
        map,
        memoryview,
        __import__,
        functools.partial(price, "a"),
        functools.reduce,
        operator.attrgetter("a"),
        operator.itemgetter(0),
        lambda: 1,
        Order("tea").paid,
        torch.mul,
        torch.load,
        torch.Tensor,
        torch.Tensor.add,
        torch.nn.Module,
        torch.nn.modules.linear.Bilinear,
        np.arange(3),
        np.float64(1),
        pickle.loads,
        copyreg._reconstructor,  # type: ignore[attr-defined]
        sys.exit,
        Allowed,
    ],
    ids=repr,
)
def test_everything_else_is_refused(thing: object) -> None:
    with pytest.raises(RefusedError, match=r"may not use .*`allow`"):
        load(pickle_object(thing))


@pytest.mark.parametrize(
    ("module", "qualname"),
    [
        (__name__, "os.system"),
        (__name__, "os"),
        (__name__, "sys.modules"),
        (__name__, "subprocess.Popen"),
        (__name__, "torch.load"),
        (__name__, "ALLOWED"),
        (__name__, "ALLOWED.append"),
        (__name__, "price.__globals__"),
        (__name__, "price.__globals__.update"),
        (__name__, "price.__builtins__"),
        (__name__, "price.__code__"),
        (__name__, "price.__class__"),
        (__name__, "price.__get__"),
        (__name__, "price.__call__"),
        (__name__, "price.__reduce_ex__"),
        (__name__, "price.__setattr__"),
        (__name__, "Order.__init__.__globals__"),
        (__name__, "Order.__subclasses__"),
        (__name__, "Order.__base__.__subclasses__"),
        (__name__, "Order.__mro__"),
        (__name__, "Order.__dict__"),
        (__name__, "Order.__class__"),
        (__name__, "Order.__new__"),
        (__name__, "Order.__setattr__"),
        (__name__, "Order.__getattribute__"),
        (__name__, "Order.__reduce__"),
        (__name__, "Order.__init_subclass__"),
    ],
)
def test_an_allowed_name_leads_nowhere_else(module: str, qualname: str) -> None:
    with pytest.raises(RefusedError, match="may not use"):
        load_text(name(module, qualname), names=[__name__])


@pytest.mark.parametrize(
    ("module", "qualname"),
    [
        ("builtins", "object.__subclasses__"),
        ("builtins", "str.format"),
        ("builtins", "int.__class__"),
        ("collections", "OrderedDict.__init_subclass__"),
        ("collections", "abc.sys.modules"),
        ("datetime", "sys.modules"),
        ("torch", "float32.__class__"),
        ("torch", "os.system"),
        ("torch", "Size.__new__"),
        ("torch._utils", "torch.load"),
        ("posix", "system"),
        ("os", "system"),
        ("weft.errors", "annotations"),
        ("weft.rpc.pickling", "pickle.loads"),
        ("weft.rpc.pickling", "_tensor_at.__globals__"),
        ("", "price"),
        (f"{__name__}x", "price"),
        (__name__, "price_list"),
        (__name__, "price2"),
        (__name__.rpartition(".")[0], __name__.rpartition(".")[2]),
    ],
)
def test_plain_names_lead_nowhere_else(module: str, qualname: str) -> None:
    with pytest.raises(RefusedError, match="may not use"):
        load_text(name(module, qualname))


def test_nothing_is_imported_for_a_name_that_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with pytest.raises(RefusedError):
        load_text(name("this", "s"))
    assert "this" not in sys.modules


def test_the_program_of_an_allowed_package_is_not_run() -> None:
    with pytest.raises(RefusedError, match=r"json\.__main__|json\.tool"):
        load_text(name("json.__main__", "main"), names=["json"])


def changes() -> list[tuple[str, bytes]]:
    state = b"}" + text("total") + text("stolen") + pickle.SETITEM
    slots = pickle.NONE + b"}" + text("total") + text("stolen") + pickle.SETITEM + pickle.TUPLE2
    defaults = (
        pickle.NONE + b"}" + text("__defaults__") + b"K\x07" + pickle.TUPLE1 + pickle.SETITEM + pickle.TUPLE2
    )
    return [
        ("attributes of a class", name(__name__, "Order") + state + pickle.BUILD),
        ("attributes of a class, by setattr", name(__name__, "Order") + slots + pickle.BUILD),
        ("a method", name(__name__, "Order.paid") + slots + pickle.BUILD),
        ("a function's defaults", HERE + defaults + pickle.BUILD),
        ("a memoized class", name(__name__, "Order") + pickle.MEMOIZE + b"0h\x00" + slots + pickle.BUILD),
    ]


@pytest.mark.parametrize(("what", "opcodes"), changes(), ids=[what for what, _ in changes()])
def test_what_was_here_before_can_not_be_changed(what: str, opcodes: bytes) -> None:
    with pytest.raises(RefusedError, match="tried to change"):
        load_text(opcodes)
    assert Order.total == 0
    assert price("a") == "a"


def test_what_the_message_made_can_be_filled() -> None:
    order = load(pickle_object(Order("tea")))
    assert order.item == "tea"


def test_calls_go_only_to_what_was_named() -> None:
    assert load_text(call(HERE, text("ab"))) == "ab"
    with pytest.raises(RefusedError):
        load_text(call(name("os", "system"), text("true")))
    with pytest.raises(RefusedError, match="opcode 0x69"):  # the old way to make an object of a class
        load_text(b"(" + text("true") + b"ios\nsystem\n")
    with pytest.raises(RefusedError, match="opcode 0x63"):
        load_text(b"cos\nsystem\n")


def test_a_reference_that_weft_reads_is_checked_too() -> None:
    named = name("weft.rpc.pickling", "_named")
    assert load_text(call(named, text("torch"), text("add"))) is torch.add
    with pytest.raises(RefusedError, match=r"os\.system"):
        load_text(call(named, text("os"), text("system")))
    with pytest.raises(RefusedError, match="_named with arguments that weft's workers don't send"):
        load_text(call(named, b"K\x01", b"K\x02"))


def test_numbers_for_names_are_refused() -> None:
    copyreg.add_extension(__name__, "secret_door", 240)
    try:
        body = pickle.dumps(secret_door, protocol=2)
        assert b"secret_door" not in body
        assert pickle.loads(body) is secret_door  # and now it is in everybody's cache
        with pytest.raises(RefusedError, match="by the number 240"):
            load(Pickled(b"\x80\x05" + body[2:], [], []))
    finally:
        copyreg.remove_extension(__name__, "secret_door", 240)


def test_objects_that_stay_outside_are_refused() -> None:
    with pytest.raises(RefusedError, match="opcode 0x51"):
        load_text(text("x") + pickle.BINPERSID)


def test_the_main_module_has_two_names() -> None:
    for asked in ("__main__", "__mp_main__"):
        for listed in ("__main__", "__mp_main__"):
            with pytest.raises(AttributeError, match=f"{asked} has no|no attribute|has no {asked}.f"):
                Allowed([f"{listed}.f"]).find(asked, "f")


def test_weft_names_are_exact() -> None:
    own = "weft.rpc.proxy"
    assert type(load_text(name(own, "call_method"), names=[])) is OwnName
    for refused in ("call_method.__globals__", "ask_type", "_method_of", "RRefProxy"):
        with pytest.raises(RefusedError):
            load_text(name(own, refused), names=[])


def test_weft_functions_are_only_what_is_called() -> None:
    own = name("weft.rpc.proxy", "call_method")
    for opcodes in (
        b"]" + own + b"a",
        text("x") + own + b"\x86",
        call(own, text("a")),
        own + b")" + pickle.NEWOBJ,
    ):
        with pytest.raises(RefusedError):
            load_text(opcodes, names=[])


def test_only_the_users_names_can_be_called() -> None:
    allow = Allowed(ALLOWED)
    for function in (price, Order, Order.paid, torch.add):
        allow.check_call(function)
    rebuild = torch._utils._rebuild_parameter
    for function in (list, secret_door, os.system, functools.partial(price, "a"), torch.mul, rebuild):
        with pytest.raises(RefusedError):
            allow.check_call(function)


def test_the_refusal_says_what_to_do() -> None:
    with pytest.raises(
        RefusedError, match=rf"may not use {__name__}\.secret_door.*add '{__name__}\.secret_door'"
    ):
        load(pickle_object(secret_door))
    with pytest.raises(RefusedError, match="bound methods need: send the function"):
        load(pickle_object(Order("tea").paid))
    with pytest.raises(RefusedError, match="no importable name"):
        load(pickle_object(lambda: 1))


@pytest.mark.parametrize(
    ("names", "error"),
    [("torch", ConfigTypeError), ([""], ConfigError), (["a..b"], ConfigError), (["a.*"], ConfigError)],
)
def test_lists_that_can_not_work_are_refused(names: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="RPC options: allow"):
        Allowed(names)


def test_names_that_are_not_here_may_be_listed() -> None:
    assert load(pickle_object([1]), ["no_such_package.f", "os.no_such_name"]) == [1]

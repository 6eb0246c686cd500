"""Ways around `allow=`: whatever a peer writes, nothing runs but what is listed, and nothing is changed."""

from __future__ import annotations

import builtins
import collections
import copyreg
import decimal
import fractions
import functools
import importlib
import operator
import os
import pickle
import subprocess
import sys
import time
import traceback
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.rpc import pickle_fuzz
from tests.rpc.canary import canary
from tests.rpc.fenced import (
    FORBIDDEN,
    HARMLESS,
    HERE,
    MEMO,
    ORDER,
    RAN,
    SHARED,
    SLOTS,
    VALUE_ERROR,
    Alias,
    Classes,
    MyRRef,
    Order,
    Single,
    forbidden,
    harmless,
    make_fence,
    read,
    reduced,
)
from tests.rpc.pickle_opcodes import (
    built,
    call,
    listed,
    made,
    mapped,
    named,
    number,
    parts,
    program,
    text,
)
from weft.errors import RefusedError
from weft.rpc.allowed import Allowed, Found
from weft.rpc.data_unpickler import load_data
from weft.rpc.failures import describe_failure, rebuild_failure
from weft.rpc.workers import WorkerInfo


def get(index: int) -> bytes:
    return pickle.BINGET + bytes([index])


def doubling(num_times: int) -> bytes:
    """A tuple that holds the one before twice, again and again."""
    steps = [pickle.EMPTY_TUPLE + MEMO]
    steps += [get(index) + pickle.TUPLE2 + MEMO for index in range(num_times)]
    return b"".join(steps)


def nesting(num_times: int) -> bytes:
    return pickle.EMPTY_TUPLE + pickle.TUPLE1 * num_times


WAYS: dict[str, bytes] = {
    # Names that lead elsewhere
    "another function of the module": program(call(FORBIDDEN)),
    "os.system": reduced(os.system, ("true",)),
    "eval": reduced(eval, ("1",)),
    "exec": reduced(exec, ("1",)),
    "open": reduced(open, ("/dev/null",)),
    "__import__": reduced(builtins.__import__, ("this",)),
    "import_module": reduced(importlib.import_module, ("this",)),
    "getattr": reduced(getattr, (Order, "__init__")),
    "setattr": reduced(setattr, (Order, "total", 1)),
    "type of three": reduced(type, ("T", (), {})),
    "partial": reduced(functools.partial, (harmless, 1)),
    "reduce": reduced(functools.reduce, (harmless, [1, 2])),
    "map": reduced(map, (harmless, [1])),
    "attrgetter": reduced(operator.attrgetter("__globals__").__class__, ("__globals__",)),
    "methodcaller": reduced(operator.methodcaller, ("system", "true")),
    "itemgetter": reduced(operator.itemgetter, (0,)),
    "Popen": reduced(subprocess.Popen, (["true"],)),
    "pickle.loads": reduced(pickle.loads, (pickle.dumps(1),)),
    "copyreg.__newobj__": program(call(named("copyreg", "__newobj__"), ORDER)),
    "copyreg._reconstructor": program(
        call(named("copyreg", "_reconstructor"), ORDER, named("builtins", "object"), pickle.NONE)
    ),
    "torch.load": reduced(torch.load, ("/dev/null",)),
    "torch._utils._rebuild_tensor_v2": program(
        call(named("torch._utils", "_rebuild_tensor_v2"), pickle.NONE)
    ),
    "torch._utils._rebuild_wrapper_subclass": program(
        call(named("torch._utils", "_rebuild_wrapper_subclass"), named("torch", "Tensor"))
    ),
    "torch._tensor._rebuild_from_type_v2": program(
        call(named("torch._tensor", "_rebuild_from_type_v2"), HARMLESS, ORDER, parts(), pickle.NONE)
    ),
    "torch.storage._load_from_bytes": program(call(named("torch.storage", "_load_from_bytes"), b"C\x01a")),
    "torch.classes": program(call(named("torch", "classes.load_library"), text("/dev/null"))),
    "torch.ops": program(call(named("torch", "ops.load_library"), text("/dev/null"))),
    "numpy's _reconstruct": pickle.dumps(np.arange(3), 5),
    "ctypes": program(call(named("ctypes", "CDLL"), pickle.NONE)),
    "a wrapped function": program(call(named(HERE, "behind_guard.__wrapped__"))),
    "a function's globals": program(named(HERE, "harmless.__globals__")),
    "a function's __call__": program(call(named(HERE, "harmless.__call__"))),
    "a function's __get__": program(call(named(HERE, "harmless.__get__"), number(1))),
    "a class's __init__": program(named(HERE, "Order.__init__")),
    "a class's __setattr__": program(named(HERE, "Order.__setattr__")),
    "a class's __subclasses__": program(call(named(HERE, "Order.__subclasses__"))),
    "a class's __base__": program(named(HERE, "Order.__base__")),
    "a class's __class__": program(named(HERE, "Order.__class__")),
    "a property of a class": program(named(HERE, "Order.price.fget")),
    "a module of the module": program(named(HERE, "os.system")),
    "a module in the name of a module": program(named(f"{HERE}.os", "system")),
    "__main__ of a listed package": program(named("tests.__main__", "main")),
    "__builtins__": program(named("__main__", "__builtins__")),
    "str.format": program(call(named("builtins", "str.format"), text("{0.__class__}"), number(1))),
    "object's subclasses": program(call(named("builtins", "object.__subclasses__"))),
    "a name that is bytes": program(b"C\x02os", text("system"), pickle.STACK_GLOBAL),
    "a name that is a list": program(listed(), text("system"), pickle.STACK_GLOBAL),
    "_named of another name": program(call(named("weft.rpc.pickling", "_named"), text("os"), text("system"))),
    "_named of itself": program(
        call(named("weft.rpc.pickling", "_named"), text("weft.rpc.pickling"), text("_named"))
    ),
    # Old opcodes, and those of others
    "GLOBAL": program(b"cos\nsystem\n"),
    "INST": program(b"(" + text("true") + b"ios\nsystem\n"),
    "OBJ": program(b"(" + ORDER + b"o"),
    "EXT1": program(b"\x82\x01"),
    "EXT2": program(b"\x83\x01\x00"),
    "EXT4": program(b"\x84\x01\x00\x00\x00"),
    "PERSID": program(b"Px\n"),
    "BINPERSID": program(text("x") + pickle.BINPERSID),
    "INT as text": program(b"I1\n"),
    "LONG as text": program(b"L" + b"9" * 200 + b"L\n"),
    "STRING": program(b"S'a'\n"),
    "UNICODE": program(b"Va\n"),
    "PUT over a checked object": program(HARMLESS + b"p0\n" + FORBIDDEN + b"p0\n"),
    "BINPUT over a checked object": program(HARMLESS + b"q\x00" + b"0" + text("x") + b"q\x00" + get(0)),
    "LONG_BINPUT far away": program(text("x") + b"r\xff\xff\xff\x7f"),
    "DUP": program(text("x") + b"2"),
    "a second PROTO": program(b"\x80\x02" + text("x")),
    "protocol 2": b"\x80\x02N.",
    "protocol 0": b"N.",
    # Changes of what is there
    "BUILD on a class": program(built(ORDER, SLOTS)),
    "BUILD on a function": program(built(HARMLESS, parts(pickle.NONE, mapped(__code__=number(1))))),
    "BUILD on a singleton of __new__": program(built(made(named(HERE, "Single")), mapped(x=number(1)))),
    "BUILD on what a function returned": program(built(call(named(HERE, "single")), mapped(x=number(1)))),
    "BUILD on a member of an enum": program(built(call(named(HERE, "Color"), b"K\x01"), mapped(x=number(1)))),
    "BUILD on a tensor": program(
        built(call(named("weft.rpc.pickling", "_tensor_at"), b"K\x00"), mapped(x=number(1)))
    ),
    "BUILD on an object twice": program(built(built(made(ORDER), mapped(a=b"N")), mapped(b=b"N"))),
    "BUILD of __class__": program(built(made(ORDER), mapped(__class__=named(HERE, "Bag")))),
    "BUILD of __dict__": program(built(made(ORDER), parts(b"N", mapped(__dict__=mapped())))),
    "BUILD of a property": program(built(made(ORDER), parts(b"N", mapped(price=number(1))))),
    "BUILD of a class attribute as slot": program(built(made(ORDER), SLOTS)),
    "BUILD of names that are no texts": program(built(made(ORDER), b"}K\x01K\x02s")),
    "BUILD of a list": program(built(made(ORDER), listed())),
    "BUILD on an OrderedDict": program(
        built(call(named("collections", "OrderedDict")), mapped(items=HARMLESS))
    ),
    "BUILD on a list": program(built(listed(), mapped(append=HARMLESS))),
    "BUILD on an object()": program(built(made(named("builtins", "object")), mapped(x=number(1)))),
    "APPENDS on a list of the worker's": program(call(named(HERE, "shared")) + b"(" + number(4) + b"e"),
    "APPENDS on a function": program(HARMLESS + b"(" + number(4) + b"e"),
    "SETITEMS on a class": program(ORDER + b"(" + text("total") + number(1) + b"u"),
    "ADDITEMS on a list": program(listed() + b"(" + number(4) + b"\x90"),
    # Exceptions
    "an exception's __class__": program(built(VALUE_ERROR, mapped(__class__=named("builtins", "KeyError")))),
    "an exception's __cause__": program(built(VALUE_ERROR, mapped(__cause__=HARMLESS))),
    "an exception's __traceback__": program(built(VALUE_ERROR, mapped(__traceback__=b"N"))),
    "an exception's args": program(built(VALUE_ERROR, mapped(args=number(1)))),
    "an exception's with_traceback": program(built(VALUE_ERROR, mapped(with_traceback=HARMLESS))),
    "notes that are no texts": program(built(VALUE_ERROR, mapped(__notes__=listed(HARMLESS)))),
    "a PeerError of too many ranks": program(
        call(
            named("weft.errors", "PeerError"),
            text("x"),
            call(named("builtins", "range"), b"K\x00", number(1 << 60), b"K\x01"),
        )
    ),
    "a SyntaxError with a file": program(
        call(named("builtins", "SyntaxError"), text("x"), parts(text("/etc/passwd"), b"K\x01", b"N", b"N"))
    ),
    "a UnicodeDecodeError that lies": program(
        call(
            named("builtins", "UnicodeDecodeError"),
            text("u"),
            b"C\x01a",
            b"K\x00",
            number(1 << 40),
            text("r"),
        )
    ),
    # Plain types with other arguments
    "list of a range": program(call(named("builtins", "list"), number(1))),
    "bytes of a number": program(call(named("builtins", "bytes"), number(1 << 40))),
    "bytearray of a number": program(call(named("builtins", "bytearray"), number(1 << 40))),
    "int of a text": program(call(named("builtins", "int"), text("9" * 200))),
    "a dict of pairs": program(call(named("builtins", "dict"), listed())),
    "a fraction of an exponent": program(call(named("fractions", "Fraction"), text("1e999999999"))),
    "a fraction over nothing": program(call(named("fractions", "Fraction"), b"K\x01", b"K\x00")),
    "a defaultdict of what is not listed": program(
        call(named("collections", "defaultdict"), named("builtins", "ValueError"))
    ),
    "a defaultdict of weft's own": program(
        call(named("collections", "defaultdict"), named("weft.rpc.proxy", "call_method"))
    ),
    "a Counter of a Counter": program(call(named("collections", "Counter"), made(named(HERE, "Bag")))),
    "a date that is none": program(call(named("datetime", "date"), b"C\x04\x07\xe6\x02\x1e")),
    "a datetime that is none": program(call(named("datetime", "datetime"), b"C\x0a" + b"\xff" * 10)),
    "a timedelta too long": program(
        call(named("datetime", "timedelta"), number(1 << 60), b"K\x00", b"K\x00")
    ),
    "a UUID of a text": program(built(made(named("uuid", "UUID")), mapped(int=text("x")))),
    "a torch.Size below nothing": program(call(named("torch", "Size"), parts(number(-1)))),
    "a torch.device of a path": program(call(named("torch", "device"), text("../../x"))),
    "a WorkerInfo of anything": program(
        built(made(named("weft.rpc.workers", "WorkerInfo")), listed(HARMLESS, b"K\x01"))
    ),
    "an OrderedDict that goes on": program(
        call(named("collections", "OrderedDict"), listed(parts(number(1), number(2))))
    ),
    "a parameter with hooks": program(
        call(
            named("torch._utils", "_rebuild_parameter"),
            call(named("weft.rpc.pickling", "_tensor_at"), b"K\x00"),
            pickle.NEWTRUE,
            mapped(x=HARMLESS),
        )
    ),
    "a parameter with a method": program(
        call(
            named("torch._utils", "_rebuild_parameter_with_state"),
            call(named("weft.rpc.pickling", "_tensor_at"), b"K\x00"),
            pickle.NEWTRUE,
            call(named("collections", "OrderedDict")),
            mapped(detach=HARMLESS),
        )
    ),
    # weft's own
    "an RRef by hand": program(made(named("weft.rpc.rref", "RRef"))),
    "an RRef of the user's class": program(made(named(HERE, "MyRRef"))),
    "a RemoteModule by hand": program(made(named("weft.rpc.remote_module", "RemoteModule"))),
    "a RemoteModule of the user's class": program(built(made(named(HERE, "MyRemote")), mapped(x=HARMLESS))),
    "a RemoteModule around no RRef": program(
        call(
            named("weft.rpc.remote_module", "receive_remote_module"),
            named("weft.rpc.remote_module", "RemoteModule"),
            text("worker1"),
            text("cpu"),
            pickle.NEWFALSE,
            pickle.NEWFALSE,
            call(named(HERE, "LooksLikeRRef")),
            pickle.NEWFALSE,
        )
    ),
    "an RRef with a text for a number": program(call(named("weft.rpc.rref", "rebuild_rref"), text("0"))),
    "a function of weft's, nested": program(call(named("weft.rpc.proxy", "call_method"), number(1))),
    "a function of weft's that nobody sends": program(named("weft.rpc.registry", "current_agent")),
    "weft's pickling": program(named("weft.rpc.pickling", "unpickle_object")),
    "a tensor that is not there": program(call(named("weft.rpc.pickling", "_tensor_at"), b"K\x07")),
    "a tensor from the end": program(call(named("weft.rpc.pickling", "_tensor_at"), number(-1))),
    "a tensor by True": program(call(named("weft.rpc.pickling", "_tensor_at"), pickle.NEWFALSE)),
    "args that are a list": program(HARMLESS + listed(number(1)) + b"R"),
    "names of arguments that are none": program(ORDER + b")" + b"}K\x01K\x02s" + b"\x92"),
    # Sizes
    "a number of many bytes": program(b"\x8b" + (1 << 20).to_bytes(4, "little") + bytes(1 << 20)),
    "a number longer than the message": program(b"\x8b\xff\xff\xff\x7f"),
    "a negative length": program(b"\x8b\xff\xff\xff\xff"),
    "bytes longer than the message": program(b"\x8e" + (1 << 62).to_bytes(8, "little")),
    "a text longer than the message": program(b"\x8d" + (1 << 62).to_bytes(8, "little")),
    "a bytearray longer than the message": program(b"\x96" + (1 << 62).to_bytes(8, "little")),
    "a frame longer than the message": program(b"\x95" + (1 << 62).to_bytes(8, "little") + b"N"),
    "a text that is no UTF-8": program(b"\x8c\x01\xff"),
    "a tuple that doubles": program(doubling(60)),
    "a key that doubles": program(b"}" + doubling(60) + b"Ns"),
    "deep tuples": program(nesting(1_000_000)),
    "a deep key": program(b"}" + nesting(1_000_000) + b"Ns"),
    "deep lists": program(b"]" * 300 + b"a" * 299),
    "a list in itself": program(b"]" + MEMO + get(0) + b"a"),
    "a list in a tuple in itself": program(b"]" + MEMO + get(0) + b"\x85a"),
    "a dict in itself": program(b"}" + MEMO + text("x") + get(0) + b"s"),
    "lists filled from the outside in": program(
        b"".join(b"]" + MEMO for _ in range(40)),
        b"".join(get(index) + b"(" + get(index + 1) * 2 + b"e0" for index in range(38)),
    ),
    # No pickles
    "nothing": b"",
    "half a header": b"\x80",
    "no STOP": b"\x80\x05N",
    "more behind STOP": program(b"N") + b"N.",
    "two objects": program(b"NN"),
    "an empty stack": program(b"R"),
    "a mark left": program(b"(N"),
    "a memo that is not there": program(get(9)),
    "a list as a key": program(b"}" + listed() + b"Ns"),
    "a key without a value": program(b"}(K\x01u"),
    "a buffer that is not there": program(b"\x97"),
    "a text that is said to be a buffer": program(text("x") + b"\x98"),
}


@pytest.mark.parametrize("way", WAYS)
def test_crafted_pickles_are_refused(way: str) -> None:
    before = {**vars(Order)}, list(SHARED), {**vars(Single())}, {**vars(harmless)}
    with pytest.raises((RefusedError, PermissionError, AttributeError)) as caught:
        read(WAYS[way], tensors=[torch.ones(1)])
    assert isinstance(caught.value, RefusedError)
    assert before == ({**vars(Order)}, list(SHARED), {**vars(Single())}, {**vars(harmless)})


def test_extension_codes_are_not_looked_up() -> None:
    copyreg.add_extension(HERE, "forbidden", 241)
    try:
        assert pickle.loads(b"\x80\x05\x82\xf1.") is forbidden  # it is in everybody's cache now
        for body in (program(b"\x82\xf1)R"), program(b"\x83\xf1\x00)R")):
            with pytest.raises(RefusedError, match="by the number"):
                read(body)
            with pytest.raises(RefusedError, match="by the number"):
                load_data(body)
    finally:
        copyreg.remove_extension(HERE, "forbidden", 241)


@pytest.mark.parametrize("kind", [ImportError, ModuleNotFoundError])
def test_printing_an_exception_imports_nothing(
    kind: type[ImportError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python imports the module that an ImportError of a name is about, to suggest a better name."""
    monkeypatch.delitem(sys.modules, "this", raising=False)
    state = mapped(name=text("this"), name_from=text("x"), path=text("p"))
    error = read(program(built(call(named("builtins", kind.__name__), text("x")), state)))
    assert (error.name, error.path) == ("this", "p")
    traceback.format_exception(error)
    assert "this" not in sys.modules


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, BaseException])
def test_an_exception_of_a_peer_does_not_end_the_worker(kind: type[BaseException]) -> None:
    failure = describe_failure(kind("bye"), WorkerInfo("worker1", 1))
    error = rebuild_failure(failure, make_fence())
    assert type(error) is RuntimeError
    assert kind.__name__ in str(error)
    assert type(rebuild_failure(failure, None)) is kind


@pytest.mark.parametrize(
    "failure", [None, (), ("a", "b"), ("a", "b", "c"), (1, "b", None), ["a", HERE, bytearray()]]
)
def test_failures_have_one_form(failure: Any) -> None:
    with pytest.raises(RefusedError, match="a failure"):
        rebuild_failure(failure, make_fence())


def test_a_module_that_is_not_imported_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "fence_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("def f(): pass\nraise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RefusedError, match=r"fence_package\.inner is not imported on this worker"):
        read(program(named("fence_package.inner", "f")), names=["fence_package"])
    assert "fence_package.inner" not in sys.modules


NUMBER = pickle.LONG4 + (16_000).to_bytes(4, "little") + b"\x5b" * 16_000
DIGITS = pickle.BINUNICODE + (60_000).to_bytes(4, "little") + b"7" * 60_000
ENTRIES = pickle.EMPTY_DICT + pickle.MARK + b"".join(number(key) + b"N" for key in range(5000)) + b"u"


def test_memory_and_time_are_bounded_by_the_message() -> None:
    body = program(b"(" + b"]" * 50_000 + b"t")
    tracemalloc.start()
    began = time.monotonic()
    load_data(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 600 * len(body)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        (collections.Counter, [ENTRIES]),
        (decimal.Decimal, [DIGITS]),
        (fractions.Fraction, [NUMBER, NUMBER]),
    ],
)
def test_a_short_message_has_nothing_copied_without_end(kind: type, args: list[bytes]) -> None:
    kept = b"".join(arg + pickle.MEMOIZE for arg in (named(kind.__module__, kind.__qualname__), *args))
    again = b"h\0" + parts(*(b"h" + bytes([place + 1]) for place in range(len(args)))) + pickle.REDUCE
    assert read(program(listed(kept, again)))[-1] is not None
    with pytest.raises(RefusedError, match="copied many times"):
        read(program(listed(kept, again * 1000)))


@pytest.mark.parametrize("opcode", [pickle.REDUCE, pickle.NEWOBJ])
def test_no_class_is_made(opcode: bytes) -> None:
    args = parts(text("X"), parts(named("builtins", "object")), mapped(__module__=text(HERE)))
    with pytest.raises(RefusedError, match="it makes a class"):
        read(program(named(HERE, "Classes"), args, opcode), names=[f"{HERE}.Classes"])


def test_no_class_is_made_by_a_call() -> None:
    """Also where a function of weft's is to call it: of a RemoteModule, say, or of an optimizer."""
    fence = make_fence([f"{HERE}.Classes", f"{HERE}.MyRRef", f"{HERE}.Alias"])
    with pytest.raises(RefusedError, match="it makes a class"):
        fence.check_payload((Classes, ("X", (), {}), {}))
    with pytest.raises(RefusedError, match="it makes a class"):
        fence.check_call(Classes)
    for kind in (MyRRef, Alias):
        with pytest.raises(RefusedError, match="which only weft itself may make"):
            fence.check_payload((kind, (1,), {}))
        with pytest.raises(RefusedError, match="which only weft itself may make"):
            fence.check_call(kind)


def test_the_canary_detects_pickle() -> None:
    """Without this the tests above would show nothing."""
    with canary() as heard:
        pickle.loads(reduced(os.listdir, (".",)))
    assert any(event.startswith("pickle.find_class") for event in heard)
    assert any(event.startswith("os.listdir") for event in heard)
    RAN.clear()
    pickle.loads(WAYS["another function of the module"])
    assert RAN.pop() == "a function that is not listed"


# -- fuzzing: scripts/fence_fuzz runs much more of it ------------------------------------------------


def test_a_few_thousand_random_pickles() -> None:
    tally = pickle_fuzz.run_pickles(2_000, seed=22)
    assert tally.pickles == 2_000
    assert min(tally.read, tally.refused) > 200


def test_the_fuzzer_finds_a_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Allowed, "find", lambda *_: Found(pickle_fuzz.unlisted, is_users=True))
    with pytest.raises(pickle_fuzz.Unlisted) as caught:
        pickle_fuzz.run_pickles(500, seed=3)
    assert any("--seed 3 --batch 0" in note for note in caught.value.__notes__)

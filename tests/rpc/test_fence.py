"""What passes a worker's `allow=`: what peers do send, what it answers, and what is called."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import os
import pickle
import sys
import types
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import weft
from tests.rpc.fenced import (
    HERE,
    RAN,
    Bag,
    Choices,
    Classes,
    Color,
    Computes,
    Failed,
    LooksLikeRRef,
    MyRemote,
    Order,
    Parent,
    Point,
    Stateful,
    harmless,
    make_fence,
    no_rref,
    read,
    remembering,
    travel,
)
from tests.rpc.pickle_opcodes import (
    built,
    call,
    made,
    mapped,
    named,
    parts,
    program,
    text,
)
from weft.errors import PeerError, RefusedError
from weft.rpc import remote_module
from weft.rpc.data_unpickler import MAX_DEPTH
from weft.rpc.packing import Packer
from weft.rpc.pickling import pickle_object
from weft.rpc.tensors import Route, TensorPost
from weft.rpc.workers import WorkerInfo

PLAIN: list[Any] = [
    *([1, -1, 1 << 40, -(1 << 200), 2.5, True, None, "text", "\udc80", b"bytes", bytearray(b"own")]),
    *(list(range(3000)), {index: str(index) for index in range(3000)}, set(range(3000)), frozenset("ab")),
    *([[1, [2, (3, {"k": (4, 5)})]], ((1, 2), (1, 2)), {(1, (2, 3)): 4}, [[]] * 5]),
    *("long" * 1000, b"long" * 1000),
    *(1 + 2j, range(1, 9, 2), slice(1, None, 2), ..., NotImplemented),
    *(collections.OrderedDict(a=1), collections.Counter("aab"), collections.deque([1, 2], 5)),
    *(collections.defaultdict(list, a=[1]), collections.defaultdict(None, a=1)),
    collections.deque(range(3000)),
    *(datetime.date(2024, 2, 29), datetime.time(1, 2, 3, 4, fold=1), datetime.timedelta(-1, 2, 3)),
    *(datetime.datetime(2024, 2, 29, 1, 2, 3, 4, fold=1), datetime.datetime.now(datetime.UTC)),
    datetime.timezone(datetime.timedelta(hours=1), "there"),
    *(decimal.Decimal("-1.5e10"), decimal.Decimal("NaN").to_eng_string(), fractions.Fraction(-2, 3)),
    uuid.uuid4(),
    *(torch.float32, torch.strided, torch.channels_last, torch.per_tensor_affine),
    *(torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 3])),
    *(int, list, ValueError, KeyError, WorkerInfo("worker1", 1)),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{value!r:.40}")
def test_plain_data_comes_through(value: Any) -> None:
    again = travel(value, [])
    assert again == value
    assert type(again) is type(value)
    if not isinstance(value, slice):
        assert travel([value, {"k": value}], []) == [value, {"k": value}]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a", 1),
        OSError(2, "no such file", "name"),
        PeerError("gone", [3]),
        weft.LaunchError("failed", {1: "why"}),
        ExceptionGroup("two", [ValueError("a"), KeyError("b")]),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        StopIteration(3),
        SyntaxError("bad"),
    ],
    ids=repr,
)
def test_exceptions_come_through(error: Exception) -> None:
    error.add_note("a note")
    again = travel(error, [])
    assert type(again) is type(error)
    assert repr(again) == repr(error)
    assert getattr(again, "__notes__", None) == getattr(pickle.loads(pickle.dumps(error)), "__notes__", None)


def test_users_objects_come_through() -> None:
    names = [
        f"{HERE}.{name}"
        for name in ("Parent", "Child", "Failed", "Stateful", "Order", "Bag", "Color", "Point")
    ]
    parent = travel(Parent(), names)
    assert parent.children[0].parent is parent
    error = travel(Failed(3), names)
    assert (error.code, error.detail, error.args) == (3, {"rows": [1, 2]}, (3,))
    assert travel(Stateful(), names).seen == ("state", 3)
    assert travel(Order("tea"), names).pay() == "tea"
    assert travel(Bag(a=1), names) == {"a": 1}
    assert travel(Color.RED, names) is Color.RED
    assert travel(Point([1, 2]), names) == (1, 2)


def test_modules_and_parameters_come_through() -> None:
    parameter = nn.Parameter(torch.ones(2), requires_grad=False)
    parameter.tag = "mine"  # pyright: ignore[reportAttributeAccessIssue]
    again = travel(parameter, [])
    assert type(again) is nn.Parameter
    assert (again.requires_grad, again.tag) == (False, "mine")  # pyright: ignore[reportAttributeAccessIssue]
    linear = nn.Linear(2, 2)
    names = ["torch.nn.Linear", "builtins.set"]
    assert travel(linear, names).weight.equal(linear.weight)
    state = travel(linear.state_dict(), [])
    assert state._metadata == linear.state_dict()._metadata  # pyright: ignore


def test_one_object_in_two_places_stays_one() -> None:
    rows = [1, 2]
    again = travel([rows, rows, {"k": rows}], [])
    assert again[0] is again[1] is again[2]["k"]


def test_nesting_up_to_the_limit_passes() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    assert travel(value, []) == value
    with pytest.raises(RefusedError, match="nested more than"):
        travel([[value]], [])


def test_buffers_are_this_workers_own() -> None:
    theirs = bytearray(b"x" * 100)
    pickled = pickle_object(pickle.PickleBuffer(theirs))
    again = read(pickled.body, buffers=[memoryview(theirs)], names=[])
    theirs[:] = b"y" * 100
    assert bytes(again) == b"x" * 100


def spelled(**state: bytes) -> bytes:
    return program(built(made(named(HERE, "OnItself")), mapped(**state)))


# -- what is sent ------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["this", "no.such.module", ""])
def test_an_answer_imports_nothing(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickle imports the module of what it writes by name; `__reduce_ex__` may be an object's own."""
    monkeypatch.delitem(sys.modules, "this", raising=False)
    thing = read(
        spelled(__reduce_ex__=named("builtins", "str"), __module__=text(module)), names=[f"{HERE}.OnItself"]
    )
    made_class = Classes("X", (), {"__module__": module})
    made_enum = Choices("X", "a b", module=module)
    for value in (thing, [thing], {1: (thing,)}, made_class, made_enum, made_enum.a, ValueError(thing)):
        with pytest.raises(RefusedError, match="imported on this worker"):
            pickle_object(value, is_fenced=True)
    assert "this" not in sys.modules


def test_an_object_without_a_module_is_not_looked_for_in_all_modules() -> None:
    thing = read(
        spelled(__reduce_ex__=named("builtins", "str"), __module__=pickle.NONE), names=[f"{HERE}.OnItself"]
    )
    with pytest.raises(RefusedError, match="names a NoneType as its module"):
        pickle_object(thing, is_fenced=True)


def test_what_workers_answer_is_the_same_with_allow() -> None:
    values = [
        *([1, "x", Order("tea"), Color.RED, Failed(3), nn.Linear(2, 2), torch.add, torch.float32, Order.pay]),
        *(harmless, remembering, type(None), ..., torch.strided, nn.Parameter(torch.ones(1))),
    ]
    for value in values:
        assert pickle_object(value, is_fenced=True).body == pickle_object(value).body
    by_value = pickle_object(lambda: 5, is_fenced=True)
    assert pickle.loads(by_value.body)() == 5


def test_a_leaf_has_memory_for_each_element() -> None:
    """Fused optimizers write to as many elements as it has."""
    leaf = torch.ones(1).expand(1000).requires_grad_()
    posts = TensorPost(0), TensorPost(1)
    packers = [
        Packer(post, allow, lambda _: None, lambda _: None, no_rref)
        for post, allow in zip(posts, (None, []), strict=True)
    ]
    route, back = Route(1, "worker1", False, {}), Route(0, "worker0", False, {})
    for value in (leaf, [leaf], leaf.detach()):
        packed = packers[0].pack(value, route)
        seen = packers[1].unpack(packed.body, packed.buffers, back)
        seen = seen[0] if isinstance(seen, list) else seen
        assert seen.equal(leaf)
        if leaf.requires_grad and isinstance(value, list):
            assert seen.stride() == (1,)
            assert seen.requires_grad
            assert seen.is_leaf
    rebuilt = call(
        named("torch._utils", "_rebuild_parameter"),
        call(named("weft.rpc.pickling", "_tensor_at"), b"K\0"),
        pickle.NEWTRUE,
        call(named("collections", "OrderedDict")),
    )
    assert read(program(rebuilt), tensors=[torch.ones(1000)], names=[]).shape == (1000,)
    with pytest.raises(RefusedError, match="of a Parameter are not those"):
        read(program(rebuilt), tensors=[leaf.detach()], names=[])
    for post in posts:
        post.close()


def test_a_worker_with_allow_packs_that_way() -> None:
    agent = SimpleNamespace(post=None)
    packer = Packer(cast(Any, agent), ["math"], lambda _: None, lambda _: None, no_rref)
    made_class = Classes("X", (), {"__module__": "this"})
    route = Route(1, "worker1", True, {})
    for pack in (
        lambda: packer.pack(made_class, route),
        lambda: packer.pack_call(harmless, (made_class,), {}, route),
    ):
        with pytest.raises(RefusedError, match="imported on this worker"):
            pack()
    _, _, body = packer.describe_failure(ValueError(made_class), WorkerInfo("worker1", 1))
    assert body is None  # its text is sent alone
    assert "this" not in sys.modules


# -- what is called ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "list"),
        ("builtins", "ValueError"),
        ("collections", "OrderedDict"),
        ("os", "getcwd"),
        ("torch", "float32"),
        ("weft.rpc.proxy", "ask_type"),
        ("weft.rpc.rref", "rebuild_rref"),
        ("weft.rpc.remote_module", "receive_remote_module"),
        ("weft.rpc.pickling", "_tensor_at"),
        (HERE, "forbidden"),
        (HERE, "SHARED"),
    ],
)
def test_only_what_is_listed_is_called(module: str, name: str) -> None:
    fence = make_fence()
    body = program(parts(named(module, name), parts(), mapped()))
    for ask in (
        lambda: fence.check_payload(fence.unpickle(body, (), ())),
        lambda: fence.check_payload((fence.find_function(module, name), (), {})),
    ):
        with pytest.raises(RefusedError):
            ask()


@pytest.mark.parametrize(
    "payload", [None, (), (harmless, ()), (harmless, [], {}), (harmless, (), {1: 2}), [1, 2, 3]]
)
def test_calls_have_one_form(payload: Any) -> None:
    with pytest.raises(RefusedError, match="a call"):
        make_fence().check_payload(payload)


def test_what_is_listed_is_called() -> None:
    fence = make_fence()
    assert fence.check_payload((harmless, (1,), {})) == (harmless, (1,), {})
    own = program(named("weft.rpc.proxy", "call_method"), parts(), mapped(), pickle.TUPLE3)
    own = fence.unpickle(own, (), ())
    assert isinstance(fence.check_payload(own)[0], types.FunctionType)


def test_methods_are_found_and_not_run() -> None:
    allowed = make_fence().allowed
    RAN.clear()
    order = Order("tea")
    assert allowed.find_method(order, "pay")() == "tea"
    for name in (
        "price",
        "__init__",
        "__class__",
        "__setattr__",
        "__reduce_ex__",
        "item",
        1,
        "a.b",
        "",
        "__dict__",
    ):
        with pytest.raises((RefusedError, AttributeError)):
            allowed.find_method(order, name)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        allowed.find_method(order, "missing")
    for value in ([], {}, os, torch.ones(1), harmless):
        with pytest.raises((RefusedError, AttributeError)):
            allowed.find_method(value, "append")
    for name in ("cached", "computed", "of_class"):
        for names in ([], [f"{HERE}.Computes"], [f"{HERE}.Computes", f"{HERE}.harmless"]):
            with pytest.raises(RefusedError, match=f"Computes.{name}"):
                make_fence(names).allowed.find_method(Computes(), name)
    assert make_fence([f"{HERE}.Computes"]).allowed.find_method(Computes(), "dispatched")(1) == "any"
    assert RAN == []


def test_weft_functions_check_what_they_get() -> None:
    """Each with what looks right, and is not what weft's workers send."""
    from weft.dist_autograd import messages, optimizer
    from weft.rpc import api, gathering, proxy
    from weft.rpc import remote_module_owner as owner

    fake: Any = LooksLikeRRef()
    RAN.clear()
    calls: list[Callable[[], Any]] = [
        lambda: proxy.call_method(fake, "system", ("true",), {}),
        lambda: proxy.call_plain_method(fake, "system", ("true",), {}),
        lambda: proxy.call_async_method(fake, "system", ("true",), {}),
        lambda: proxy._rref_typeof_on_owner(fake),
        lambda: proxy._backward_on_owner(fake, 1, False),
        lambda: owner.run_forward(fake, "cpu", False, False, (), {}),
        lambda: owner.run_forward(fake, "cpu", False, False, [], {}),  # pyright: ignore
        lambda: owner.change_module(fake, "train", (True,), {}),
        lambda: owner.change_module(fake, "__init__", (), {}),
        lambda: owner.change_module(fake, "train", (1,), {}),
        lambda: owner.change_module(fake, ["train"], (), {}),  # pyright: ignore
        lambda: owner.list_parameters(fake, "", True, 1),  # pyright: ignore
        lambda: owner.find_parameter(fake, "__class__.x"),
        lambda: owner.read_state(fake, 1, False),  # pyright: ignore
        lambda: owner.load_state(fake, Bag(), True, False, "cpu"),
        lambda: optimizer.make_local_optimizer(torch.optim.SGD, (fake,), (), {}),
        lambda: optimizer.step_local_optimizer(fake, 1),
        lambda: optimizer.load_local_state(fake, Bag()),
        lambda: messages.take_gradients(-1, 1, False, False, 1),
        lambda: messages.take_gradients(1, 1, False, False, 1, 1, -1),
        lambda: messages.take_gradients(1, 1, False, False, 1, 1, 5),
        lambda: messages.take_gradients(1, 1, False, False, 1, 1, 1, "x"),
        lambda: messages.take_gradients(1, 1, 1, False, 1),  # pyright: ignore
        lambda: messages.find_part(1, 1, False, 1, "x"),  # pyright: ignore
        lambda: gathering.fail_gathering("a", "b", [1], True),  # pyright: ignore
        lambda: remote_module.receive_remote_module(MyRemote, "worker1", "cpu", False, False, fake, False),
        lambda: remote_module.receive_remote_module(Order, 1),  # pyright: ignore
        lambda: api._broadcast_to_followers("a", [1]),  # pyright: ignore
    ]
    for place, ask in enumerate(calls):
        with pytest.raises((RefusedError, weft.StateError)) as caught:
            ask()
        is_without_agent = isinstance(caught.value, weft.StateError) and "not been initialized" in str(
            caught.value
        )
        assert is_without_agent or isinstance(caught.value, RefusedError), place
    assert RAN == []

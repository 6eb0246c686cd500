"""Objects come back with their tensors, functions by name or by value, and missing names are told.

Calls and values of the simple form do without pickle: what has it, and that it comes back as it was.
"""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import textwrap
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from weft.errors import RefusedError
from weft.rpc.allowed import Allowed, MissingNameError
from weft.rpc.direct import Lifted, lift_call, lift_value, put_back
from weft.rpc.fence import Fence
from weft.rpc.pickling import Pickled, find_global, pickle_object, unpickle_object


def load(pickled: Pickled) -> Any:
    return unpickle_object(pickled.body, pickled.buffers, pickled.tensors)


def round_trip(obj: object) -> Any:
    return load(pickle_object(obj))


def double(x: int) -> int:
    return 2 * x


class Point:
    def __init__(self, x: object) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and self.x == other.x

    def moved(self, by: int) -> object:
        return self.x, by


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@settings(max_examples=200)
@given(plain)
def test_plain_data_comes_back(data: object) -> None:
    pickled = pickle_object(data)
    assert (pickled.buffers, pickled.tensors) == ([], [])
    assert load(pickled) == data


def test_tensors_stay_outside_and_come_back_by_index() -> None:
    first, second = torch.ones(1000), torch.zeros(3)
    pickled = pickle_object({"a": [first, second], "b": first})
    assert len(pickled.body) < 200
    assert [tensor is given for tensor, given in zip(pickled.tensors, [first, second], strict=True)] == [
        True
    ] * 2
    replaced = [torch.full((1,), 7.0), torch.full((1,), 8.0)]
    loaded: Any = unpickle_object(pickled.body, pickled.buffers, replaced)
    assert loaded["a"][0] is loaded["b"] is replaced[0]
    assert loaded["a"][1] is replaced[1]


def test_the_tensor_in_a_parameter_stays_outside() -> None:
    parameter = torch.nn.Parameter(torch.ones(1000), requires_grad=False)
    pickled = pickle_object(parameter)
    assert len(pickled.tensors) == 1
    assert type(pickled.tensors[0]) is torch.Tensor
    assert len(pickled.body) < 500
    loaded = load(pickled)
    assert type(loaded) is torch.nn.Parameter
    assert not loaded.requires_grad


def test_a_module_comes_back() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    loaded = round_trip(module)
    for (name, value), (other_name, other) in zip(
        module.state_dict().items(), loaded.state_dict().items(), strict=True
    ):
        assert name == other_name
        assert torch.equal(value, other)


def test_arrays_go_out_of_band_and_come_back_writable() -> None:
    array = np.arange(5000.0)
    pickled = pickle_object(array)
    assert len(pickled.body) < 500
    assert len(pickled.buffers) == 1
    loaded = load(pickled)  # as they were made: whoever unpickles them must not get the sender's memory
    loaded[0] = 7
    assert array[0] == 0
    received = bytearray(pickled.buffers[0])
    taken: Any = unpickle_object(pickled.body, [memoryview(received)], [])
    taken[1] = 9
    assert received != pickled.buffers[0], "writable memory is taken over, not copied"
    assert np.array_equal(array, np.arange(5000.0))


@pytest.mark.parametrize(
    "function",
    [double, torch.add, torch.nn.functional.gelu, torch.Tensor.add, torch.nn.Linear, dict.get, len, np.add],
    ids=repr,
)
def test_functions_travel_by_name(function: object) -> None:
    pickled = pickle_object(function)
    assert load(pickled) is function
    assert b"cloudpickle" not in pickled.body


def test_bound_methods_take_their_object_along() -> None:
    assert round_trip(Point(3).moved)(4) == (3, 4)
    total = round_trip(torch.ones(2).add)(1)
    assert total.tolist() == [2.0, 2.0]


def test_what_has_no_name_travels_by_value() -> None:
    offset = torch.full((1,), 5.0)

    def shifted(x: int) -> torch.Tensor:
        return x + offset

    class Local:
        scale = 3

    first = torch.zeros(1)  # listed by the try by name, before it fails
    pickled = pickle_object((first, shifted, lambda x: x * 2, Local(), Point(1)))
    assert [id(tensor) for tensor in pickled.tensors] == [id(first), id(offset)]
    zero, function, lambda_, local, point = load(pickled)
    assert zero is first
    assert function(1).tolist() == [6.0]
    assert lambda_(4) == 8
    assert local.scale == 3
    assert point == Point(1)


def test_a_module_that_is_gone_travels_by_value() -> None:
    module = types.ModuleType("weft_test_gone")
    exec("def f():\n    return 'here'", module.__dict__)
    assert round_trip(module.f)() == "here"


def test_an_impostor_travels_by_value() -> None:
    def double(x: int) -> int:
        return 3 * x

    double.__qualname__ = "double"
    assert round_trip(double)(2) == 6


def test_reducers_are_for_their_type_and_called_once_an_object() -> None:
    reduced: list[object] = []

    def reduce_point(point: Point) -> tuple[Any, ...]:
        reduced.append(point)
        return Point, (("reduced", point.x),)

    class Nearly(Point):
        pass

    point = Point(1)
    # The lambda makes pickling begin again, by value, when the point has been reduced.
    pickled = pickle_object([point, point, Nearly(2), lambda: 3], {Point: reduce_point})
    loaded = load(pickled)
    assert reduced == [point]
    assert loaded[0] is loaded[1]
    assert loaded[0].x == ("reduced", 1)
    assert loaded[2].x == 2


def test_what_can_not_be_pickled_raises_what_pickle_raises() -> None:
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock' object"):
        pickle_object([lambda: 1, threading.Lock()])

    class Fails:
        def __reduce__(self) -> str:
            raise RuntimeError("can't travel")

    with pytest.raises(RuntimeError, match="can't travel"):
        pickle_object(Fails())


def test_a_missing_name_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[__name__]
    pickled = pickle_object(double)
    monkeypatch.delattr(module, "double")
    with pytest.raises(AttributeError, match="RPC pickler does not serialize function code") as caught:
        load(pickled)
    assert isinstance(caught.value, RuntimeError)
    assert f"{__name__}.double" in str(caught.value)
    again = round_trip(caught.value)
    assert type(again) is MissingNameError
    assert str(again) == str(caught.value)


def test_an_attribute_error_of_a_class_is_left_alone() -> None:
    pickled = pickle_object(FailsToLoad())
    with pytest.raises(AttributeError, match=r"^not here$"):
        load(pickled)


class FailsToLoad:
    def __reduce__(self) -> tuple[Any, ...]:
        return fail_to_load, ()


def fail_to_load() -> None:
    raise AttributeError("not here")


def test_a_missing_module_is_named() -> None:
    body = pickle.dumps(double).replace(__name__.encode(), b"x" * len(__name__))
    with pytest.raises(ModuleNotFoundError) as caught:
        unpickle_object(body, [], [])
    assert "must be importable on both workers" in caught.value.__notes__[0]


@pytest.mark.parametrize(("here", "there"), [("__main__", "__mp_main__"), ("__mp_main__", "__main__")])
def test_the_two_names_of_the_main_module_are_taken_for_each_other(
    here: str, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = types.ModuleType(here)
    main.__file__ = "main.py"
    exec("def f():\n    return 'main'\nclass A:\n    def g(self):\n        return 'g'", main.__dict__)
    for name in (here, there):
        monkeypatch.setitem(sys.modules, name, main)
    main.__name__ = there
    main.f.__module__ = main.A.__module__ = there
    pickled = pickle_object((main.f, main.A.g))
    assert there.encode() in pickled.body
    # At the other end only the other name is known, or it is known and empty.
    monkeypatch.setitem(sys.modules, there, types.ModuleType(there))
    f, g = load(pickled)
    assert (f(), g(None)) == ("main", "g")
    if there == "__mp_main__":
        monkeypatch.delitem(sys.modules, there)
        assert load(pickled)[0]() == "main"


@pytest.mark.processes
def test_a_notebooks_functions_travel_by_value() -> None:
    script = """
        import sys
        from weft.rpc.pickling import pickle_object
        def f(x):
            return x + 1
        sys.stdout.buffer.write(pickle_object(f).body)
    """
    # Text on standard input has no file, as a notebook has none.
    done = subprocess.run(
        [sys.executable, "-"], input=textwrap.dedent(script).encode(), capture_output=True, check=True
    )
    function: Any = unpickle_object(done.stdout, [], [])
    assert function(2) == 3


def test_messages_are_read_inside_each_other_and_on_many_threads() -> None:
    inner = pickle_object([torch.ones(1)])

    def check(number: int) -> None:
        for _ in range(50):
            outer = pickle_object([torch.full((1,), float(number)), Nested(inner), torch.zeros(1)])
            first, nested, last = load(outer)
            seen.append((first.item() == number, nested[0].item() == 1, last.item() == 0))

    seen: list[tuple[bool, bool, bool]] = []
    threads = [threading.Thread(target=check, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [(True, True, True)] * 200


class Nested:
    """Reads another message when it is unpickled."""

    def __init__(self, pickled: Pickled) -> None:
        self.pickled = pickled

    def __reduce__(self) -> tuple[Any, ...]:
        return load_inner, (self.pickled.body, self.pickled.tensors[0].item())


def load_inner(body: bytes, value: float) -> object:
    return unpickle_object(body, [], [torch.full((1,), value)])


def test_plain_pickle_says_that_it_can_not_read_this() -> None:
    with pytest.raises(RuntimeError, match=r"only be read by weft\.rpc"):
        pickle.loads(pickle_object(torch.ones(1)).body)


def test_copyregs_reducers_of_the_day_are_used() -> None:
    import copyreg

    copyreg.pickle(Point, lambda point: (Point, (("copyreg", point.x),)))  # type: ignore[arg-type]
    try:
        assert round_trip(Point(1)).x == ("copyreg", 1)
    finally:
        del copyreg.dispatch_table[Point]


# -- calls and values of the simple form -------------------------------------------------------------


def scale(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    return by * x


class Holder:
    @staticmethod
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x


def travel(lifted: Lifted | None) -> Any:
    assert lifted is not None
    plain, tensors = lifted
    what, values, places, kwargs = pickle.loads(pickle.dumps(plain))
    return put_back(what, values, places, kwargs, tensors, find_global)


@pytest.mark.parametrize("func", [scale, torch.mm, math.prod])
def test_a_call_comes_back(func: Any) -> None:
    x, y = torch.ones(2), torch.zeros(3)
    lifted = lift_call(func, (x, 1, None, y), {"by": 2.0}, is_tracked=False)
    if func is math.prod:  # a builtin that is not torch's is pickled
        assert lifted is None
        return
    found, args, kwargs = travel(lifted)
    assert found is func
    assert args[0] is x
    assert args[1:3] == (1, None)
    assert args[3] is y
    assert kwargs == {"by": 2.0}


@pytest.mark.parametrize("value", [None, 3, "text", b"bytes", (), (1, None), (1.5, "a", True)])
def test_plain_values_come_back(value: Any) -> None:
    assert travel(lift_value(value, is_tracked=False)) == value


def test_tensors_come_back_in_their_places() -> None:
    x, y = torch.ones(2), torch.zeros(3)
    assert travel(lift_value(x, is_tracked=False)) is x
    first, number, second = travel(lift_value((x, 7, y), is_tracked=False))
    assert (first is x, number, second is y) == (True, 7, True)


@pytest.mark.parametrize(
    "value", [[1], {"a": 1}, (1, [2]), (torch.ones(1), {}), torch.float32, nn.Parameter(torch.ones(1)), scale]
)
def test_everything_else_is_pickled(value: Any) -> None:
    assert lift_value(value, is_tracked=False) is None
    args = value if isinstance(value, tuple) else (value,)
    assert lift_call(scale, args, {}, is_tracked=False) is None


def test_one_tensor_in_two_places_is_pickled() -> None:
    x = torch.ones(2)
    assert lift_call(scale, (x, x), {}, is_tracked=False) is None


@pytest.mark.parametrize("func", [lambda x: x, Holder.scale, Holder, torch.Tensor.add, nn.Linear(1, 1)])
def test_functions_without_a_simple_name_are_pickled(func: Any) -> None:
    assert lift_call(func, (), {}, is_tracked=False) is None


def test_keywords_that_are_not_plain_are_pickled() -> None:
    assert lift_call(scale, (), {"x": torch.ones(1)}, is_tracked=False) is None


def test_tracked_parameters_are_tensors() -> None:
    param = nn.Parameter(torch.ones(1))
    assert travel(lift_value(param, is_tracked=True)) is param


def test_names_that_are_missing_or_not_allowed() -> None:
    with pytest.raises(MissingNameError, match="no_such_function"):
        put_back((__name__, "no_such_function"), (), (), {}, ())
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        put_back(("no_such_module", "f"), (), (), {}, ())
    with pytest.raises(RefusedError, match=r"os\.getcwd"):
        put_back(("os", "getcwd"), (), (), {}, (), lambda *name: Allowed(["torch.mm"]).find(*name).value)
    fence = Fence(["torch.mm"], lambda _: None)
    assert put_back(("torch", "mm"), (), (), {}, (), fence.find_function)[0] is torch.mm

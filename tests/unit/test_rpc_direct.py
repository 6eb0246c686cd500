"""Calls and values of the simple form: what has it, and that it comes back as it was."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from weft.errors import RefusedError
from weft.rpc.allowed import Allowed, MissingNameError
from weft.rpc.direct import Lifted, lift_call, lift_value, put_back
from weft.rpc.fence import Fence
from weft.rpc.pickling import find_global


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

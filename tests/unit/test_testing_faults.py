"""Faults as data: what they fit, how they print, what random_fault draws."""

from __future__ import annotations

import pytest

from weft.errors import ConfigError
from weft.testing import Fault, random_fault


def test_a_fault_prints_as_the_code_that_makes_it() -> None:
    fault = Fault(rank=1, action="kill", op="all_reduce", call=3)
    assert repr(fault) == "Fault(rank=1, action='kill', op='all_reduce', call=3)"
    assert eval(repr(fault)) == fault


@pytest.mark.parametrize(
    ("fault", "is_at_call"),
    [
        (Fault(rank=0, action="kill"), True),
        (Fault(rank=0, action="kill", call=2), True),
        (Fault(rank=0, action="kill", op="barrier", step=1), True),
        (Fault(rank=0, action="kill", feature="ddp", step=1), True),
        (Fault(rank=0, action="kill", call=0, step=1), True),
        (Fault(rank=0, action="kill", step=1), False),
    ],
)
def test_a_step_alone_is_the_step_itself(fault: Fault, is_at_call: bool) -> None:
    assert fault.is_at_call == is_at_call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "explode"}, "action must be one of"),
        ({"action": "kill", "error": ValueError()}, "error is for action='raise'"),
        ({"action": "kill", "call": -1}, "call counts from 0; got -1"),
        ({"action": "kill", "step": -2}, "step counts from 0; got -2"),
    ],
)
def test_a_fault_that_can_not_be_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Fault(rank=0, **arguments)  # type: ignore[arg-type]


def test_a_seed_always_draws_the_same_fault() -> None:
    draws = [random_fault(seed, ranks=4, ops=["all_reduce", "broadcast"], calls=5) for seed in range(200)]
    again = [random_fault(seed, ranks=4, ops=["all_reduce", "broadcast"], calls=5) for seed in range(200)]
    assert draws == again
    assert {fault.rank for fault in draws} == {0, 1, 2, 3}
    assert {fault.op for fault in draws} == {"all_reduce", "broadcast"}
    assert {fault.call for fault in draws} == {0, 1, 2, 3, 4}
    assert {fault.action for fault in draws} == {"kill", "stop"}


def test_a_drawn_fault_tells_its_seed_and_can_be_made_again() -> None:
    fault = random_fault(7, ranks=[1, 2], calls=3, actions=["raise"])
    assert "seed=7" in repr(fault)
    assert eval(repr(fault)) == fault
    assert fault.rank in (1, 2)
    assert fault.op is None


def test_nothing_to_draw_from_is_refused() -> None:
    with pytest.raises(ConfigError, match="calls=0"):
        random_fault(0, ranks=2, calls=0)

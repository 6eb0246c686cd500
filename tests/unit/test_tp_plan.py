"""What parallelize_module says of names that mean nothing, in a world of one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import weft
from tests.tp_bodies.models import MLP, Stacked, mlp_plan
from tests.tp_bodies.plans import is_parallel, warned
from tests.tp_bodies.running import LIBRARIES, WEFT
from tests.tp_bodies.twins import make_mesh


def alone(body: Callable[[], Any]) -> Any:
    return weft.launch(body, ranks=1, kind="thread", timeout=60)[0]


def texts_of(tp: Any, module: nn.Module, plan: Any) -> list[str]:
    def body() -> list[str]:
        with warned() as texts:
            assert tp.parallelize_module(module, make_mesh(), plan) is module
        return texts

    return alone(body)


@LIBRARIES
def test_a_name_without_a_module_is_a_warning_and_the_rest_is_done(tp: Any) -> None:
    model = MLP()
    plan = {"net0.hello.world": tp.ColwiseParallel(), **mlp_plan(tp), "net3": tp.ColwiseParallel()}
    texts = texts_of(tp, model, plan)
    assert len(texts) == 2
    assert "Parallelize plan key 'net0.hello.world' could not be resolved" in texts[0]
    assert "Parallelize plan key 'net3' could not be resolved" in texts[1]
    assert all("skipping this plan entry" in text for text in texts)
    assert is_parallel(model)


def test_the_warning_names_what_is_near() -> None:
    (text,) = texts_of(WEFT, Stacked(), {"layers.0.nte1": WEFT.ColwiseParallel()})
    assert "'layers.0.nte1'" in text
    assert "layers.0.net1" in text
    (text,) = texts_of(WEFT, MLP(), {"nett1": WEFT.ColwiseParallel()})
    assert "net1" in text.replace("nett1", "")


def test_nothing_near_is_a_warning_too() -> None:
    (text,) = texts_of(WEFT, MLP(), {"completely_different": WEFT.ColwiseParallel()})
    assert "'completely_different'" in text


@pytest.mark.parametrize("name", ["layers.7.net1", "layers.*.attention", "layers.0.net1.weight", "layer.0"])
def test_a_part_that_matches_is_not_enough(name: str) -> None:
    model = Stacked()
    (text,) = texts_of(WEFT, model, {name: WEFT.ColwiseParallel()})
    assert f"'{name}'" in text
    assert not any(is_parallel(layer) for layer in model.layers)


@LIBRARIES
def test_no_plan_is_a_warning(tp: Any) -> None:
    (text,) = texts_of(tp, MLP(), None)
    assert "No parallelize_plan is provided" in text
    assert "will do nothing" in text


def test_a_plan_without_entries_says_nothing() -> None:
    def body() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = MLP()
            assert WEFT.parallelize_module(model, make_mesh(), {}) is model
            assert WEFT.parallelize_module(model, make_mesh(), {}, strict=True) is model

    alone(body)


def test_names_that_match_say_nothing() -> None:
    def body() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            WEFT.parallelize_module(Stacked(), make_mesh(), mlp_plan(WEFT, "layers.*."), strict=True)

    alone(body)


def test_strict_names_every_bad_name() -> None:
    def body() -> None:
        plan = {"net3": WEFT.ColwiseParallel(), "net4": WEFT.ColwiseParallel()}
        with pytest.raises(ValueError, match="net3"):
            WEFT.parallelize_module(MLP(), make_mesh(), plan, strict=True)

    alone(body)

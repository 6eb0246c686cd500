"""Random graphs over three workers: the gradients are those of the same graph on one."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.dist_autograd.random_plans import Plan, plans
from tests.dist_autograd.random_runs import World, difference, run_locally

pytestmark = pytest.mark.threads

RUNS = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def world() -> Generator[World]:
    with World() as made:
        yield made


@RUNS
@given(plans())
def test_exact(world: World, plan: Plan) -> None:
    """With results and whole branches that nobody uses."""
    event(f"{len(plan.nodes) - len(plan.needed())} unused nodes")
    assert difference(world.run(plan, exact=True), run_locally(plan)) is None


@RUNS
@given(plans())
def test_fast(world: World, plan: Plan) -> None:
    plan = plan.without_the_unused()
    event(f"{len(plan.nodes)} nodes")
    assert difference(world.run(plan), run_locally(plan)) is None


@settings(RUNS, max_examples=30)
@given(st.lists(plans(), min_size=2, max_size=5))
def test_together(world: World, several: list[Plan]) -> None:
    """Contexts side by side over the same leaves, from different roots."""
    expected = [run_locally(plan) for plan in several]
    found = world.run_together(several, exact=True)
    assert [difference(*pair) for pair in zip(found, expected, strict=True)] == [None] * len(several)

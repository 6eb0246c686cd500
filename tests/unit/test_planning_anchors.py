"""A machine is fitted to steps that were measured: here to plans of a machine that is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.planning.anchors import ANCHORS, fit, plan_secs
from weft.planning.machine import Link, Links, Machine

LINK = Link(2e9, 2e-5)
ALONE = Machine(
    name="a small one",
    device="cpu",
    memory_bytes=2**33,
    flops_per_sec=2e10,
    memory_bytes_per_sec=5e9,
    op_secs=5e-6,
    view_secs=5e-6,
    links=Links(LINK, LINK, ranks_per_host=8),
)
IN_STEPS = replace(
    ALONE,
    op_secs=2e-5,
    view_secs=2e-5,
    work_factor=1.5,
    links=replace(ALONE.links, call_secs=4e-4),
)


def test_the_fit_finds_what_steps_take_more() -> None:
    measured = [plan_secs(anchor, IN_STEPS) for anchor in ANCHORS]
    assert measured[0] > 1.2 * plan_secs(ANCHORS[0], ALONE)
    fitted = fit(ALONE, measured)
    # Collectives take a little in the first two steps as well, which goes to operations there.
    assert fitted.work_factor == pytest.approx(1.5, rel=0.1)
    assert fitted.op_secs == pytest.approx(2e-5, rel=0.2)
    for anchor, secs in zip(ANCHORS, measured, strict=True):
        assert plan_secs(anchor, fitted) == pytest.approx(secs, rel=0.02)


def test_steps_that_take_less_than_collectives_alone_are_no_gain() -> None:
    measured = [plan_secs(anchor, ALONE) for anchor in ANCHORS]
    fitted = fit(ALONE, [measured[0], measured[1], measured[2] / 2])
    assert fitted.links.call_secs == 0
    assert fitted.work_factor == pytest.approx(1.0, rel=1e-3)

"""A plan is what a run does: its collectives, to the byte, and its memory."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from tests.planning_bodies import runs
from weft.planning import PlanOptions, plan
from weft.planning.calibrate import as_machine
from weft.planning.measure import measure_rank
from weft.planning.memory import Memory
from weft.planning.profile import load_profile, save_profile
from weft.testing.pool import shared_pool


@pytest.mark.full
@pytest.mark.parametrize("backend", ["gloo", "weft"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_traffic_and_memory_are_those_of_a_run(num_ranks: int, backend: str) -> None:
    planned = runs.plan_all(num_ranks, backend)
    measured = shared_pool(num_ranks).run(runs.run_all, backend=backend, timeout=120, collective_timeout=30)[
        0
    ]
    for case in runs.CASES:
        assert planned[case].traffic == measured[case].traffic, case
    for case in runs.CASES:
        memory = measured[case].memory
        if memory is not None:
            assert_close(planned[case].memory, memory, f"{case} on {num_ranks} ranks over {backend}")


def test_a_measured_machine_can_be_planned_for(tmp_path: Path) -> None:
    found = shared_pool(2).run(measure_rank, args=(1, 1), backend="weft", timeout=120, collective_timeout=30)
    machine = as_machine(found, reads_peers=True)
    assert machine.flops_per_sec > 1e8
    assert {"aten::mm", "aten::mul", "aten::addcdiv_"} <= set(machine.curves)
    assert {"all_reduce", "all_gather", "reduce_scatter", "control"} <= set(machine.links.curves)
    assert all(secs > 0 for curve in machine.links.curves.values() for _, secs in curve.points)
    assert 0 <= machine.links.overlap_cost <= 1
    save_profile(machine, tmp_path / "machine.json")
    again = load_profile(tmp_path / "machine.json")
    (plan_,) = plan("tiny", PlanOptions(ranks=2, strategies=("ddp",), batch=4), again)
    assert plan_.step is not None
    assert 1e-4 < plan_.step.time.total_secs < 100


def assert_close(planned: Memory, measured: Memory, words: str) -> None:
    """Within 10%, each kind; what is less than a hundredth of all may be anything.

    How many buffers of collectives are in use at once depends on how soon ranks come: they count in the sum.
    """
    little = measured.total / 100
    for field in fields(Memory):
        if field.name == "communication":
            continue
        here, there = getattr(planned, field.name), getattr(measured, field.name)
        assert abs(here - there) <= max(0.1 * there, little), f"{words}: {field.name}\n{planned}\n{measured}"
    assert abs(planned.total - measured.total) <= 0.1 * measured.total, f"{words}\n{planned}\n{measured}"

"""What things take on a machine: curves, operations, collectives; fitted to steps, saved as a profile.

And amounts as people write them.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from weft.errors import ConfigError
from weft.planning import EIGHT_GPUS
from weft.planning.anchors import ANCHORS, fit, plan_secs
from weft.planning.machine import Curve, Link, Links, Machine, Spread, Work, collective_secs
from weft.planning.profile import FORMAT, default_path, load_profile, save_profile
from weft.planning.units import read_bytes, read_count, read_secs, show_bytes, show_count, show_secs

LINKS = Links(local=Link(100e9, 1e-6), between=Link(10e9, 10e-6), ranks_per_host=8)


def test_a_curve_goes_through_its_points() -> None:
    curve = Curve(((10.0, 1.0), (1000.0, 100.0)))
    assert curve.secs(10) == 1.0
    assert curve.secs(100) == pytest.approx(10.0)
    assert curve.secs(1000) == pytest.approx(100.0)
    assert curve.secs(2000) == pytest.approx(200.0)  # in proportion to the last
    assert curve.secs(1) == 1.0
    assert Curve(((1.0, 5.0),)).secs(1e9) == 5.0


def test_an_operation_takes_what_limits_it() -> None:
    op_secs = EIGHT_GPUS.op_secs
    assert EIGHT_GPUS.work_secs(Work("aten::mm", 400e12, 8)) == pytest.approx(1 + op_secs)
    assert EIGHT_GPUS.work_secs(Work("aten::add", 0.0, 2 * 10**12)) == pytest.approx(1 + op_secs)
    assert EIGHT_GPUS.work_secs(Work("aten::view", 0.0, 0, is_view=True)) == 0.0
    measured = replace(EIGHT_GPUS, curves={"aten::mm": Curve(((100.0, 7.0),))})
    assert measured.work_secs(Work("aten::mm", 100.0, 8)) == pytest.approx(7 + op_secs)


def test_a_collective_takes_what_its_links_take() -> None:
    near, far = Spread(4, 4), Spread(4, 1)
    assert collective_secs(LINKS, "all_gather", 4 * 10**9, Spread(1, 1)) == 0.0
    assert collective_secs(LINKS, "all_gather", 4 * 10**9, near) == pytest.approx(0.03, rel=1e-3)
    assert collective_secs(LINKS, "all_gather", 4 * 10**9, far) == pytest.approx(0.3, rel=1e-3)
    assert collective_secs(LINKS, "all_reduce", 4 * 10**9, far) == pytest.approx(0.6, rel=1e-3)
    # Eight ranks of a host have eight cards, and are limited by what is within the host.
    wide = Spread(16, 8)
    assert collective_secs(LINKS, "all_gather", 16 * 10**9, wide) == pytest.approx(15 / 80, rel=1e-3)


def test_latency_grows_with_the_logarithm() -> None:
    few = collective_secs(LINKS, "all_reduce", 0, Spread(16, 1))
    many = collective_secs(LINKS, "all_reduce", 0, Spread(16384, 1))
    assert few == pytest.approx(2 * 4 * 10e-6)
    assert many == pytest.approx(2 * 14 * 10e-6)


def test_a_measured_link_is_taken_between_neighbours() -> None:
    links = replace(LINKS, curves={"all_reduce": Curve(((1.0, 1e-3), (1e6, 2e-3)))})
    assert collective_secs(links, "all_reduce", 10**6, Spread(2, 2)) == pytest.approx(2e-3)
    assert collective_secs(links, "all_reduce", 10**6, Spread(4, 4)) == pytest.approx(3e-3 + 1e-3)
    assert collective_secs(links, "all_reduce", 10**6, Spread(2, 1)) < 1e-3


def test_amounts_are_read_and_shown() -> None:
    assert read_bytes("80GB") == 80e9
    assert read_bytes("1.5 TB") == 1.5e12
    assert read_bytes("1GiB") == 2**30
    assert read_bytes("50GB/s") == 50e9
    assert read_count("400T") == 400e12
    assert read_secs("10us") == pytest.approx(1e-5)
    assert [show_bytes(n) for n in (0, 999, 1000, 43_273_728, 80e9, 2.5e15)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "43.3 MB",
        "80.0 GB",
        "2500 TB",
    ]
    assert [show_secs(s) for s in (5e-6, 0.0123, 2.5, 300.0)] == ["5 us", "12.3 ms", "2.5 s", "300 s"]
    assert [show_count(n) for n in (7, 12_345, 2.44e6)] == ["7", "12.3k", "2.44M"]


@pytest.mark.parametrize("text", ["", "much", "-1GB", "0GB", "80XB"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no amount of bytes"):
        read_bytes(text)


def test_a_profile_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "machine.json"
    links = replace(LINKS, curves={"all_reduce": Curve(((1.0, 0.5), (2.0, 0.75)))}, overlap_cost=0.3)
    machine = replace(EIGHT_GPUS, links=links, curves={"aten::mm": Curve(((1.0, 2.0),))}, dtensor_secs=1e-5)
    save_profile(machine, path)
    assert load_profile(path) == machine
    assert [found.name for found in path.parent.iterdir()] == ["machine.json"]


def test_a_profile_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.json"
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        load_profile(path)
    before, lacking = f'{{"format": {FORMAT - 1}}}', f'{{"format": {FORMAT}}}'
    for text, words in (
        ("{", "is no profile"),
        ("[]", "is no profile"),
        (before, f"is no profile of format {FORMAT}"),
        (lacking, "is damaged"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            load_profile(path)
    with pytest.raises(ConfigError, match="can't be written"):
        save_profile(EIGHT_GPUS, path / "under" / "a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "weft" / "machine.json"


# -- fitted to steps that were measured: here to plans of a machine that is known ----------------

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

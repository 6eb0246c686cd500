"""tests/ranks.py: where bodies are collected and run, with what, and what their failures show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT, run_on

HELPER = """
def check(found):
    assert {"found": found} == {"found": 3}
"""
SAMPLE = """
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from tests.join import joinables
from tests.ranks import SitOut, at_each_rank, run_on

pytestmark = run_on(threads=2)


@pytest.mark.parametrize("numel", [1, 7])
def test_sum(numel):
    ones = torch.ones(numel)
    dist.all_reduce(ones)
    assert ones.tolist() == [2] * numel


@run_on(threads=1, way=["one"])
@run_on(weft=(1, 2), gloo=2, way=["two", None], full=True)
def test_ways(way):
    assert dist.get_backend() == ("weft" if way == "one" else dist.get_backend())


@run_on(weft=2, also=True)
def test_also():
    assert dist.get_world_size() == 2


@run_on()
def test_alone():
    assert not dist.is_initialized()


class Value:
    pass


@run_on(threads=2, weft=2)
@pytest.mark.parametrize("given", [Value])
def test_classes_are_those_of_the_module(given):
    assert given is Value
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, given)
    assert gathered == [Value] * dist.get_world_size()


@contextmanager
def entered(add):
    yield dist.get_rank() + add


@pytest.fixture(params=[3, 4])
def number(request):
    return at_each_rank(entered, request.param)


@run_on(threads=2, gloo=2)
def test_fixture(number):
    assert number in (dist.get_rank() + 3, dist.get_rank() + 4)


@contextmanager
def unless_last():
    if dist.get_rank() == dist.get_world_size() - 1:
        dist.barrier()
        raise SitOut
    yield dist.get_rank()
    dist.barrier()


@pytest.fixture
def player():
    return at_each_rank(unless_last)


@run_on(threads=3, weft=2)
def test_one_sits_out(player):
    assert player == dist.get_rank() < dist.get_world_size() - 1


@run_on(threads=3, weft=2)
def test_fails():
    dist.barrier()
    assert [1, dist.get_rank() + 1] == [1, 0]


@run_on(threads=1, weft=2)
def test_asserts_beside_tests_are_rewritten():
    assert type(joinables.__loader__).__name__ == "AssertionRewritingHook"


def test_one_rank_fails():
    assert dist.get_rank() == 0
    dist.barrier()


@run_on(threads=2, weft=2)
def test_skips():
    if dist.get_rank() == 1:
        pytest.skip("not today")


@run_on(threads=2, weft=2)
def test_fails_and_skips():
    if dist.get_rank() == 1:
        pytest.skip("not today")
    raise KeyError("lost")


@run_on(threads=2, weft=2, collective_timeout=0.5)
def test_hangs():
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        dist.recv(torch.ones(1), 0)


@run_on(threads=2, weft=2)
def test_warns():
    import warnings

    warnings.warn("careful", UserWarning)


@run_on(weft=2)
@pytest.mark.filterwarnings("ignore:careful")
def test_may_warn():
    import warnings

    warnings.warn("careful", UserWarning)


@run_on(gpu=2, gpu_gloo=2, gpu_threads=2, nccl=(1, 2))
def test_on_a_gpu():
    pass
"""


def run_pytest(folder: Path, *options: str) -> str:
    """Run pytest on the folder with tests/ranks.py as its plugin, and give what it prints."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.ranks", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), *options, str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("sample")
    (folder / "test_sample.py").write_text(SAMPLE)
    return run_pytest(folder, "-m", "not gpu")


def outcomes(output: str, test: str) -> dict[str, str]:
    """What pytest says of each place of a test."""
    found = re.findall(rf"^test_sample.py::{test}(?:\[(.*)\])? (PASSED|FAILED|SKIPPED|ERROR)", output, re.M)
    return dict(found)


def section(output: str, test: str) -> str:
    """What pytest shows of a failure."""
    return re.split(r"^_{3,} .* _{3,}$|^={3,} .* ={3,}$", output.split(f" {test} _", 1)[1], flags=re.M)[0]


@pytest.mark.processes
def test_a_test_is_collected_once_for_each_place(output: str) -> None:
    assert outcomes(output, "test_sum") == {"threads-2-1": "PASSED", "threads-2-7": "PASSED"}
    places = [
        "threads-1-one",
        *(f"{place}-{way}" for place in ("weft-1", "weft-2", "gloo-2") for way in ("two", "None")),
    ]
    assert outcomes(output, "test_ways") == dict.fromkeys(places, "PASSED")
    assert outcomes(output, "test_also") == {"threads-2": "PASSED", "weft-2": "PASSED"}
    assert outcomes(output, "test_alone") == {"": "PASSED"}


@pytest.mark.processes
def test_ranks_have_the_modules_own_classes_and_their_own_fixtures(output: str) -> None:
    places = ("threads-2", "weft-2")
    assert outcomes(output, "test_classes_are_those_of_the_module") == {
        f"{at}-Value": "PASSED" for at in places
    }
    found = outcomes(output, "test_fixture")
    assert found == {f"{place}-2-{given}": "PASSED" for place in ("threads", "gloo") for given in (3, 4)}
    assert outcomes(output, "test_one_sits_out") == {"threads-3": "PASSED", "weft-2": "PASSED"}


@pytest.mark.processes
def test_a_failure_shows_every_rank_and_the_values_of_asserts(output: str) -> None:
    for place, ranks in (("threads-3", 3), ("weft-2", 2)):
        assert outcomes(output, "test_fails")[place] == "FAILED"
        shown = section(output, f"test_fails[{place}]")
        for rank in range(ranks):
            assert re.search(rf"\brank {rank}\b", shown), "a rank that was ended by another's failure too"
        assert re.search(r"AssertionError: assert \[1, \d\] == \[1, 0\]", shown)
        assert "_pyfunc_call" not in shown, "frames that are not the test's are left out"
    rewritten = outcomes(output, "test_asserts_beside_tests_are_rewritten")
    assert rewritten == {"threads-1": "PASSED", "weft-2": "PASSED"}
    assert re.search(r"At index 1 diff: \d != 0", section(output, "test_fails[threads-3]"))
    assert "assert 1 == 0" in section(output, "test_one_rank_fails[threads-2]")


@pytest.mark.processes
def test_a_rank_may_skip_and_hides_no_failure(output: str) -> None:
    assert outcomes(output, "test_skips") == {"threads-2": "SKIPPED", "weft-2": "SKIPPED"}
    assert outcomes(output, "test_fails_and_skips") == {"threads-2": "FAILED", "weft-2": "FAILED"}
    assert "KeyError: 'lost'" in section(output, "test_fails_and_skips[weft-2]")
    assert re.search(r"SKIPPED \[\d\] test_sample.py:\d+: not today", output)


@pytest.mark.processes
def test_limits_and_warnings_reach_the_ranks(output: str) -> None:
    assert outcomes(output, "test_hangs") == {"threads-2": "FAILED", "weft-2": "FAILED"}
    assert "waited past the timeout" in section(output, "test_hangs[weft-2]")
    assert outcomes(output, "test_warns") == {"threads-2": "FAILED", "weft-2": "FAILED"}
    assert outcomes(output, "test_may_warn") == {"weft-2": "PASSED"}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("marks", "selected"),
    [
        ("threads and not gpu", {"test_sum[threads-2]", "test_more[threads-3]"}),
        ("full or nccl", {"test_more[threads-3]", "test_more[nccl-2]"}),
        ("not threads and not processes", {"test_alone"}),
    ],
)
def test_marks_select_places(marks: str, selected: set[str], tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(
        "from tests.ranks import run_on\n"
        "@run_on(threads=2)\n"
        "def test_sum(): ...\n"
        "@run_on(gpu=1, gpu_threads=1)\n"
        "@run_on(threads=3, nccl=2, full=True)\n"
        "def test_more(): ...\n"
        "def test_alone(): ...\n"
    )
    shown = run_pytest(tmp_path, "--collect-only", "-q", "-q", "-m", marks)
    assert set(re.findall(r"::(\S+)", shown)) == selected


REFUSED = {
    "must give the same parameters": "@run_on(threads=2, a=[1])\n@run_on(weft=2)\ndef test_a(a): ...",
    "uses no argument 'thread'": "@run_on(thread=[2], weft=1)\ndef test_a(): ...",
    "for functions, not for methods": "class TestA:\n    @run_on(weft=2)\n    def test_a(self): ...",
    "needs one rank or more": "@run_on(weft=0)\ndef test_a(): ...",
}


@pytest.mark.processes
def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    for number, test in enumerate(REFUSED.values()):
        (tmp_path / f"test_{number}.py").write_text(f"from tests.ranks import run_on\n{test}\n")
    shown = run_pytest(tmp_path, "--collect-only")
    assert [reason for reason in REFUSED if reason not in shown] == []
    assert f"{len(REFUSED)} errors" in shown


def test_limits_are_those_given_or_those_of_the_place() -> None:
    places = run_on(threads=2, weft=2, nccl=2, timeout=7).args[0]
    assert [(str(place), place.timeout, place.collective_timeout) for place in places] == [
        ("threads-2", 7, 10),
        ("weft-2", 7, 20),
        ("nccl-2", 7, 40),
    ]

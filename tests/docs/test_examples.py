"""Every example runs as its first lines say, and comes to the losses of one process.

What else an example promises is tested beside this file, in test_examples_*.py.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pooled import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
# The training loop by hand: short enough to be read at once.
BY_HAND = ("ddp", "fully_shard", "two_d", "uneven", "hooks", "remote_embedding")
MAX_LINES_BY_HAND = 59


def run(name: str, options: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    return run_script(EXAMPLES / f"{name}.py", monkeypatch, options)


def read_losses(printed: str) -> tuple[list[float], list[float]]:
    """The losses of the ranks, and those of one process, a pair for each line."""
    pairs = [re.findall(r"\d+\.\d+", line) for line in printed.splitlines()]
    assert {len(pair) for pair in pairs} == {2}, printed
    return [float(pair[0]) for pair in pairs], [float(pair[1]) for pair in pairs]


@pytest.mark.processes
@pytest.mark.parametrize(("name", "options"), [*((name, []) for name in BY_HAND), ("two_d", ["fully_shard"])])
def test_an_example_by_hand_shows_both_losses(
    name: str, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, alone = read_losses(run(name, options, monkeypatch))
    assert len(seen) >= (3 if name == "hooks" else 6)
    assert seen == pytest.approx(alone, rel=0.02 if name == "hooks" else 1e-4)
    if name != "hooks":
        assert seen[-1] < seen[0]


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--nproc-per-node", "2"]])
def test_an_example_runs_as_a_command(launcher: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *launcher, EXAMPLES / "ddp.py"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen, alone = read_losses(done.stdout)
    assert len(seen) == 10
    assert seen == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_says_how_to_run_it(path: Path) -> None:
    text = path.read_text()
    says = ast.get_docstring(ast.parse(text)) or ""
    assert f"python examples/{path.name}" in says
    assert ("torchrun" in says) == ("is_torchelastic_launched" in text)


@pytest.mark.parametrize("name", BY_HAND)
def test_a_loop_by_hand_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= MAX_LINES_BY_HAND


# -- the longer ones ---------------------------------------------------------------


@pytest.mark.processes
def test_the_transformer_plan_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--sequence-parallel", "--data-parallel", "fully_shard", "--steps", "3"]
    head, *lines = run("transformer_plan", options, monkeypatch).splitlines()
    assert head.split() == ["step", "four", "ranks", "alone"]
    seen, alone = read_losses("\n".join(lines))
    assert len(seen) == 3
    assert seen == pytest.approx(alone, rel=1e-3)
    assert seen[-1] < seen[0]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "num_lines", "factor"), [("parameter_server", 20, 50), ("remote_pipeline", 10, 20)]
)
def test_losses_fall(
    name: str,
    num_lines: int,
    factor: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses = [float(line.split()[-1]) for line in run(name, [], monkeypatch).splitlines()]
    assert len(losses) == num_lines
    assert losses[-1] < losses[0] / factor


@pytest.mark.processes
def test_the_recommender_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line.split() for line in run("recommender", [], monkeypatch).splitlines()]
    for trainer in ("trainer1", "trainer2"):
        losses = [float(words[-1]) for words in lines if words[0] == trainer]
        assert len(losses) == 6
        assert losses[-1] < losses[0] / 20

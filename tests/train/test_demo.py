"""`python -m weft demo` trains, compares and draws; it says what is wrong."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import weft
from weft.__main__ import main
from weft.training import demo, job
from weft.training.options import TrainOptions


@pytest.mark.full
@pytest.mark.processes
def test_the_demo_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "weft", "demo", "--steps", "4", "--context", "16"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "step 4/4  loss" in done.stdout
    assert "(never more than" in done.stdout
    assert done.stdout.index("What to try next") < done.stdout.index("equal: in the first 4 steps")
    assert json.loads((tmp_path / "weft-demo" / "run.json").read_text())["strategy"] == "ddp"
    assert "<html" in (tmp_path / "weft-demo" / "report.html").read_text()


@pytest.mark.processes
def test_the_command_of_the_readme_as_it_stands() -> None:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".venv").exists():
        pytest.skip("scripts/demo would install into .venv, which is not there: these tests run elsewhere")
    done = subprocess.run(
        [root / "scripts" / "demo"],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=root,
    )
    assert done.returncode == 0, done.stderr
    assert "step 300/300  loss" in done.stdout
    assert done.stdout.index("What to try next") < done.stdout.index("equal: in the first 50 steps")


def test_the_demo_starts_its_ranks_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "1" if name != "RANK" else "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == (
        "weft demo: it starts its ranks itself. Run it without torchrun, with --ranks N.\n"
    )


def test_losses_that_differ_in_the_first_steps_are_an_error() -> None:
    right, options = [5.0] * demo.JUDGED_STEPS, TrainOptions()
    assert demo.judge_losses(options, [*right, 2.0], [*right, 1.0]).startswith("equal")
    assert demo.judge_losses(options, [5.0 + 1e-6], [5.0]).startswith("equal")
    for wrong in (5.0 + 2e-5, math.nan):
        with pytest.raises(weft.InternalError, match=f"at step {demo.JUDGED_STEPS} the loss of 2 ranks"):
            demo.judge_losses(options, [*right[1:], wrong], right)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rate": 1e-2}, "at a learning rate above 0.003 rounding grows"),
        ({"rate": 1e-5}, "at a learning rate below 0.0001 wrong gradients hardly show"),
        ({"hook": "int8"}, "hook int8 compresses gradients"),
        ({"uneven": True}, "with --uneven the ranks see fewer batches"),
    ],
)
def test_losses_that_need_not_be_equal_are_not_judged(options: dict[str, Any], reason: str) -> None:
    told = demo.judge_losses(TrainOptions(**options), [5.0, 4.0], [5.0, 4.1])
    assert told.startswith(f"not judged: {reason}")


@pytest.mark.processes
@pytest.mark.parametrize("fault", ["a sum in place of a mean", "a rank left out"])
def test_gradients_that_are_not_the_mean_are_noticed(fault: str) -> None:
    options = TrainOptions(steps=10, decay=300)
    right, wrong = weft.launch(_losses, ranks=1, args=([(options, ""), (options, fault)],))[0]
    with pytest.raises(weft.InternalError, match="please report"):
        demo.judge_losses(options, wrong, right)


def _losses(runs: list[tuple[TrainOptions, str]]) -> list[tuple[float, ...]]:
    """The losses of one process for each of these options, with this fault in its gradients."""
    return [_train_with_fault(replace(options, ranks=1), fault) for options, fault in runs]


def _train_with_fault(options: TrainOptions, fault: str) -> tuple[float, ...]:
    def spoil(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad.mul_(2)

    if fault == "a rank left out":
        # Half of each batch decides: what a rank of two that hears nothing of the other would do.
        with pytest.MonkeyPatch.context() as patch:
            whole = job.next_byte_loss
            patch.setattr(
                job, "next_byte_loss", lambda out, to: whole(out[: len(out) // 2], to[: len(to) // 2])
            )
            return job.run_rank(options).losses
    hook = register_optimizer_step_pre_hook(spoil) if fault else None
    try:
        return job.run_rank(options).losses
    finally:
        if hook is not None:
            hook.remove()


@pytest.mark.parametrize("arguments", [["--ranks", "two"], ["--strategy", "dance"], ["--fast"]])
def test_bad_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["demo", *arguments])
    assert exit_.value.code == 2
    assert "error:" in capsys.readouterr().err

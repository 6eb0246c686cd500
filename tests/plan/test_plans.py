"""Plans as a user asks for them: ranked, with reasons, in seconds, also for very many ranks."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from weft.__main__ import main
from weft.errors import ConfigError
from weft.planning import EIGHT_GPUS, Job, PlanOptions, plan
from weft.planning.page import explain, show_plans

MODEL = """
import torch
from torch import nn

def make():
    batch = torch.zeros(4, 32)
    return nn.Linear(32, 32), batch, batch, nn.functional.mse_loss

def wrong():
    return "nothing"

def raising():
    raise KeyError("no such layer")
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_best_is_first_and_the_others_have_reasons() -> None:
    plans = plan("tiny", PlanOptions(ranks=4, batch=8), EIGHT_GPUS)
    assert {one.strategy for one in plans} == set(PlanOptions(ranks=1).strategies)
    fitting = [one for one in plans if one.fits]
    assert len(fitting) == 7
    rates = [one.tokens_per_sec for one in fitting]
    assert rates == sorted(rates, reverse=True)
    assert plans[-1].strategy == "rpc"
    assert "not planned" in plans[-1].refusal
    words = explain(plans)
    assert len(words) == len(plans)
    assert words[0].startswith(f"{plans[0].strategy} is first: it fits")
    sharded = next(one for one in plans if one.strategy == "fsdp").step
    whole = next(one for one in plans if one.strategy == "ddp").step
    assert sharded is not None
    assert whole is not None
    assert sharded.memory.parameters == pytest.approx(whole.memory.parameters / 4, rel=0.02)
    assert sharded.memory.optimizer == pytest.approx(whole.memory.optimizer / 4, rel=0.02)


def test_what_does_not_fit_and_what_can_not_be() -> None:
    machine = replace(EIGHT_GPUS, memory_bytes=400_000_000)
    options = PlanOptions(ranks=32, strategies=("ddp", "hsdp", "tp", "fsdp"), batch=32, context=16, shard=32)
    plans = plan("gpt-125m", options, machine)
    assert [one.strategy for one in plans] == ["fsdp", "hsdp", "ddp", "tp"] or plans[0].strategy == "hsdp"
    ddp, tp = plans[2], plans[3]
    assert (ddp.strategy, tp.strategy) == ("ddp", "tp")
    assert not ddp.fits
    assert tp.refusal == "gpt-125m has 12 heads, which 32 ranks of a tp axis can't share out."
    words = "\n".join(explain(plans))
    assert "ddp does not fit: a rank would need" in words
    assert "parameters, gradients and optimizer state" in words
    assert "tp can't be: gpt-125m has 12 heads" in words
    (uneven,) = plan("tiny", PlanOptions(ranks=16, strategies=("ddp",), batch=12))
    assert uneven.refusal.startswith("a batch of 12 can't be cut into 16 equal parts")


def test_very_many_ranks_take_seconds() -> None:
    start = time.process_time()
    options = PlanOptions(ranks=16384, strategies=("ddp", "fsdp", "hsdp", "fsdp+tp"), batch_per_rank=4)
    plans = plan("small", options)
    assert all(one.step is not None for one in plans), [one.refusal for one in plans]
    assert time.process_time() - start < 30
    sizes = {(one.strategy, traffic.group_size) for one in plans for traffic in one.step.traffic}  # type: ignore[union-attr]
    assert {("ddp", 16384), ("hsdp", 8192), ("hsdp", 2), ("fsdp+tp", 2)} <= sizes


def test_a_hook_sends_fewer_bytes() -> None:
    def sent(hook: str) -> int:
        (one,) = plan("tiny", PlanOptions(ranks=4, strategies=("ddp",), batch=4, hook=hook))
        assert one.step is not None, one.refusal
        return sum(traffic.bytes_in for traffic in one.step.traffic)

    whole = sent("none")
    assert sent("bf16") == pytest.approx(whole / 2, rel=0.01)
    assert sent("powersgd") < whole / 5


def test_a_slow_network_makes_a_step_longer() -> None:
    def secs(bandwidth: float) -> float:
        links = replace(EIGHT_GPUS.links, between=replace(EIGHT_GPUS.links.between, bytes_per_sec=bandwidth))
        (one,) = plan(
            "small", PlanOptions(ranks=16, strategies=("ddp",), batch=16), replace(EIGHT_GPUS, links=links)
        )
        assert one.step is not None
        return one.step.time.total_secs

    assert secs(1e8) > 3 * secs(50e9)


def test_a_function_of_ones_own() -> None:
    def make() -> Job:
        batch = torch.zeros(2, 64)
        return Job(
            nn.Sequential(nn.Linear(64, 64)), batch, batch, nn.functional.mse_loss, optimizer=torch.optim.SGD
        )

    (one, other) = plan(make, PlanOptions(ranks=2, strategies=("ddp", "tp"), batch=8))
    assert one.step is not None
    assert one.step.memory.optimizer == 0
    assert one.tokens == 8 * 64
    assert "needs a plan" in other.refusal


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    told = tmp_path / "plan.json"
    code, out, _ = run(
        capsys, f"{path}:make", "--ranks", "4", "--strategy", "ddp", "fsdp", "--json", str(told)
    )
    assert code == 0
    assert out.splitlines()[0].split()[:3] == ["strategy", "ranks", "fits"]
    assert "is first: it fits" in out
    found = json.loads(told.read_text())
    assert {one["strategy"] for one in found} == {"ddp", "fsdp"}
    assert found[0]["step"]["traffic"][0]["op"] in ("all_reduce", "all_gather_spread")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "which MODEL?"),
        (["tiny"], "how many --ranks?"),
        (["huge", "--ranks", "2"], "there is no model 'huge'"),
        (["tiny", "--ranks", "0"], "--ranks must be at least 1; got 0"),
        (["tiny", "--ranks", "4000000000"], "--ranks must be at most 1000000; got 4000000000"),
        (["tiny", "--ranks", "2", "--strategy", "magic"], "there is no strategy 'magic'"),
        (["tiny", "--ranks", "2", "--hook", "zip"], "there is no hook 'zip'"),
        (["tiny", "--ranks", "2", "--dtype", "fp8"], "there is no dtype 'fp8'"),
        (["tiny", "--ranks", "2", "--batch", "2", "--batch-per-rank", "1"], "give one of them"),
        (["no/file.py:make", "--ranks", "2"], "there is no file no/file.py"),
        (["weft.errors:nothing", "--ranks", "2"], "weft.errors has no function 'nothing'"),
        (["tiny", "--ranks", "2", "--profile", "no/profile"], "the profile no/profile can't be read"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("weft plan: ")
    assert words in err
    assert err.count("\n") == 1


def test_a_function_that_gives_something_else(tmp_path: Path) -> None:
    path = tmp_path / "other_model.py"
    path.write_text(MODEL)
    (one,) = plan(f"{path}:wrong", PlanOptions(ranks=2, strategies=("ddp",)))
    assert "gave str; it must give (model, inputs, targets, loss)" in one.refusal
    with pytest.raises(ConfigError, match="--context is for models by size"):
        plan(f"{path}:make", PlanOptions(ranks=2, context=8))


def test_a_function_or_a_module_that_raises(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "raising_model.py"
    path.write_text(MODEL)
    (tmp_path / "unfinished_model.py").write_text("def make(:")
    unfinished = "module unfinished_model can't be imported: SyntaxError"
    for model, words in (
        (f"{path}:raising", "raising_model.py:raising raised KeyError: 'no such layer'"),
        ("raising_model:raising", "raising_model:raising raised KeyError: 'no such layer'"),
        ("unfinished_model:make", unfinished),
    ):
        code, out, err = run(capsys, model, "--ranks", "2")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert words in err


def test_the_page_has_every_collective() -> None:
    plans = plan("tiny", PlanOptions(ranks=2, strategies=("ddp",), batch=2))
    page = show_plans(plans)
    assert "all_reduce" in page
    assert "1.53 MB" in page

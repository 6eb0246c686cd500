"""`weft train` with options that can't be together: one line, exit code 2, and no rank is started."""

from __future__ import annotations

from operator import sub
from pathlib import Path

import pytest

from weft.__main__ import main
from weft.errors import ConfigError
from weft.training import command
from weft.training.options import TrainOptions, check_same_run, with_saved_decay


@pytest.fixture(autouse=True)
def no_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **keywords: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(command, "launch", fail)


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that these arguments come to."""
    assert main(["train", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("weft train: ")
    assert said.err.count("\n") == 1
    assert said.err.endswith("\n")
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--strategy tp --uneven", "every batch"),
        ("--strategy rpc --uneven", "every batch"),
        ("--strategy rpc --compile", "compile"),
        ("--strategy tp --hook bf16", "hook bf16"),
        ("--strategy ddp --tp 2", "--tp 2"),
        ("--strategy fsdp --shard 2", "--shard 2"),
        ("--strategy ddp+tp --ranks 4 --tp 3", "--tp 3"),
        ("--strategy hsdp --ranks 4 --shard 3", "--shard 3"),
        ("--strategy tp --ranks 4 --tp 2", "--tp"),
        ("--strategy tp --ranks 3", "heads"),
        ("--ranks 3", "--batch 16"),
        ("--resume", "--checkpoint"),
        ("--ranks 0", "--ranks"),
        ("--ranks -2", "--ranks"),
        ("--steps 0", "--steps"),
        ("--batch 0", "--batch"),
        ("--context 0", "--context"),
        ("--rate 0", "--rate"),
        ("--rate nan", "--rate"),
        ("--rate inf", "--rate"),
        ("--every 0", "--every"),
        ("--keep 0", "--keep"),
    ],
)
def test_a_bad_combination_is_refused_with_the_reason(
    arguments: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in refuse(capsys, *arguments.split())


def test_uneven_and_checkpoints_cannot_be_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "saved"
    assert "--uneven" in refuse(capsys, "--uneven", "--checkpoint", str(directory))
    assert not directory.exists()


@pytest.mark.parametrize(
    "arguments",
    [["--strategy", "magic"], ["--hook", "zip"], ["--model", "huge"], ["--ranks", "two"], ["--go"]],
)
def test_words_that_are_not_there_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["train", *arguments])
    assert exit_.value.code == 2
    assert arguments[-1] in capsys.readouterr().err


def test_a_file_that_is_not_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    short = tmp_path / "short.txt"
    short.write_text("Too short for a sequence.")
    for bad, reason in [
        (tmp_path / "missing.txt", "No such file"),
        (tmp_path, "directory"),
        (empty, "0 bytes"),
        (short, "25 bytes"),
        (short / "below", "Not a directory"),
        (tmp_path / ("n" * 300), "too long"),
        (tmp_path / "new\nline", "No such file"),
    ]:
        directory = tmp_path / "saved" / "deep"
        line = refuse(capsys, "--data", str(bad), "--checkpoint", str(directory), "--record", str(directory))
        assert reason in line
        assert not directory.parent.exists()


def test_a_directory_that_cannot_be_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    before = sorted(tmp_path.rglob("*"))
    for option in ("--checkpoint", "--record"):
        for bad in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/weft/below")):
            line = refuse(capsys, option, str(bad))
            assert str(bad) in line, option
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "in the way"


def test_what_was_made_is_gone_when_the_second_directory_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    refuse(capsys, "--checkpoint", str(tmp_path / "a" / "b"), "--record", str(tmp_path / "file" / "below"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_checkpoints_that_are_there_need_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step-00000003").mkdir()
    line = refuse(capsys, "--checkpoint", str(tmp_path))
    assert "--resume" in line
    assert str(tmp_path) in line
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_the_learning_rate_rises_then_falls_along_a_cosine() -> None:
    options = TrainOptions(steps=120, rate=1.0, warmup=20)
    rates = [options.learning_rate(step) for step in range(140)]
    assert rates[0] == pytest.approx(1 / 20)
    assert rates[19] == rates[20] == pytest.approx(1.0)
    assert rates[70] == pytest.approx(0.55), "half-way down to a tenth"
    assert all(rate == pytest.approx(0.1) for rate in rates[120:])
    assert max(map(sub, rates[21:120], rates[20:119])) <= 0, "it never rises again"
    assert TrainOptions(rate=1.0, warmup=0).learning_rate(0) == 1.0


@pytest.mark.parametrize("missing", ["warmup", "decay"])
def test_a_checkpoint_of_a_constant_rate_is_refused(missing: str) -> None:
    wanted = TrainOptions().fixed(b"text")
    saved = {name: value for name, value in wanted.items() if name != missing} | {"rate": 0.003}
    with pytest.raises(ConfigError, match=r"its rate was constant \(0\.003\).*take another --checkpoint"):
        check_same_run(saved, wanted, Path("step-00000010"))


def test_more_steps_after_a_checkpoint_keep_its_decay() -> None:
    saved = TrainOptions(steps=10).fixed(b"text")
    longer = TrainOptions(steps=20)
    assert with_saved_decay(longer, saved).learning_rate(5) == TrainOptions(steps=10).learning_rate(5)
    assert with_saved_decay(TrainOptions(steps=20, decay=30), saved).num_decay == 30

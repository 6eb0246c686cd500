"""Checkpoints and records that others made, damaged or hold: refused in one line; and nothing is lost."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

import weft
from tests.ranks import run_on
from tests.train import commands, file_fuzz
from tests.train.runs import SMALL, alone, run_each, same_as
from weft.__main__ import main
from weft.errors import ConfigError
from weft.observe.folder_lock import acquire_folder
from weft.observe.reading import read_run
from weft.testing.pool import shared_pool
from weft.training import Checkpoints


def made() -> weft.Trainer:
    torch.manual_seed(0)
    return weft.Trainer(
        nn.Linear(4, 2), nn.functional.mse_loss, lambda params: torch.optim.AdamW(params), hook="none"
    )


class Runs:
    """A pickle that makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@run_on(threads=1, timeout=60)
def test_loading_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "saved")
    trainer = made()
    checkpoints.save(trainer, {})
    metadata = checkpoints.path_of(0) / ".metadata"
    metadata.write_bytes(pickle.dumps(Runs(tmp_path / "ran by torch")))
    with pytest.raises(AttributeError):  # what it makes of what the call has given
        FileSystemReader(checkpoints.path_of(0)).read_metadata()
    assert (tmp_path / "ran by torch").exists(), "the pickle is one that would run"
    metadata.write_bytes(pickle.dumps(Runs(tmp_path / "ran by weft")))
    with pytest.raises(ConfigError, match="can't be loaded"):
        checkpoints.load(trainer, 0)
    assert not (tmp_path / "ran by weft").exists()
    trainer.close()


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", ".metadata", "link", "pipe", "a/b", ""])
@run_on(threads=1, timeout=60)
def test_no_file_outside_of_the_folder_is_read(name: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "saved")
    trainer = made()
    path = checkpoints.save(trainer, {})
    (item,) = path.glob("*.distcp")
    shutil.copy(item, path.parent / "outside")
    (path / "link").symlink_to("../outside")
    os.mkfifo(path / "pipe")
    metadata: Any = pickle.loads((path / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = name
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    before = [param.clone() for param in trainer.module.parameters()]
    with pytest.raises(ConfigError, match="can't be loaded"):
        checkpoints.load(trainer, 0)
    assert all(map(torch.equal, before, trainer.module.parameters()))
    trainer.close()


@run_on(threads=1, timeout=60)
def test_what_is_read_of_a_checkpoint_is_bounded_whatever_sizes_its_files_claim(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "saved")
    trainer = made()
    path = checkpoints.save(trainer, {})
    os.truncate(path / ".metadata", 2**33)
    (path / "large").touch()
    os.truncate(path / "large", 2**40)  # in proportion to this, the other is small
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"can't be loaded.* more than [\d,]+ bytes"):
            checkpoints.load(trainer, 0)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    trainer.close()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Starts a process that holds a folder, until the test is over."""
    started: list[subprocess.Popen[str]] = []

    def start(directory: Path) -> subprocess.Popen[str]:
        code = (
            "import sys, pathlib; from weft.observe.folder_lock import acquire_folder;"
            "lock = acquire_folder(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(directory)],
            env=commands.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.processes
def test_a_folder_that_another_run_holds_is_refused(
    tmp_path: Path, holder: Callable[[Path], subprocess.Popen[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    other = holder(saved)
    assert main(["train", *commands.SMALL, "--steps", "1", "--checkpoint", str(saved)]) == 2
    assert f"held by process {other.pid} on " in commands.expect_one_line(capfd.readouterr().err)
    with pytest.raises(ConfigError, match=f"held by process {other.pid}"):
        Checkpoints(saved).hold()
    other.kill()
    other.wait()
    checkpoints = Checkpoints(saved)
    checkpoints.hold()  # nobody has to tidy up after a killed one
    assert (saved / ".lock").exists()
    assert acquire_folder(saved) is not None, "one process may have several writers, in turns"
    checkpoints.release()
    assert not (saved / ".lock").exists()


@pytest.mark.processes
def test_a_record_goes_on_after_a_checkpoint(tmp_path: Path) -> None:
    saved, record = tmp_path / "saved", tmp_path / "record"
    options = replace(SMALL, ranks=2, checkpoint=saved, every=3, steps=4, record=record)
    shared_pool(2).run(run_each, args=((options,),), timeout=100)
    # As if it had been killed in step 4, behind the checkpoint of step 3.
    shutil.rmtree(Checkpoints(saved).path_of(4))
    with (record / "rank-00001.jsonl").open("a") as file:
        file.write('{"kind":"step","st')
    shared_pool(2).run(run_each, args=((replace(options, steps=6, resume=True),),), timeout=100)
    run = read_run(record)
    assert run.problems == []
    assert run.about["resumed"] == [3]
    for log in run.logs:
        assert [step.step for step in log.steps] == list(range(6))
        assert [step.scalars["loss"] for step in log.steps] == same_as(alone())
        assert all(before.end <= after.start for before, after in zip(log.steps, log.steps[1:], strict=False))
    assert (run.first_step, run.last_step) == (3, 5), "the timeline doesn't reach over the break"
    assert main(["report", str(record)]) == 0
    # On fewer ranks it goes on as well: what the others did stays, up to the step.
    shared_pool(1).run(run_each, args=((replace(options, ranks=1, steps=8, resume=True),),), timeout=100)
    run = read_run(record)
    assert [len(log.steps) for log in run.logs] == [8, 6]


@pytest.mark.full
@pytest.mark.processes
def test_a_record_takes_the_place_of_an_earlier_one_and_of_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record"
    options = replace(SMALL, ranks=2, steps=1, record=record)
    shared_pool(2).run(run_each, args=((options,),), timeout=100)
    shared_pool(1).run(run_each, args=((replace(options, ranks=1),),), timeout=100)
    assert sorted(path.name for path in record.iterdir()) == ["rank-00000.jsonl", "run.json"]
    for name in ("run.json", "rank-00000.jsonl"):
        (record / name).write_text('{"mine": 1}')
        capfd.readouterr()
        assert main(["train", *commands.SMALL, "--steps", "1", "--record", str(record)]) == 2
        commands.expect_one_line(capfd.readouterr().err)
        assert (record / name).read_text() == '{"mine": 1}'
        (record / name).unlink()


@pytest.mark.full
@pytest.mark.processes
def test_a_recorded_run_under_way_is_not_replaced(tmp_path: Path) -> None:
    with commands.start("--steps", "100000", "--record", str(tmp_path)) as command:
        commands.wait_for_step(command, 1)
        other = commands.run("--steps", "1", "--record", str(tmp_path))
        command.terminate()
        command.communicate(timeout=60)
    assert other.returncode == 2
    last = other.stderr.splitlines(keepends=True)[-1]  # behind the line that names the backend
    assert "is held by process " in commands.expect_one_line(last)
    assert len(commands.recorded(tmp_path)[1]) > 0


@pytest.mark.processes
def test_damaged_files() -> None:
    """scripts/file_fuzz, in short."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.file_fuzz", "--cases", "200", "--seed", "100000"],
        cwd=commands.REPO,
        env=commands.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert {line.rpartition(" ")[0].strip() for line in done.stdout.splitlines() if ": re" in line} == {
        f"{kind}: {how}" for kind in ("machine", "run", "saved") for how in ("read", "refused")
    }
    assert file_fuzz.ran == []

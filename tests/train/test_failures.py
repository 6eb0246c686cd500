"""`weft train` when a file, a disk, a port or a world is not as it should be: one line, exit code 2."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.train import commands
from tests.train.faults import out_of_space, refused
from tests.train.runs import SMALL, alone, run_each, same_as
from weft.__main__ import main
from weft.testing.pool import shared_pool
from weft.training import Checkpoints

pytestmark = pytest.mark.processes


def listing(directory: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in directory.rglob("*")
    }


def fail_in_process(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints to stderr; it has to fail. In this process, which has torch."""
    capfd.readouterr()
    assert main(["train", *commands.SMALL, *arguments]) == 2
    return commands.expect_one_line(capfd.readouterr().err)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 7 MB, on which one checkpoint of 4.6 MB fits and two don't."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=7m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_no_space_for_a_checkpoint(small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved = small_disk / "saved"
    line = fail_in_process(capfd, "--checkpoint", str(saved), "--every", "2", "--steps", "6")
    assert os.strerror(errno.ENOSPC) in line
    assert "step-00000004" in line
    assert "step 2" in line, "the last whole one is named"
    assert [path.name for path in saved.iterdir()] == ["step-00000002"]
    # With room for it the run goes on from there.
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    options = replace(SMALL, ranks=2, checkpoint=saved, resume=True)
    (outcome,) = shared_pool(2).run(run_each, args=((options,),), timeout=60)[0]
    assert outcome.first_step == 2
    assert list(outcome.losses) == same_as(alone()[2:])


def test_a_disk_that_is_read_only(small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for option in ("--checkpoint", "--record"):
        line = fail_in_process(capfd, option, str(small_disk / "deep" / "saved"))
        assert os.strerror(errno.EROFS) in line


@pytest.mark.full
def test_no_space_for_a_record(small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record = small_disk / "record"
    (small_disk / "full").write_bytes(bytes((7 << 20) - (8 << 10)))
    line = fail_in_process(capfd, "--record", str(record), "--steps", "60")
    assert os.strerror(errno.ENOSPC) in line


@pytest.mark.parametrize(("point", "rank"), [("write_data", 0), ("write_data", 1), ("finish", 0)])
def test_no_space_for_the_part_of_one_rank(point: str, rank: int, tmp_path: Path) -> None:
    options = replace(SMALL, ranks=2, strategy="fsdp", checkpoint=tmp_path, every=2)
    errors = shared_pool(2).run(out_of_space, args=(point, rank, options), timeout=100)
    assert errors[0] == errors[1], "all ranks end with the same error"
    assert os.strerror(errno.ENOSPC) in errors[0]
    assert "step 2" in errors[0]
    assert "\n" not in errors[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_no_space_for_the_first_checkpoint(tmp_path: Path) -> None:
    options = replace(SMALL, ranks=2, checkpoint=tmp_path, every=2, keep=1)
    shared_pool(2).run(run_each, args=((options,),), timeout=100)
    before = listing(tmp_path)
    # keep=1 and a failure: the old one may only go when the new one is whole.
    more = replace(options, steps=10, resume=True)
    errors = shared_pool(2).run(out_of_space, args=("write_data", 1, more), timeout=100)
    assert os.strerror(errno.ENOSPC) in errors[0]
    assert Checkpoints(tmp_path).steps() == [8]
    assert len(listing(tmp_path)) == len(before)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text, other, longer = (tmp_path / name for name in ("text", "other", "longer"))
    text.write_bytes(bytes(range(256)) * 4)
    other.write_bytes(bytes(reversed(range(256))) * 4)
    longer.write_bytes(bytes(range(256)) * 5)
    saved = tmp_path / "saved"
    options = replace(SMALL, ranks=2, steps=2, checkpoint=saved, data=text)
    shared_pool(2).run(run_each, args=((options,),), timeout=60)
    before = listing(saved)

    going_on = replace(options, steps=4, resume=True)
    runs = [
        replace(going_on, model="small"),
        replace(going_on, batch=4),
        replace(going_on, context=8),
        replace(going_on, rate=1e-4),
        replace(going_on, seed=1),
        replace(going_on, data=longer),
        replace(going_on, data=other),
        replace(going_on, data=None),
    ]
    errors = shared_pool(2).run(refused, args=(runs,), timeout=120)
    words = ["model", "batch", "context", "rate", "seed", "data", "data", "data"]
    for on_rank in errors:
        for word, error in zip(words, on_rank, strict=True):
            assert word in error
            assert str(saved) in error
    assert listing(saved) == before

    where = ["--data", str(text), "--checkpoint", str(saved), "--resume"]
    assert "seed" in fail_in_process(capfd, *where, "--seed", "1")
    assert listing(saved) == before


def test_a_damaged_checkpoint_is_one_line(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    # In shards, so that every rank's file has something that is needed.
    options = replace(SMALL, ranks=2, steps=2, strategy="fsdp", checkpoint=whole)
    shared_pool(2).run(run_each, args=((options,),), timeout=60)
    (step,) = whole.iterdir()

    def damage(name: str, text: bytes | None) -> Path:
        copy = shutil.copytree(whole, tmp_path / f"{name}-{text!r:.4}")
        path = copy / step.name / name
        path.unlink() if text is None else path.write_bytes(text)
        return copy

    damaged = [
        damage("about.json", b"{"),
        damage("about.json", b"[]"),
        damage("about.json", None),
        damage(".metadata", b""),
        damage(".metadata", None),
        damage("__1_0.distcp", b"short"),
        damage("__1_0.distcp", None),
    ]
    runs = [replace(options, steps=4, checkpoint=directory, resume=True) for directory in damaged]
    errors = shared_pool(2).run(refused, args=(runs,), timeout=120)
    for on_rank in errors:
        for directory, error in zip(damaged, on_rank, strict=True):
            assert error.startswith("train: ")
            assert str(directory) in error
            assert "\n" not in error


def test_a_backend_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    assert "carrier-pigeon" in fail_in_process(capfd, "--backend", "carrier-pigeon")


def test_a_port_that_is_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = commands.run(
            "--checkpoint",
            str(tmp_path / "saved"),
            env={
                "RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
        )
    assert done.returncode == 2, done.stderr
    assert port in commands.expect_one_line(done.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_a_world_of_another_size_than_asked_for(tmp_path: Path) -> None:
    done = commands.run(
        "--ranks",
        "2",
        "--checkpoint",
        str(tmp_path / "saved"),
        env={
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        },
    )
    assert done.returncode == 2, done.stderr
    assert "--ranks 2" in commands.expect_one_line(done.stderr)
    assert list(tmp_path.iterdir()) == []

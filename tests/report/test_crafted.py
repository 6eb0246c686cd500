"""`weft report` on run folders that were made by somebody else: a page, or one line and exit code 2."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.report.made_runs import event_line, rank_lines, write_rank, write_run
from weft.__main__ import main
from weft.observe import draw_run
from weft.observe.lanes import pack_rows
from weft.planning.profile import load_profile

MOST_SECS = 10.0
Craft = Callable[[Path], object]


def report(directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of a folder that is refused; "" where there is a page."""
    capsys.readouterr()
    began = time.process_time()
    board, trace = directory.parent / "board", directory.parent / "trace.json"
    code = main(["report", str(directory), "--trace", str(trace), "--tensorboard", str(board)])
    assert time.process_time() - began < MOST_SECS
    err = capsys.readouterr().err
    if code == 0:
        assert err == ""
        assert (directory / "report.html").stat().st_size < 50 << 20
        return ""
    assert code == 2
    assert err.startswith("weft report: ")
    assert err.count("\n") == 1
    return err


def told(**about: Any) -> Craft:
    def craft(directory: Path) -> None:
        path = directory / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | about))

    return craft


def step(**values: Any) -> Craft:
    def craft(directory: Path) -> None:
        lines = [line | values if line["kind"] == "step" else line for line in rank_lines(0, range(3))]
        write_rank(directory, 0, lines)

    return craft


def every_step(*values: Any) -> Craft:
    """Losses of the steps of both ranks."""

    def craft(directory: Path) -> None:
        for rank in range(2):
            lines = rank_lines(rank, range(3))
            steps = [line for line in lines if line["kind"] == "step"]
            for line, value in zip(steps, values, strict=True):
                line["loss"] = value
            write_rank(directory, rank, lines)

    return craft


def event(**values: Any) -> Craft:
    def craft(directory: Path) -> None:
        lines = [line | values if line["kind"] == "event" else line for line in rank_lines(0, range(3))]
        write_rank(directory, 0, lines)

    return craft


def first(**values: Any) -> Craft:
    def craft(directory: Path) -> None:
        lines = rank_lines(0, range(3))
        write_rank(directory, 0, [lines[0] | values, *lines[1:]])

    return craft


def content(name: str, text: bytes) -> Craft:
    return lambda directory: (directory / name).write_bytes(text)


def instead(name: str, make: Callable[[Path], object]) -> Craft:
    def craft(directory: Path) -> None:
        (directory / name).unlink()
        make(directory / name)

    return craft


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


REFUSED: dict[str, Craft] = {
    "too many ranks": told(ranks=200_000_000),
    "ranks that are true": told(ranks=True),
    "no ranks": told(ranks=0),
    "ranks below zero": told(ranks=-1),
    "ranks with digits without end": told(ranks=10**400),
    "a list": content("run.json", b"[]"),
    "nesting": content("run.json", b"[" * 100_000),
    "nesting that ends": content("run.json", b"[" * 100_000 + b"]" * 100_000),
    "a deep fact": told(options=json.loads("[" * 200 + "]" * 200)),
    "no text": content("run.json", bytes(range(256))),
    "a number with digits without end": content("run.json", b'{"format":' + b"9" * 10_000 + b"}"),
    "a pipe": instead("run.json", os.mkfifo),
    "a directory": instead("run.json", Path.mkdir),
    "a link": instead("run.json", lambda path: path.symlink_to("/etc/passwd")),
    "without end": instead("run.json", sparse),
    "a rank's pipe": instead("rank-00000.jsonl", os.mkfifo),
    "a rank's directory": instead("rank-00000.jsonl", Path.mkdir),
    "a rank's link": instead("rank-00000.jsonl", lambda path: path.symlink_to("rank-00001.jsonl")),
    "a rank without end": instead("rank-00000.jsonl", sparse),
    "a rank that is another": first(rank=1),
    "a rank that is true": first(rank=True),
    "a host that is a number": first(host=3),
    "a clock that is none": first(wall_secs=float("inf")),
    "a clock that is far off": first(perf_secs=-1.7e308),
    "a step that is a text": step(step="3"),
    "a step that is half": step(step=0.5),
    "a step beyond counting": step(step=2**70),
    "times that are none": step(compute_secs=float("nan")),
    "times of another kind": step(comm_secs="1"),
    "times without end": step(wait_secs=1.7e308),
    "memory below zero": step(memory_bytes=-1),
    "memory without end": step(memory_bytes=10**400),
    "an end before the start": step(end=0),
    "too many scalars": step(**{f"x{number}": number for number in range(2000)}),
    "bytes that are true": event(bytes_in=True),
    "bytes that are a text": event(bytes_out="1"),
    "a group below zero": event(group_size=-3),
    "a dtype that is a list": event(dtype=[]),
    "an error that is a number": event(error=7),
    "an op that is none": event(op=None),
    "a wait that is a text": event(wait_start="x"),
    "a step that is a list": event(step=[]),
    "a kind that is none": event(kind="x"),
    "a kind that is a list": event(kind=[]),
}

SHOWN: dict[str, Craft] = {
    "a loss that is huge": step(loss=1.7e308),
    "a loss that is huge on every rank": every_step(1.7e308, 1.7e308, 1.7e308),
    "a loss from one end to the other": every_step(-1.7e308, 1.7e308, 5e-324),
    "a loss that is hugely negative": step(loss=-1.7e308),
    "a loss that is hardly more than nothing": step(loss=5e-324),
    "a loss with digits without end": step(loss=10**400),
    "a loss that is no number": step(loss=float("nan")),
    "tokens without end": step(tokens=float("inf")),
    "a loss that is a text": step(loss="high"),
    "halves of characters": event(label="\ud800"),
    "halves of characters in facts": told(strategy="\udfff", command=["\ud800"]),
    "facts of other kinds": told(
        mesh=7, model=[[]], options="x", buckets=[3, {"num_bytes": "x"}], command={}
    ),
    "a mesh of other sizes": told(mesh={"names": ["a"] * 100, "shape": [2**31] * 100}),
    "many ranks that left nothing": told(ranks=60_000),
    "a rank of nothing": content("rank-00000.jsonl", b""),
    "a rank of binary": content("rank-00000.jsonl", bytes(range(256)) * 10),
    "steps below zero": step(step=-5),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_crafted_folder_is_refused_in_a_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_run(tmp_path / "run", steps=3)
    REFUSED[name](directory)
    assert report(directory, capsys)
    assert not (directory / "report.html").exists()


@pytest.mark.parametrize("name", SHOWN)
def test_odd_values_that_are_legal_have_a_page(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_run(tmp_path / "run", steps=3)
    SHOWN[name](directory)
    said = report(directory, capsys)
    assert said == "" or "binary" in name
    if not said:
        draw_run(directory)


def test_many_lines_take_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hundred thousand collectives that all overlap, each of a kind of its own, and as many steps."""
    directory = write_run(tmp_path / "run", ranks=1, steps=1)
    lines = rank_lines(0, range(1))
    many = [event_line(0, 100.0, 100.5, op=f"op {number}", label=f"{number}") for number in range(10_000)]
    steps = [lines[-1] | {"step": number, "start": 100.0, "end": 101.0} for number in range(3_000)]
    write_rank(directory, 0, [lines[0], *many, *steps])
    assert report(directory, capsys) == ""


def test_rows_of_overlapping_intervals() -> None:
    assert pack_rows([(0, 3), (1, 2), (2, 4), (3, 5)]) == [0, 1, 1, 0]
    assert pack_rows([(0, 9), (1, 9), (2, 4), (3, 5), (9, 10), (9, 10)], 2) == [0, 1, 1, 1, 0, 1]
    assert pack_rows([(0, 1)] * 3, 1) == [0, 0, 0]


@pytest.mark.parametrize("name", ["report.html", "../trace.json"])
def test_a_planted_link_is_replaced_and_not_written_through(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_run(tmp_path / "run", steps=3)
    victim = tmp_path / "victim"
    victim.write_text("dear")
    (directory / name).symlink_to(victim)
    for number in {os.getpid(), os.getpid() + 1}:  # a name that could be guessed
        (directory / f".{Path(name).name}.{number}").symlink_to(victim)
    assert report(directory, capsys) == ""
    assert victim.read_text() == "dear"
    assert not (directory / name).is_symlink()


def test_a_planted_folder_is_not_written_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_run(tmp_path / "run", steps=3)
    (tmp_path / "victim").mkdir()
    (tmp_path / "board").mkdir()
    (tmp_path / "board" / "rank-00000").symlink_to(tmp_path / "victim")
    assert "it is a link" in report(directory, capsys)
    assert not any((tmp_path / "victim").iterdir())


@pytest.mark.parametrize(
    "text",
    [
        "[]", "{}", "[" * 100_000, '{"format": 2}', '{"format": 2, "name": 3}', '{"format": 2, "links": []}',
    ],
)  # fmt: skip
def test_a_crafted_profile_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    assert main(["plan", "tiny", "--ranks", "2", "--profile", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("weft plan: ")
    assert err.count("\n") == 1


def test_a_profile_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "machine.json")
    with pytest.raises(ValueError, match="it is not a regular file"):
        load_profile(tmp_path / "machine.json")

"""Observer: figures, files, and how they fail."""

from __future__ import annotations

import errno
import json
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.ranks import run_on
from weft import ConfigError, StateError, comm
from weft.observe import Observer, run_files
from weft.observe.observer import memory_bytes


def read_lines(directory: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / f"rank-{rank:05d}.jsonl").read_text().splitlines()]


@pytest.mark.threads
def test_a_run_of_two_ranks(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "one"

    def body() -> tuple[float, int]:
        observer = Observer(directory, {"strategy": "by hand", "options": {"lr": 0.1}})
        steps = []
        for number in range(3):
            with observer.step(number) as step:
                steps.append(step)
                with observer.span("forward"):
                    comm.all_reduce(torch.ones(8), feature="ddp", label="bucket 0", is_waited=True)
                handle = comm.broadcast(torch.ones(2), 0)
                step.note(loss=float(number), tokens=16)
            handle.wait()  # after the step: it is written with the next one
        with observer.span("checkpoint"):
            pass
        observer.tell(buckets=[{"label": f"rank {dist.get_rank()}", "num_bytes": 32, "parameters": ["w"]}])
        observer.close()
        observer.close()
        return steps[-1].figures.wait_secs, steps[-1].figures.bytes_in

    for wait_secs, bytes_in in weft.launch(body, ranks=2, kind="thread", backend="weft", timeout=60):
        assert wait_secs > 0
        assert bytes_in == 32
    about = json.loads((directory / "run.json").read_text())
    assert (about["format"], about["ranks"], about["strategy"]) == (1, 2, "by hand")
    assert about["mesh"] == {"names": ["ranks"], "shape": [2]}
    assert [bucket["label"] for bucket in about["buckets"]] == ["rank 0"]
    assert sorted(path.name for path in directory.iterdir()) == [
        "rank-00000.jsonl",
        "rank-00001.jsonl",
        "run.json",
    ]
    for rank in range(2):
        first, *lines = read_lines(directory, rank)
        assert (first["kind"], first["rank"], first["device"]) == ("rank", rank, "cpu")
        by_kind = {
            kind: [line for line in lines if line["kind"] == kind] for kind in ("event", "span", "step")
        }
        assert sum(map(len, by_kind.values())) == len(lines)
        assert [(line["op"], line["step"]) for line in by_kind["event"]] == [
            (op, step) for step in range(3) for op in ("all_reduce", "broadcast")
        ]
        assert [(line["name"], line["step"]) for line in by_kind["span"]] == [
            *(("forward", step) for step in range(3)),
            ("checkpoint", 2),
        ]
        assert [(line["loss"], line["tokens"]) for line in by_kind["step"]] == [
            (0.0, 16),
            (1.0, 16),
            (2.0, 16),
        ]
        reduction = by_kind["event"][0]
        assert (reduction["label"], reduction["feature"], reduction["dtype"]) == (
            "bucket 0",
            "ddp",
            "float32",
        )
        assert (reduction["bytes_in"], reduction["group_size"], reduction["error"]) == (32, 2, None)
        assert reduction["start"] <= reduction["wait_start"] <= reduction["wait_end"] == reduction["end"]
        step = by_kind["step"][0]
        assert step["start"] <= reduction["start"]
        assert reduction["end"] <= step["end"]
        secs = step["end"] - step["start"]
        assert step["compute_secs"] == pytest.approx(secs - step["wait_secs"], abs=1e-6)
        assert 0 < step["wait_secs"] <= step["comm_secs"] <= secs
        assert step["memory_bytes"] > 2**20


def test_lines_are_there_at_the_end_of_each_step(tmp_path: Path) -> None:
    observer = Observer(tmp_path, {})
    with observer.step(0):
        pass
    assert [line["kind"] for line in read_lines(tmp_path, 0)] == ["rank", "step"]
    observer.close()


@run_on(threads=2, timeout=60)
def test_figures_without_a_directory() -> None:
    with Observer(None, {}) as observer:
        with observer.step(7) as step:
            with pytest.raises(StateError, match="step 7 has no figures"):
                _ = step.figures
            comm.all_reduce(torch.ones(4)).wait()
        assert (step.figures.step, step.figures.bytes_in) == (7, 16)
        assert step.figures.secs == pytest.approx(step.figures.compute_secs + step.figures.wait_secs)
        observer.tell(buckets=[])


def test_a_step_that_raises_leaves_what_was_seen(tmp_path: Path) -> None:
    observer = Observer(tmp_path, {})
    with pytest.raises(RuntimeError, match="oh"), observer.step(0) as step, observer.span("forward"):
        raise RuntimeError("oh")
    with pytest.raises(StateError):
        _ = step.figures
    with observer.step(1):
        pass
    observer.close()
    assert [line["kind"] for line in read_lines(tmp_path, 0)] == ["rank", "span", "step"]


def test_misuse_is_refused() -> None:
    observer = Observer(None, {})
    with observer.step(0) as step:
        with pytest.raises(StateError, match="step 1 began within step 0"), observer.step(1):
            pass
        with pytest.raises(ConfigError, match=r"loss.*takes a number, got list"):
            step.note(loss=[1])  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"end.* would replace a figure"):
            step.note(end=1)
        step.note(loss=torch.tensor(1.5))  # type: ignore[arg-type]
    assert step.figures.scalars == {"loss": 1.5}


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"{tmp_path}/file/run: Not a directory"):
        Observer(tmp_path / "file" / "run", {})
    with pytest.raises(ConfigError, match=f"{tmp_path}/file: File exists"):
        Observer(tmp_path / "file", {})


def test_a_rank_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"rank-00000\.jsonl: Is a directory"):
        Observer(tmp_path, {})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device without space")
def test_no_space_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "create_new", lambda path: os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(OSError, match=r"No space.*rank-00000\.jsonl") as caught:
        Observer(tmp_path, {})
    assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "run.json").exists()


def test_run_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    observer = Observer(tmp_path, {"strategy": "first"})
    before = (tmp_path / "run.json").read_text()
    with pytest.raises(ConfigError, match=r"run\.json.*must be JSON"):
        observer.tell(buckets=object())
    assert (tmp_path / "run.json").read_text() == before
    (tmp_path / "run.json").unlink()
    (tmp_path / "run.json").mkdir()
    with pytest.raises(OSError, match=r"run\.json"):
        observer.tell(buckets=[])
    observer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-00000.jsonl", "run.json"]


def test_memory_is_that_of_this_process() -> None:
    # Pages of its own: an allocator may give memory that is resident already.
    kept = mmap.mmap(-1, 64 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    before = memory_bytes()
    torch.frombuffer(kept, dtype=torch.uint8).fill_(1)
    assert memory_bytes() - before > 32 * 2**20


# When a rank stands still


class Seen:
    """Keeps the calls of one rank."""

    def __init__(self) -> None:
        self.calls: list[comm.Call] = []

    def started(self, call: comm.Call) -> None:
        if call.rank == 0:
            self.calls.append(call)

    def finished(self, call: comm.Call, error: BaseException | None, end_secs: float) -> None:
        pass


@pytest.mark.threads
def test_a_rank_waits_for_one_that_comes_late() -> None:
    seen = Seen()

    def body() -> comm.Event:
        if dist.get_rank() == 1:
            while not seen.calls or seen.calls[0].stand.start_secs is None:
                threading.Event().wait(0.001)
        with weft.record() as events:
            comm.all_reduce(torch.ones(4)).wait()
        return events[0]

    comm.install_watcher(seen)
    try:
        first, second = weft.launch(body, ranks=2, kind="thread", backend="weft", timeout=60)
    finally:
        comm.remove_watcher(seen)
    assert first.wait_start_secs is not None
    assert first.start_secs <= first.wait_start_secs < second.start_secs <= first.end_secs


@run_on(threads=2, gloo_threads=2, timeout=60)
def test_a_collective_that_is_done_is_not_waited_for() -> None:
    with weft.record() as events:
        handle = comm.all_reduce(torch.ones(4), label="early")
        while not handle.is_done():
            threading.Event().wait(0.001)
        handle.wait()
        comm.all_reduce(torch.ones(4), label="at once", is_waited=True).wait()
    early, at_once = events
    assert (early.label, early.wait_start_secs) == ("early", None)
    assert at_once.wait_start_secs is not None
    assert at_once.start_secs <= at_once.wait_start_secs <= at_once.end_secs


@run_on(threads=1, timeout=60)
def test_a_world_of_one_waits_for_nobody() -> None:
    with weft.record() as events:
        comm.exchange_rows([1], name="alone")
    assert [(event.label, event.wait_start_secs) for event in events] == [("alone", None)]

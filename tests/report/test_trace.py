"""A run as a trace for Perfetto, and as TensorBoard's files."""

from __future__ import annotations

import itertools
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.report.made_runs import rank_lines, write_rank, write_run
from weft import ConfigError
from weft.observe.reading import read_run
from weft.observe.tensorboard import crc32c, encode_event, encode_record, encode_varint, write_tensorboard
from weft.observe.trace import make_trace


def trace_of(directory: Path) -> list[dict[str, Any]]:
    trace = json.loads(b"".join(make_trace(read_run(directory, (None, None)))))
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    return trace["traceEvents"]


def test_ranks_are_processes_and_lanes_are_threads(tmp_path: Path) -> None:
    events = trace_of(write_run(tmp_path, ranks=2, steps=3))
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    assert names == {
        (rank, thread): name
        for rank in range(2)
        for thread, name in enumerate(["steps", "compute", "waits", "communication", "communication 2"])
    }
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        "rank 0",
        "rank 1",
    ]
    slices = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    by_thread = {name: [e for e in slices if names[1, e["tid"]] == name] for name in names.values()}
    assert [event["name"] for event in by_thread["steps"]] == ["step 0", "step 1", "step 2"]
    assert [event["name"] for event in by_thread["compute"][:3]] == ["forward", "backward", "optimizer"]
    (first, *_), (second, *_) = by_thread["communication"], by_thread["communication 2"]
    assert (first["name"], first["cat"], first["ts"], first["dur"]) == (
        "all_reduce bucket 0",
        "ddp",
        300_000,
        200_000,
    )
    assert second["args"] == {
        "op": "all_reduce",
        "label": "bucket 1",
        "feature": "ddp",
        "bytes_in": 1024,
        "bytes_out": 1024,
        "dtype": "float32",
        "group_size": 2,
        "step": 0,
        "wait_ms": pytest.approx(100, abs=0.01),
    }
    waited = by_thread["waits"][0]
    assert (waited["name"], waited["ts"]) == ("wait for all_reduce bucket 1", pytest.approx(600_000, abs=1))
    counters = [event for event in events if event["ph"] == "C" and event["pid"] == 0]
    assert [event["args"] for event in counters[:2]] == [{"memory": 100 * 2**20}, {"loss": 4.0}]
    # What is on one thread doesn't overlap, or viewers would draw one inside the other.
    for found in by_thread.values():
        ends = sorted((event["ts"], event["ts"] + event["dur"]) for event in found)
        assert all(one[1] <= two[0] + 0.2 for one, two in itertools.pairwise(ends))


def test_numbers_that_json_has_not_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=1, steps=1)
    lines = rank_lines(0, range(1))
    lines[-1]["loss"] = math.inf
    write_rank(tmp_path, 0, lines)
    assert "loss" not in {event["name"] for event in trace_of(tmp_path)}


def test_checksums_are_castagnoli_s() -> None:
    # Known answers: of the nine digits, and of 32 zeros and 32 ones (RFC 3720, B.4).
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43


def test_varints() -> None:
    assert encode_varint(0) == b"\x00"
    assert encode_varint(300) == b"\xac\x02"
    assert len(encode_varint(2**64 - 1)) == 10


def test_a_record_is_framed() -> None:
    record = encode_record(b"abc")
    assert struct.unpack("<Q", record[:8]) == (3,)
    assert record[12:15] == b"abc"
    assert len(record) == 8 + 4 + 3 + 4


def test_numbers_beyond_float32_become_infinite() -> None:
    assert struct.pack("<f", math.inf) in encode_event(0.0, 1, {"x": 1e300})
    assert struct.pack("<f", -math.inf) in encode_event(0.0, 1, {"x": -1e300})


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", steps=1))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"{tmp_path}/file/rank-00000: Not a directory"):
        write_tensorboard(run, tmp_path / "file")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_it(tmp_path: Path) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    accumulating = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = read_run(write_run(tmp_path / "run", ranks=2, steps=300, slow={1: 0.05}))
    paths = write_tensorboard(run, tmp_path / "board")
    assert [path.parent.name for path in paths] == ["rank-00000", "rank-00001"]
    # The loader checks both checksums of each record.
    events = list(loading.LegacyEventFileLoader(str(paths[1])).Load())
    assert events[0].file_version == "brain.Event:2"
    assert [event.step for event in events[1:]] == list(range(300))
    read = accumulating.EventAccumulator(str(paths[1].parent), size_guidance={accumulating.SCALARS: 0})
    read.Reload()
    assert set(read.Tags()["scalars"]) == {
        "step_secs", "compute_secs", "comm_secs", "wait_secs", "memory_bytes", "loss", "tokens",
        "tokens_per_sec",
    }  # fmt: skip
    losses = read.Scalars("loss")
    assert [point.step for point in losses] == list(range(300))
    assert losses[3].value == 1.0
    assert losses[0].wall_time == pytest.approx(1_700_000_010.8, abs=1e-3)
    assert read.Scalars("compute_secs")[0].value == pytest.approx(0.75)
    assert read.Scalars("memory_bytes")[299].value == 101 * 2**20
    assert read.Scalars("tokens_per_sec")[0].value == pytest.approx(320, rel=1e-4)

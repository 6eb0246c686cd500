"""Recorded runs are read as they were written, and damage is said; one whose rank was killed, to its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import weft
from tests.report.made_runs import event_line, rank_lines, write_rank, write_run
from weft import ConfigError, LaunchError
from weft.observe import Observer, draw_run
from weft.observe.page import make_page
from weft.observe.reading import read_run
from weft.observe.summary import add_up, by_op, summarize, write_sentences
from weft.testing import Fault, inject


def test_a_whole_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, ranks=2, steps=30))
    assert (run.num_ranks, run.first_step, run.last_step, run.problems) == (2, 10, 29, [])
    log = run.logs[1]
    assert (log.rank, log.host, log.device, len(log.steps)) == (1, "host", "cpu", 30)
    assert len(log.events) == 2 * 20
    assert len(log.spans) == 3 * 20
    assert {event.step for event in log.events} == set(range(10, 30))
    # The clock of the day: 90 of perf_counter was 1.7e9.
    assert log.steps[0].start == 1_700_000_010.0
    event = log.events[1]
    assert (event.name, event.bytes_in, event.group_size) == ("all_reduce bucket 1", 1024, 2)
    assert event.start == pytest.approx(1_700_000_020.4)
    assert event.wait_secs == pytest.approx(0.1, abs=1e-6)
    assert log.steps[3].scalars == {"loss": 1.0, "tokens": 256.0}
    assert log.traffic["ddp", "all_reduce", "bucket 0"].num_calls == 30
    busy = log.busy["ddp", "all_reduce"]
    assert busy.secs == pytest.approx(30 * 0.4, abs=1e-4)
    assert busy.wait_secs == pytest.approx(30 * 0.1, abs=1e-4)


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ((3, 5), (3, 4)),
        ((None, 2), (0, 1)),
        ((28, None), (28, 29)),
        ((None, None), (0, 29)),
        ((28, 99), (28, 98)),
        (5, (25, 29)),
        (99, (0, 29)),
    ],
)
def test_steps_are_chosen(
    tmp_path: Path, steps: tuple[int | None, int | None] | int, wanted: tuple[int, int]
) -> None:
    run = read_run(write_run(tmp_path, ranks=1), steps)
    assert (run.first_step, run.last_step) == wanted
    last = min(wanted[1], 29)
    assert {event.step for event in run.logs[0].events} == set(range(wanted[0], last + 1))
    assert len(run.logs[0].steps) == 30


def test_steps_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no step is in 40:50; the run has steps 0 to 29"):
        read_run(write_run(tmp_path), (40, 50))


def test_half_a_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    write_rank(tmp_path, 1, rank_lines(1, range(3)), end='{"kind":"event","op":"all_red')
    run = read_run(tmp_path)
    assert len(run.logs[1].steps) == 3
    assert run.problems == ["The last line of rank-00001.jsonl is damaged and was left out."]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", "it is not JSON"),
        ("[]", ""),
        ("7", ""),
        ('{"no":"kind"}', "it has no 'kind'"),
        ('{"kind":"dance"}', "its kind is 'dance'"),
        (json.dumps(event_line(0, 5.0, 4.0)), "it ends at 4.0, before it starts"),
        (json.dumps(event_line(0, 1.0, 2.0, bytes_in="many")), "bytes_in is 'many', not an integer"),
        (json.dumps(event_line(0, 1.0, 2.0, label=7)), "label is 7, not a text"),
        ('{"kind":"span","name":"x","step":0,"start":NaN,"end":1}', "start is nan"),
        ('{"kind":"step","step":0,"start":1,"end":2}', "it has no 'compute_secs'"),
        ("\xff", "decode"),
    ],
)
def test_other_damage_names_the_file_and_the_line(tmp_path: Path, line: str, reason: str) -> None:
    write_run(tmp_path, steps=1)
    path = tmp_path / "rank-00001.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:3], line.encode("latin-1"), *lines[3:]]) + b"\n")
    with pytest.raises(ConfigError, match=r"rank-00001\.jsonl:4 is damaged: .*") as caught:
        read_run(tmp_path)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_another_rank_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_rank(tmp_path, 1, rank_lines(0, range(2)))
    with pytest.raises(ConfigError, match=r"rank-00001\.jsonl:1 is damaged: .*its rank, which is 1"):
        read_run(tmp_path)


def test_missing_ranks_are_said(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=6, steps=2)
    (tmp_path / "rank-00001.jsonl").unlink()
    (tmp_path / "rank-00002.jsonl").write_text("")
    (tmp_path / "rank-00004.jsonl").write_text('{"kind":"ra')
    run = read_run(tmp_path)
    assert [log.rank for log in run.logs] == [0, 3, 5]
    assert "Ranks 1-2, 4 of 6 left no record." in run.problems


def test_files_of_an_older_run_with_more_ranks_are_not_read(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=4, steps=5)
    write_run(tmp_path, ranks=2, steps=3)
    run = read_run(tmp_path)
    assert [len(log.steps) for log in run.logs] == [3, 3]


def test_ranks_of_several_hosts_are_brought_to_one_clock(tmp_path: Path) -> None:
    write_run(tmp_path, steps=2)
    lines = rank_lines(1, range(2), host="other")
    lines[0] |= {"perf_secs": 80.0}  # its perf_counter is 10 s behind
    write_rank(tmp_path, 1, lines)
    run = read_run(tmp_path)
    assert run.logs[1].steps[0].start == pytest.approx(run.logs[0].steps[0].start + 10)
    assert "2 hosts" in run.problems[0]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no run\.json"):
        read_run(tmp_path)
    for text, reason in [
        ("{", "is damaged"),
        ("[]", "has format None"),
        ('{"format":2}', "has format 2; this weft reads format 1"),
        ('{"format":1,"ranks":0}', "ranks is 0"),
        ('{"format":1,"ranks":2}', "no record of any rank"),
    ]:
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ConfigError, match=reason):
            read_run(tmp_path)


def test_a_run_without_steps_is_read(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, steps=0))
    assert write_sentences(run, summarize(run)) == ["No step of this run was finished."]


def be_killed(directory: str) -> None:
    torch.set_num_threads(1)
    model = weft.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), bucket_cap_mb=0.01
    )
    observer = Observer(directory, {"strategy": "ddp"})
    with inject(Fault(rank=1, action="kill", op="all_reduce", step=6, call=0)) as faults:
        for number in faults.steps(10):
            with observer.step(number) as step, observer.span("backward"):
                loss = model(torch.ones(4, 64)).square().mean()
                loss.backward()
                step.note(loss=loss.item())


@pytest.mark.processes
def test_a_killed_run_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="rank 1"):
        weft.launch(be_killed, ranks=2, kind="process", backend="weft", args=(str(tmp_path),), timeout=120)
    run = read_run(tmp_path)
    survivor, killed = run.logs
    assert [step.step for step in killed.steps] == list(range(6))
    # The other one had been in step 6 when it heard of it: that step's collectives failed, and are there.
    assert [step.step for step in survivor.steps] == list(range(6))
    assert survivor.errors
    assert any("rank 1" in error for error in survivor.errors), survivor.errors
    for log in run.logs:
        assert {event.label for event in log.events} >= {"bucket 0", "bucket 1"}
        assert any(event.wait_start is not None for event in log.events)
        assert all(step.wait_secs <= step.comm_secs <= step.secs for step in log.steps)
    page = make_page(run)
    assert "PeerError" in page
    assert "2 ranks made 6 steps" in page
    assert "2 ranks made 6 steps" in draw_run(tmp_path)


# What it comes to


def test_the_slowest_rank_is_found(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, ranks=4, slow={2: 0.07}))
    summary = summarize(run)
    assert summary.slowest is not None
    assert summary.slowest.rank == 2
    assert summary.behind_secs == pytest.approx(0.07)
    assert not summary.is_even
    assert summary.median_secs == pytest.approx(0.8)
    assert summary.hidden_share == pytest.approx(1 - (3 * 0.1 + 0.03) / (4 * 0.4))
    assert write_sentences(run, summary) == [
        "4 ranks made 30 steps; the median step took 800 ms.",
        "The loss went from 4 at step 0 to 0.1333 at step 29.",
        "A rank gave 2 KB to collectives in an average step, which took 400 ms; 79% of that time was hidden "
        "behind computation.",
        "Rank 2 is the slowest: it computes 770 ms a step, 70 ms (10%) longer than the median rank. The "
        "others wait.",
    ]


def test_ranks_that_are_alike(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, ranks=2, slow={1: 0.01}))
    summary = summarize(run)
    assert summary.is_even
    assert "All ranks are equally fast" in write_sentences(run, summary)[-1]
    pair = summarize(read_run(write_run(tmp_path, ranks=2, slow={1: 0.05})))
    assert pair.behind_secs == pytest.approx(0.05)
    alone = summarize(read_run(write_run(tmp_path, ranks=1)))
    assert alone.slowest is None


def test_a_loss_that_is_no_number_is_said(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=1, steps=5)
    lines = rank_lines(0, range(5))
    for line in lines:
        if line["kind"] == "step" and line["step"] >= 3:
            line["loss"] = float("nan")
    write_rank(tmp_path, 0, lines)
    run = read_run(tmp_path)
    assert "The loss is not a finite number from step 3 on." in write_sentences(run, summarize(run))


def test_traffic_adds_up(tmp_path: Path) -> None:
    total = add_up(read_run(write_run(tmp_path, ranks=3, steps=5)).logs)
    assert {kind: traffic.num_calls for kind, traffic in total.items()} == {
        ("ddp", "all_reduce", "bucket 0"): 15,
        ("ddp", "all_reduce", "bucket 1"): 15,
    }
    (traffic,) = by_op(total).values()
    assert (traffic.bytes_in, traffic.bytes_out) == (30 * 1024, 30 * 1024)

"""The page of a run: what stands on it, that it is whole, and that a run's texts can't break it."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.made_runs import rank_lines, write_rank, write_run
from weft.observe.lanes import pack_rows
from weft.observe.page import make_page
from weft.observe.page_charts import Chart, draw_chart, mean, round_ticks, thin_out
from weft.observe.page_data import EVENT_WIDTH, SPAN_WIDTH, embed_json, timeline_data
from weft.observe.page_pictures import MOST_BUCKETS, draw_buckets, draw_mesh
from weft.observe.quantities import say_bytes, say_ranks, say_secs, say_share
from weft.observe.reading import read_run

NASTY = "</script><script>alert('x')</script>\"&<img src=x onerror=alert(1)>{{TITLE}}\u2028"
VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """Checks that elements nest, and keeps texts and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def numbers_in(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="numbers">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_what_stands_on_the_page(tmp_path: Path) -> None:
    text = make_page(read_run(write_run(tmp_path, ranks=4, slow={2: 0.07})))
    page = Page(text)
    for words in [
        "ddp on 4 ranks",
        "tiny (1,234,567 parameters)",
        "4 ranks made 30 steps; the median step took 800 ms.",
        "Rank 2 is the slowest",
        "Steps 10 to 29 of 30 are here.",
        "all_reduce",
        "bucket 1",
        "head.weight",
        "103 MB",
        "lr 0.1",
    ]:
        assert words in page.text, words
    assert "left no record" not in page.text
    assert page.tags.count("canvas") == 2
    assert page.tags.count("figure") == 3


def test_it_loads_nothing(tmp_path: Path) -> None:
    page = Page(make_page(read_run(write_run(tmp_path))))
    targets = [value for name, value in page.attributes if name in ("src", "href", "action", "srcset")]
    assert targets == ["data:,"]
    policy = dict(page.attributes)["content"] or ""
    assert any(
        "default-src 'none'" in (value or "") for name, value in page.attributes if name == "content"
    ), policy
    text = page.text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert "@import" not in text
    assert "url(" not in text


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=3, steps=4)
    (tmp_path / "rank-00001.jsonl").unlink()
    write_rank(tmp_path, 2, rank_lines(2, range(3)), end='{"kind"')
    text = Page(make_page(read_run(tmp_path))).text
    assert "Rank 1 of 3 left no record." in text
    assert "The last line of rank-00002.jsonl is damaged and was left out." in text
    assert "All 4 steps of the run are here." in text
    assert "rank 1: no record" in text


def test_failed_collectives_are_said(tmp_path: Path) -> None:
    write_run(tmp_path, steps=1)
    lines = rank_lines(0, range(1))
    lines[1]["error"] = "PeerError: rank 1 died"
    write_rank(tmp_path, 0, lines)
    assert "Rank 0: all_reduce bucket 0: PeerError: rank 1 died" in Page(make_page(read_run(tmp_path))).text


def test_texts_of_a_run_cannot_break_the_page(tmp_path: Path) -> None:
    about: dict[str, Any] = dict.fromkeys(("strategy", "weft", "torch", "started"), NASTY)
    about["model"] = {"name": NASTY, "num_parameters": NASTY}
    about["options"] = {NASTY: NASTY}
    about["command"] = [NASTY]
    about["buckets"] = [{"label": NASTY, "num_bytes": 3, "parameters": [NASTY]}, NASTY, 7]
    about["mesh"] = {"names": [NASTY, NASTY], "shape": [1, 2]}
    write_run(tmp_path, steps=3, **about)
    lines = rank_lines(0, range(3), host=NASTY)
    lines[0]["device"] = NASTY
    for line in lines:
        for key in ("op", "feature", "label", "name", "dtype", "error"):
            if key in line and line["kind"] in ("event", "span"):
                line[key] = NASTY
        if line["kind"] == "step":
            line[NASTY] = 1.0
    write_rank(tmp_path, 0, lines)
    text = make_page(read_run(tmp_path))
    page = Page(text)
    assert page.tags.count("script") == 2
    assert "img" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert NASTY in numbers_in(text)["timeline"]["texts"]


def test_odd_facts_of_a_run_are_borne(tmp_path: Path) -> None:
    odd: dict[str, Any] = {
        "mesh": {"names": ["a"], "shape": [7]},
        "buckets": None,
        "model": [],
        "options": 3,
        "command": 7,
    }
    Page(make_page(read_run(write_run(tmp_path, steps=2, **odd))))
    assert "No step of this run was finished." in Page(make_page(read_run(write_run(tmp_path, steps=0)))).text
    assert "Nothing was communicated." in make_page(read_run(_without_events(tmp_path)))


def _without_events(directory: Path) -> Path:
    write_run(directory, ranks=1, steps=2)
    lines = [line for line in rank_lines(0, range(2)) if line["kind"] != "event"]
    write_rank(
        directory,
        0,
        [line | {"comm_secs": 0, "wait_secs": 0} if line["kind"] == "step" else line for line in lines],
    )
    return directory


def test_numbers_of_the_timeline(tmp_path: Path) -> None:
    data = timeline_data(read_run(write_run(tmp_path, steps=2)))
    assert data["steps"] == [[0, 0, 800_000], [1, 1_000_000, 1_800_000]]
    assert data["length"] == 1_800_000
    rank = data["ranks"][1]
    assert rank["rank"] == 1
    assert len(rank["spans"]) == 6 * SPAN_WIDTH
    assert len(rank["events"]) == 4 * EVENT_WIDTH
    name, start, length, step = rank["spans"][SPAN_WIDTH : 2 * SPAN_WIDTH]
    assert (data["texts"][name], start, length, step) == ("backward", 300_000, 300_000, 0)
    event = rank["events"][EVENT_WIDTH : 2 * EVENT_WIDTH]
    texts = [data["texts"][number] for number in (*event[:3], event[-1])]
    assert texts == ["all_reduce", "ddp", "bucket 1", "float32"]
    assert event[3:-1] == [400_000, 300_000, 200_000, 1, 0, 1024, 1024, 2]
    assert rank["rows"] == 2


def test_the_numbers_of_many_ranks_stay_small(tmp_path: Path) -> None:
    text = make_page(read_run(write_run(tmp_path, ranks=64, steps=60)))
    Page(text)
    assert len(text) < 600_000
    assert len(numbers_in(text)["timeline"]["ranks"]) == 64


def test_embedded_json_is_json() -> None:
    values = {"a": [NASTY, 1.5, None], "b": "\u2029<>&"}
    text = embed_json(values)
    assert json.loads(text) == values
    assert not set("<>&\u2028\u2029") & set(text)
    with pytest.raises(ValueError, match="not JSON compliant"):
        embed_json([math.nan])


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=20), st.integers(1, 4))
def test_rows_don_t_overlap(pairs: list[tuple[int, int]], most: int) -> None:
    intervals = [(float(start), float(start + length)) for start, length in pairs]
    rows = pack_rows(intervals)
    for at, (one, row) in enumerate(zip(intervals, rows, strict=True)):
        for two, other_row in zip(intervals[:at], rows[:at], strict=True):
            assert row != other_row or one[1] <= two[0] or two[1] <= one[0]
    assert max(pack_rows(intervals, most), default=0) < most


# Charts and pictures


def test_thinning_out_keeps_both_ends() -> None:
    points = [(step, float(step)) for step in range(1000)]
    few = thin_out(points, max, 100)
    assert len(few) == 100
    assert (few[0], few[-1]) == ((0, 9.0), (999, 999.0))
    assert thin_out(points[:3], mean, 100) == points[:3]
    assert thin_out([], max, 100) == []


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_cover(low: float, size: float) -> None:
    ticks = round_ticks(low, low + size)
    assert 2 <= len(ticks) <= 9
    slack = 1e-8 * size + 1e-12 * abs(low)  # what floating-point numbers lose
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + size - slack


@pytest.mark.parametrize("ranks", [1, 8, 9, 64])
def test_charts_of_many_ranks(ranks: int) -> None:
    lines = {f"rank {rank}": [(step, rank + step) for step in range(5)] for rank in range(ranks)}
    svg = draw_chart(Chart("Step <time>", say_secs, lines))
    Page(svg)
    assert svg.count("<polyline") == (ranks if ranks <= 8 else 1)
    assert svg.count("<polygon") == (0 if ranks <= 8 else 1)
    assert "Step &lt;time&gt;" in svg


def test_charts_of_odd_numbers() -> None:
    for points in (
        [],
        [(3, 2.0)],
        [(0, 1.0), (1, 1.0)],
        [(0, math.nan), (1, math.inf), (2, 0.0)],
        [(0, math.nan)],
    ):
        svg = draw_chart(Chart("Loss", str, {"": points}, from_zero=False))
        Page(svg)
        assert "nan" not in svg
        assert "inf" not in svg.replace("infinite", "")


@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [
        ({"names": ["dp"], "shape": [64]}, 64),
        ({"names": ["dp", "tp"], "shape": [2, 2]}, 4),
        ({"names": ["pod", "dp", "tp"], "shape": [4, 2, 8]}, 64),
        ({}, 3),
        ({"names": ["dp"], "shape": ["2"]}, 2),
        ({"names": ["dp", "tp"], "shape": [2]}, 2),
    ],
)
def test_every_rank_is_in_the_mesh_once(mesh: dict[str, Any], ranks: int) -> None:
    svg = draw_mesh(mesh, ranks, {0: 0.5}, {0: "rank 0 is fine"})
    page = Page(svg)
    assert svg.count('<g class="cell') == ranks
    assert svg.count('class="cell gone"') == ranks - 1
    assert "rank 0 is fine" in page.text
    boxes = re.findall(r'class="box" x="([\d.]+)" y="([\d.]+)"', svg)
    assert len(set(boxes)) == ranks
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())  # type: ignore[union-attr]
    assert all(float(x) + 44 <= width and float(y) + 44 <= height for x, y in boxes)


def test_many_buckets_are_cut_short() -> None:
    buckets = [{"label": f"layers.{at}", "num_bytes": at, "parameters": ["w"] * at} for at in range(100)]
    svg = draw_buckets(buckets)
    Page(svg)
    assert svg.count('class="bucket"') == MOST_BUCKETS
    assert f"And {100 - MOST_BUCKETS} buckets more." in svg


def test_quantities() -> None:
    assert [say_bytes(size) for size in (0, 5, 1000, 1024, 1536, 2**20 * 2.25, 2**30 * 999, 2**50)] == [
        "0 B", "5 B", "1000 B", "1 KB", "1.5 KB", "2.25 MB", "999 GB", "1024 TB",
    ]  # fmt: skip
    assert [say_secs(secs) for secs in (0, 3.5e-5, 0.0123, 0.99999, 4.567, 200, math.nan)] == [
        "0 s", "35 µs", "12.3 ms", "1 s", "4.57 s", "3 min 20 s", "?",
    ]  # fmt: skip
    assert [say_share(share) for share in (0, 0.004, 0.07, 1)] == ["0%", "0.4%", "7%", "100%"]
    assert say_ranks([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"

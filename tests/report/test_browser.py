"""The page of a run in a real browser: Debian's chromium, headless.

Skipped where chromium, its driver or selenium isn't there; scripts/browser installs the first two.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.report.made_runs import write_run
from weft.observe.page import make_page
from weft.observe.reading import read_run

webdriver = pytest.importorskip("selenium.webdriver")

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver: run scripts/browser"
    ),
]

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--window-size=1300,1600",
    "--hide-scrollbars",
)
COLORS = """
    const canvas = document.getElementById(arguments[0]), copy = document.createElement("canvas");
    [copy.width, copy.height] = [canvas.width, canvas.height];
    const pen = copy.getContext("2d", { willReadFrequently: true });
    pen.drawImage(canvas, 0, 0);
    return new Set(new Uint32Array(pen.getImageData(0, 0, copy.width, copy.height).data.buffer)).size;
"""

PIXEL = """
    const [at, time, y] = arguments, canvas = timeline.canvas, copy = document.createElement("canvas");
    const scale = canvas.width / canvas.clientWidth;
    const pen = copy.getContext("2d", { willReadFrequently: true });
    [copy.width, copy.height] = [canvas.width, canvas.height];
    pen.drawImage(canvas, 0, 0);
    const below = y === "event" ? timeline.bar + 2 + timeline.row / 2 : timeline.bar - 3;
    const place = [timeline.x(time) * scale, (timeline.tops[at] + below) * scale];
    return [...pen.getImageData(...place, 1, 1).data.slice(0, 3)];
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Generator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        prefer(driver, "light")
        yield driver
    finally:
        driver.quit()


def prefer(browser: Any, theme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Generator[Any]:
    """The page of a run of 4 ranks, opened. At the end: nothing in the console, and nothing loaded."""
    yield from opened(browser, tmp_path, ranks=4, steps=30, slow={2: 0.05})


def opened(browser: Any, directory: Path, **run: Any) -> Generator[Any]:
    path = directory / "report.html"
    path.write_text(make_page(read_run(write_run(directory / "run", **run))))
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(path.as_uri())
    yield browser
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = {
        message["params"]["request"]["url"]
        for message in messages
        # The browser's first, empty page has requests of its own.
        if message["method"] == "Network.requestWillBeSent"
        and message["params"]["documentURL"] == path.as_uri()
    }
    assert requested - {"data:,"} == {path.as_uri()}


def view_of(page: Any) -> tuple[float, float]:
    """What the timeline shows, in microseconds."""
    dataset = page.execute_script("return {...document.getElementById('timeline').dataset}")
    return float(dataset["from"]), float(dataset["to"])


def point_at(page: Any, rank: int, label: str) -> tuple[float, float]:
    """Where an event of a rank lies in the window, the last one of that label."""
    place = page.execute_script(
        """
        const [at, label] = arguments;
        const height = timeline.tops[at] + timeline.canvas.getBoundingClientRect().top;
        window.scrollBy(0, height - window.innerHeight / 2);
        const rank = timeline.data.ranks[at], box = timeline.canvas.getBoundingClientRect();
        let place = null;
        for (let i = 0; i < rank.events.length; i += EVENT) {
          if (timeline.data.texts[rank.events[i + 2]] !== label) continue;
          const x = timeline.x(rank.events[i + 3] + rank.events[i + 4] / 2);
          const y = timeline.tops[at] + timeline.bar + 2 + (rank.events[i + 6] + 0.4) * timeline.row;
          place = [box.left + x, box.top + y];
        }
        return place;
        """,
        rank,
        label,
    )
    return place[0], place[1]


def mouse(page: Any, kind: str, x: float, y: float, **more: Any) -> None:
    page.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **more})


def tip_of(page: Any) -> str:
    return page.execute_script(
        "const tip = document.getElementById('tip'); return tip.hidden ? '' : tip.innerText"
    )


def press(page: Any, key: str) -> None:
    page.execute_script("document.getElementById('timeline').focus()")
    for kind in ("keyDown", "keyUp"):
        page.execute_cdp_cmd(
            "Input.dispatchKeyEvent", {"type": kind, "key": key, "text": key if len(key) == 1 else ""}
        )


def test_it_draws(page: Any) -> None:
    assert page.execute_script(COLORS, "timeline") > 8
    for rank in range(4):
        # The last step begins at 19 s: bucket 0 goes from 0.3 to 0.5, forward is up to 0.3.
        assert page.execute_script(PIXEL, rank, 19.48e6, "event") == [0x2F, 0x6F, 0xC1]
        assert page.execute_script(PIXEL, rank, 19.2e6, "span") == [0x8F, 0xB3, 0xDD]
        assert page.execute_script(PIXEL, rank, 19.65e6, "span") != page.execute_script(
            PIXEL, rank, 19.9e6, "span"
        )
    assert page.execute_script(COLORS, "overview") > 3
    # An empty canvas, for comparison, has one colour.
    page.execute_script("const c = document.getElementById('overview'); c.width = c.width")
    assert page.execute_script(COLORS, "overview") == 1
    words = page.execute_script("return document.body.innerText")
    assert "ddp on 4 ranks" in words
    assert "ddp collectives" in words
    assert page.execute_script("return document.querySelectorAll('svg').length") == 5
    # Nothing sticks out to the side.
    assert page.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")


def test_zoom_and_move(page: Any) -> None:
    x, y = point_at(page, 1, "bucket 1")
    start, end = view_of(page)
    under_pointer = "return timeline.timeAt(arguments[0] - timeline.canvas.getBoundingClientRect().left)"
    before = page.execute_script(under_pointer, x)
    mouse(page, "mouseWheel", x, y, deltaX=0, deltaY=-240)
    zoomed = view_of(page)
    assert zoomed[1] - zoomed[0] < 0.6 * (end - start)
    assert page.execute_script(under_pointer, x) == pytest.approx(before, abs=(end - start) / 500)
    mouse(page, "mouseWheel", x, y, deltaX=0, deltaY=480)
    assert view_of(page)[1] - view_of(page)[0] > zoomed[1] - zoomed[0]

    at = view_of(page)
    mouse(page, "mousePressed", x, y, button="left", buttons=1, clickCount=1)
    mouse(page, "mouseMoved", x + 100, y, button="left", buttons=1)
    mouse(page, "mouseReleased", x + 100, y, button="left", clickCount=1)
    moved = view_of(page)
    assert moved[0] < at[0]
    assert moved[1] - moved[0] == pytest.approx(at[1] - at[0])

    press(page, "0")
    everything = view_of(page)
    assert everything[0] <= 0
    assert everything[1] >= 19.8e6
    press(page, "l")
    last = view_of(page)
    assert last[1] - last[0] == pytest.approx(0.8e6, rel=0.05)
    press(page, "+")
    assert view_of(page)[1] - view_of(page)[0] < last[1] - last[0]
    press(page, "ArrowLeft")
    assert view_of(page)[0] < last[1]


def test_pointing_names_the_event(page: Any) -> None:
    x, y = point_at(page, 2, "bucket 1")
    mouse(page, "mouseMoved", x, y)
    lines = tip_of(page).splitlines()
    assert lines[0] == "all_reduce bucket 1"
    assert "rank 2, step 29" in lines[1]
    assert "1 KB given, 1 KB got, float32" in lines[2]
    assert lines[3] == "300.00 ms, of which 50.00 ms waited"
    # A rank's computation, above its collectives.
    above = page.execute_script("return timeline.tops[2] + timeline.canvas.getBoundingClientRect().top + 5")
    mouse(page, "mouseMoved", x, above)
    assert tip_of(page).splitlines()[:2] == ["backward", "rank 2, step 29"]
    mouse(page, "mouseMoved", 5, 5)
    assert tip_of(page) == ""
    # And a chart.
    box = page.execute_script(
        "const svg = document.querySelector('.chart svg'); svg.scrollIntoView({block: 'center'});"
        "const box = svg.getBoundingClientRect(); return [box.right - 9, box.top + 60]"
    )
    mouse(page, "mouseMoved", *box)
    assert tip_of(page).splitlines() == ["step 29", "0.1333"]


def test_dark_and_light(page: Any) -> None:
    shade = "return getComputedStyle(document.body).backgroundColor"
    for theme in ("dark", "light"):
        prefer(page, theme)
        page.refresh()
        assert page.execute_script("return document.documentElement.dataset.theme") == theme
        before = page.execute_script(shade)
        page.execute_script("document.getElementById('theme').click()")
        assert page.execute_script(shade) != before
        assert page.execute_script(COLORS, "timeline") > 8


@pytest.mark.parametrize(("ranks", "steps"), [(1, 1), (64, 25), (2, 0)])
def test_small_and_large_runs(browser: Any, tmp_path: Path, ranks: int, steps: int) -> None:
    for page in opened(browser, tmp_path, ranks=ranks, steps=steps):
        assert page.execute_script(COLORS, "timeline") > (4 if steps else 1)
        if steps:
            x, y = point_at(page, ranks - 1, "bucket 0")
            mouse(page, "mouseMoved", x, y)
            assert tip_of(page).startswith("all_reduce bucket 0")

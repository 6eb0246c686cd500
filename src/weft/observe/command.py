"""`weft report`: its arguments, and what becomes of errors."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from weft.errors import WeftError
from weft.observe.page import make_page
from weft.observe.plain_files import write_whole
from weft.observe.quantities import say_bytes
from weft.observe.reading import read_run
from weft.observe.summary import summarize, write_sentences
from weft.observe.tensorboard import write_tensorboard
from weft.observe.trace import make_trace

SHOWN_STEPS = 20


def define_report_command(parser: argparse.ArgumentParser) -> None:
    """Say what `weft report` takes, and what runs it."""
    parser.description = "Make a self-contained page of a run that was recorded, and other views of it."
    parser.add_argument("run_directory", metavar="RUN", type=Path, help="the directory of the run")
    parser.add_argument(
        "--out", metavar="FILE.html", type=Path, help="where the page goes (default: report.html in RUN)"
    )
    parser.add_argument(
        "--trace", metavar="FILE.json", type=Path, help="write a trace for ui.perfetto.dev as well"
    )
    parser.add_argument(
        "--tensorboard", metavar="DIR", type=Path, help="write scalars for TensorBoard as well"
    )
    parser.add_argument(
        "--steps",
        metavar="A:B",
        type=_read_steps,
        help="the steps of the timeline and the trace, from A up to B, without B "
        f"(default: the last {SHOWN_STEPS}; of the trace, all)",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        _make_report(options)
    except (WeftError, OSError) as error:
        print(f"weft report: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def write_page(directory: Path, out: Path) -> None:
    """Make the page of a recorded run, with the last steps in its timeline."""
    write_whole(out, [make_page(read_run(directory, SHOWN_STEPS)).encode()])


def _make_report(options: argparse.Namespace) -> None:
    run = read_run(options.run_directory, SHOWN_STEPS if options.steps is None else options.steps)
    for sentence in [*write_sentences(run, summarize(run)), *run.problems]:
        print(sentence)
    out: Path = options.out or options.run_directory / "report.html"
    page = make_page(run).encode()
    write_whole(out, [page])
    print(f"Page: {out} ({say_bytes(len(page))})")
    if options.tensorboard is not None:
        write_tensorboard(run, options.tensorboard)
        print(f"TensorBoard: {options.tensorboard}")
    if options.trace is not None:
        whole = run if options.steps is not None else read_run(options.run_directory, (None, None))
        write_whole(options.trace, make_trace(whole))
        print(f"Trace: {options.trace} (open it at ui.perfetto.dev)")


def _read_steps(text: str) -> tuple[int | None, int | None]:
    first, colon, last = text.partition(":")
    is_number = all(part == "" or part.isdecimal() for part in (first, last))
    if not colon or not is_number or (first and last and int(first) >= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} are no steps: give A:B, with A below B, as in 100:120")
    return (int(first) if first else None), (int(last) if last else None)

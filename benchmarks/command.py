"""Run one benchmark, or all of them, or make the table of what they found.

    scripts/bench NAME [ARGUMENT...]          benchmarks/NAME.py with these arguments
    scripts/bench --all [--quick|--rounds N]  every one; saves what each found, and one table of all goals
    scripts/bench --table                     the table again, from what was saved

The table is benchmarks/results/SUMMARY.md; some of it goes into the README.

All of them run even if one fails. The exit code is 1 if one did, and 0 otherwise: a goal that isn't reached
is a figure, not a failure. --quick shows that they run, and saves nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headlines import put_headlines
from report import RESULTS
from summary import Answer, Skipped, decode_answer, format_page, format_terminal, read_newest

BENCHMARKS = Path(__file__).parent


def main(argv: Sequence[str], folder: Path = BENCHMARKS, results: Path = RESULTS) -> int:
    """Do what the arguments say, with the questions of `folder`; give the exit code."""
    if argv and not argv[0].startswith("-"):
        code = run_one(argv[0], argv[1:], folder)
        if "--save" in argv and code == 0:
            write_page(folder, results)
        return code
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        usage="\n".join(["", *lines[2:5]]),
        description=lines[0],
        epilog=f"Benchmarks: {', '.join(list_questions(folder))}.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--all", action="store_true", help="run every benchmark; also without any argument")
    what.add_argument("--table", action="store_true", help="make the table from what was saved; run nothing")
    parser.add_argument("--quick", action="store_true", help="only show that they run")
    parser.add_argument("--rounds", metavar="N", type=int, help="how often candidates take turns")
    options = parser.parse_args(argv)
    if options.table:
        print(format_terminal(read_newest(results)))
        print(f"\nwritten to {write_page(folder, results)}")
        return 0
    arguments = ["--quick"] if options.quick else ["--save"]
    if options.rounds is not None:
        arguments += ["--rounds", str(options.rounds)]
    return run_all(arguments, folder, None if options.quick else results)


def list_questions(folder: Path) -> list[str]:
    """The questions: files with a main. The rest of the folder is what they share, and this command."""
    return [
        path.stem
        for path in sorted(folder.glob("*.py"))
        if path.name != Path(__file__).name and '\nif __name__ == "__main__"' in path.read_text()
    ]


def run_one(name: str, arguments: Sequence[str], folder: Path) -> int:
    """Run a question as its own command, and give its exit code."""
    if name not in list_questions(folder):
        names = ", ".join(list_questions(folder))
        print(f"scripts/bench: there is no benchmark '{name}'. There are: {names}.", file=sys.stderr)
        return 2
    return subprocess.call([sys.executable, folder / f"{name}.py", *arguments])


def run_all(arguments: Sequence[str], folder: Path, results: Path | None) -> int:
    """Run the questions one after the other, then show the table of all goals.

    With `results`, the folder that they were saved to, questions that can't be answered here are
    shown as they stand there, and the table is written there.
    """
    answers: list[Answer] = []
    remarks: list[str] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as scratch:
        for name in list_questions(folder):
            print(f"== {name}", flush=True)
            told = Path(scratch, f"{name}.json")
            code = run_one(name, [*arguments, "--json", str(told)], folder)
            answer = decode_answer(told.read_text()) if code == 0 else None
            if answer is None:
                failed.append(name)
                remarks.append(f"{name}: failed, with exit code {code}.")
            elif isinstance(answer, Skipped):
                remarks.append(f"{name}: skipped, since {answer.reason}.")
            else:
                answers.append(answer)
    print("\n" + format_terminal(answers if results is None else read_newest(results), remarks))
    if results is not None:
        print(f"\nwritten to {write_page(folder, results)}")
    if failed:
        print(f"\nfailed: {', '.join(failed)}; see above.", file=sys.stderr)
    return 1 if failed else 0


def write_page(folder: Path, results: Path) -> Path:
    """Write what the files say of the questions of a folder: all of it, and some of it into the README."""
    answers, page, readme = read_newest(results), results / "SUMMARY.md", folder.parent / "README.md"
    unanswered = set(list_questions(folder)) - {answer.question for answer in answers}
    page.write_text(format_page(answers, sorted(unanswered)))
    if readme.is_file():
        readme.write_text(put_headlines(readme.read_text(), answers))
    return page


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

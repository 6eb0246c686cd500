"""What a page shows of commands, and whether they would run: the program is there, its options parse."""

from __future__ import annotations

import argparse
import io
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from tests.repo.source import ROOT

# Programs of others, whose options are theirs to keep.
FOREIGN = {"export", "pip", "ps", "py-spy", "tensorboard", "umask"}
# Commands whose options aren't argparse's: the options that each takes, or None for whatever pytest takes.
SHELL_SCRIPTS: dict[str, set[str] | None] = {
    "scripts/check": {"--fix", "--list", "lint", "format", "types", "types-outside", "types-tests", "rules"},
    "scripts/nightly": {"full", "matrix", "gpu"},
    "scripts/test": None,
    "scripts/rpc_fuzz": None,
    "scripts/fence_fuzz": None,
    "scripts/store_fuzz": None,
    "scripts/file_fuzz": None,
    "scripts/kills": None,
    "scripts/docs": {"--serve"},
    ".ci/run": set(),
}


def find_blocks(page: str, language: str) -> list[str]:
    """The blocks of a page that are of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)


def find_scripts(page: str) -> list[str]:
    """The bash blocks of a page that are scripts, to be saved as a file; others are lines to be typed."""
    return [block for block in find_blocks(page, "bash") if block.startswith("#!")]


def find_commands(page: str) -> list[str]:
    """List the commands of a page: lines of its bash blocks, and code spans that start like one."""
    blocks = [block for block in find_blocks(page, "bash") if not block.startswith("#!")]
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    spans = re.findall(r"`((?:scripts/|\.ci/)[^`\n]+)`", page)
    return [command for command in lines + spans if command]


def find_subcommands(page: str) -> set[str]:
    """The commands of weft that a page names: `weft train`, but not `weft gloo`, a benchmark's candidate."""
    named = re.findall(r"`weft ([a-z]+)\b[^`]*`", page)
    return set(named) - {"gloo", "local"}


def find_broken_programs(page: str, root: Path) -> list[str]:
    """List commands whose program is a file of the repository and is missing or not executable."""
    broken: list[str] = []
    for command in find_commands(page):
        program = command.split()[0]
        if "/" in program and not (os.access(root / program, os.X_OK) and (root / program).is_file()):
            broken.append(command)
    return broken


def find_broken_commands(page: str) -> dict[str, str]:
    """The commands of a page that would not run, and why. Commands joined by && are looked at one by one."""
    parts = [part for command in find_commands(page) for part in command.split("&&")]
    reasons = {part.strip(): why_broken(shlex.split(part)) for part in parts}
    return {command: reason for command, reason in reasons.items() if reason}


def why_broken(words: Sequence[str]) -> str:
    """Why a command would not run; nothing if it would."""
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # a variable for this command
        words = words[1:]
    program, arguments = words[0], list(words[1:])
    if program in FOREIGN:
        return ""
    if program in SHELL_SCRIPTS:
        taken = SHELL_SCRIPTS[program]
        return "" if taken is None or set(arguments) <= taken else f"{program} takes {sorted(taken)}"
    if program in (
        "scripts/bench",
        "scripts/conformance",
        "scripts/demo",
        "scripts/matrix",
        "scripts/mutants",
        "weft",
    ):
        return why_unparsed(lambda: run_here(program, arguments))
    if program == "python":
        return why_broken_python(arguments)
    if program == "torchrun":
        return why_broken_torchrun(arguments)
    return f"there is no {program}"


def why_broken_python(arguments: list[str]) -> str:
    if arguments[:2] == ["-m", "weft"]:
        return why_broken(["weft", *arguments[2:]])
    if arguments[0] == "-c":
        return _why_not_python(arguments[1])
    return "" if (ROOT / arguments[0]).is_file() else f"there is no file {arguments[0]}"


def _why_not_python(text: str) -> str:
    try:
        compile(text, "-c", "exec")
    except SyntaxError as error:
        return str(error)
    return ""


def why_broken_torchrun(arguments: list[str]) -> str:
    from torch.distributed.run import get_args_parser

    with redirect_stderr(io.StringIO()) as said:
        try:
            options = get_args_parser().parse_args([word for word in arguments if word != "..."])
        except SystemExit:
            return said.getvalue()
    if options.module:
        return why_broken_python(["-m", options.training_script, *options.training_script_args])
    script = options.training_script
    # A name without a folder is the reader's own.
    return "" if "/" not in script or (ROOT / script).is_file() else f"there is no file {script}"


# -- options that parse --------------------------------------------------------------


class _Parsed(BaseException):
    """The options have been read, and nothing has been done."""


@contextmanager
def _parsing_only() -> Generator[None]:
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> NoReturn:
        parse(self, *args, **kwargs)
        raise _Parsed

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop):
        yield


def why_unparsed(run: Callable[[], object]) -> str:
    """Run a command up to the point where its options are read: why they are refused, if they are."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said, _parsing_only():
        try:
            run()
        except _Parsed:
            return ""
        except SystemExit as exit_:
            return "" if exit_.code == 0 else said.getvalue() or str(exit_.code)
    return said.getvalue() or "it reads no options"


def run_here(program: str, arguments: list[str]) -> None:
    """Do in this process what the program does."""
    if program == "scripts/conformance":
        from tests.conformance.__main__ import parse_options

        with mock.patch.object(sys, "argv", [program, *arguments]):
            parse_options()
    elif program == "scripts/mutants":
        from tests.mutants.__main__ import parse_options

        with mock.patch.object(sys, "argv", [program, *arguments]):
            parse_options()
    elif program == "scripts/matrix":
        run_script(ROOT / "scripts" / "matrix.py", arguments)
    elif program == "scripts/bench":
        name, *options = arguments or ["--all"]
        script = "command.py" if name.startswith("-") else f"{name}.py"
        given = arguments if script == "command.py" else options
        path = ROOT / "benchmarks" / script
        if not path.is_file():
            raise SystemExit(f"there is no benchmark '{name}'")
        run_script(path, given)
    else:
        from weft.__main__ import main

        main(arguments if program == "weft" else ["demo", *arguments])


def run_script(path: Path, arguments: list[str]) -> None:
    with (
        mock.patch.object(sys, "argv", [str(path), *arguments]),
        mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
    ):
        runpy.run_path(str(path), run_name="__main__")

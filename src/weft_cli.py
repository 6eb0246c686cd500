"""The command line: `weft COMMAND`, and `python -m weft COMMAND`.

Loads the code of the command that is asked for, and of no other: `weft --help` and `weft --version` answer
without importing torch. It stands beside the package because Python imports a package before any module in
it, and `import weft` imports torch, which takes seconds.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Command(NamedTuple):
    """A command: its line in the help, and the function that tells a parser what it takes."""

    help: str
    module: str
    function: str


COMMANDS = {
    "train": Command("train a model on many ranks", "weft.training", "define_train_command"),
    "plan": Command(
        "what each strategy would need, without the machines", "weft.planning", "define_plan_command"
    ),
    "report": Command(
        "make a page, a trace or TensorBoard files of a recorded run",
        "weft.observe",
        "define_report_command",
    ),
    "demo": Command(
        "see weft train on this machine, against a single process", "weft.training", "define_demo_command"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name and return its exit code; without one, print the help.

    Arguments that can't work end the program with exit code 2, as argparse does it.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="weft",
        description="Distributed training for PyTorch, in Python that people can read and change.",
    )
    parser.add_argument("--version", action="version", version=f"weft {read_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in COMMANDS.items():
        command_parser = commands.add_parser(name, help=command.help)
        if arguments[:1] == [name]:
            define: Callable[[argparse.ArgumentParser], None]
            define = getattr(import_module(command.module), command.function)
            define(command_parser)
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.print_help()
        return 0
    try:
        return options.run(options)
    except KeyboardInterrupt:
        return 130  # what a shell reports for a program that Ctrl-C ended


def read_version() -> str:
    """The version of the weft that `import weft` would load, without loading it."""
    spec = find_spec("weft")
    assert spec is not None
    assert spec.submodule_search_locations
    return runpy.run_path(str(Path(spec.submodule_search_locations[0], "version.py")))["__version__"]

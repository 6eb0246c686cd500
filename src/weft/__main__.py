"""The command line: `python -m weft COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from weft.observe import add_report_command
from weft.planning import add_plan_command
from weft.training import add_demo_command, add_train_command
from weft.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name and return its exit code; without one, print the help.

    Arguments that can't work end the program with exit code 2, as argparse does it.
    """
    parser = argparse.ArgumentParser(
        prog="weft",
        description="Distributed training for PyTorch, in Python that people can read and change.",
    )
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    add_train_command(commands)
    add_plan_command(commands)
    add_report_command(commands)
    add_demo_command(commands)
    options = parser.parse_args(argv)
    if not hasattr(options, "run"):
        parser.print_help()
        return 0
    try:
        return options.run(options)
    except KeyboardInterrupt:
        return 130  # what a shell reports for a program that Ctrl-C ended


if __name__ == "__main__":
    sys.exit(main())

"""The demo's arguments, and what becomes of its errors."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from weft.demo.tour import run_tour
from weft.errors import WeftError


def add_demo_command(commands: Any) -> None:
    """Add `demo` to the commands of `python -m weft`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="see weft run on this machine",
        description="Launch ranks, move tensors over every backend there is, and compare the times.",
    )
    parser.add_argument("--ranks", metavar="N", type=_read_ranks, default=2, help="how many (default: 2)")
    parser.add_argument(
        "--size", metavar="MB", type=_read_size, default=16.0, help="the largest tensor (default: 16)"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        run_tour(num_ranks=options.ranks, num_bytes=int(options.size * 2**20))
    except WeftError as error:
        print(f"weft demo: {error}", file=sys.stderr)
        return 1
    return 0


def _read_ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks: give an integer of at least 1")
    return int(text)


def _read_size(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0.001 <= size <= 4096:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give megabytes, from 0.001 to 4096")
    return size

"""`weft demo`: the main job with its defaults, held against a single process, and what to try next."""

from __future__ import annotations

import argparse
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, InternalError, WeftError
from weft.observe import draw_run, write_page
from weft.training.command import add_train_arguments, fail, read_options, summary, train
from weft.training.options import TrainOptions

# Sums are taken in another order on several ranks, so the last digits differ.
EQUAL_WITHIN = 1e-3

NEXT = """\
What to try next
  weft train --strategy fsdp               the same with parameters in shards; or tp, ddp+tp, rpc, ...
  weft train --ranks 4 --hook int8         gradients in a quarter of the bytes
  weft train --data FILE --model small     your own text
  weft plan gpt-7b --ranks 64              what a large model would need, without a cluster
  examples/ddp.py                          the same loop, written by hand
  docs/quickstart.md                       a model of your own
(`weft` is in .venv/bin where scripts/demo has set up.)"""


def add_demo_command(commands: Any) -> None:
    """Add `demo` to the commands of `python -m weft`. It takes train's arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="see weft train on this machine, against a single process",
        description="Train on 2 ranks, then in one process, compare, and draw where the time went.",
    )
    add_train_arguments(parser)
    parser.set_defaults(run=_run, steps=300, record=Path("weft-demo"))


def _run(arguments: argparse.Namespace) -> int:
    try:
        if arguments.checkpoint is not None or arguments.resume:
            raise ConfigError(
                "demo: it trains from the first step to the last. Use `weft train` for checkpoints."
            )
        run_demo(read_options(arguments))
    except WeftError as error:
        return fail("demo", error)
    except OSError as error:
        return fail("demo", ConfigError(f"demo: {error.filename}: {error.strerror or error}."))
    return 0


def run_demo(options: TrainOptions) -> None:
    """Train, compare with one process, draw. Raises InternalError when the losses are not the same."""
    # The same for both runs: with all cores for the single process it would only measure threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    directory = options.record or Path("weft-demo")
    _clear(directory)
    ranks = f"{options.ranks} rank{'s' if options.ranks > 1 else ''}"
    say(f"weft train --ranks {options.ranks} --strategy {options.strategy} --steps {options.steps}\n")
    spread = train(replace(options, record=directory))
    say(summary(options, spread))
    say("\nThe same in a single process\n")
    alone = train(
        replace(
            options, ranks=1, strategy="ddp", tp=None, shard=None, hook="none", uneven=False,
            checkpoint=None, resume=False, record=None,
        )
    )  # fmt: skip
    compare(spread.losses, alone.losses, ranks, is_exact=options.hook == "none" and not options.uneven)
    say(f"\nWhere the time went, in the last steps on {ranks}\n")
    say(draw_run(directory, width=min(shutil.get_terminal_size().columns, 110)))
    page = directory / "report.html"
    write_page(directory, page)
    say(f"\nAll of it, to zoom into: {page}\n\n{NEXT}")


def compare(spread: tuple[float, ...], alone: tuple[float, ...], ranks: str, *, is_exact: bool) -> None:
    """Print both final losses. Raises InternalError where they should be equal and are not."""
    apart = max(abs(one - other) for one, other in zip(spread, alone, strict=False))
    verdict = "equal" if apart <= EQUAL_WITHIN else "different"
    say(
        f"\nfinal loss  {ranks}: {spread[-1]:.4f}  single process: {alone[-1]:.4f}  "
        f"({verdict}: never more than {apart:.0e} apart)"
    )
    if is_exact and apart > EQUAL_WITHIN:
        raise InternalError(
            f"the losses of {ranks} and of a single process are {apart} apart; rounding makes {EQUAL_WITHIN}."
        )


def say(text: str) -> None:
    """Print at once: a reader should see how far it is, through a pipe too."""
    print(text, flush=True)


def _clear(directory: Path) -> None:
    """Remove the record of an earlier run, and nothing else."""
    for path in (directory / "run.json", directory / "report.html", *directory.glob("rank-*.jsonl")):
        path.unlink(missing_ok=True)

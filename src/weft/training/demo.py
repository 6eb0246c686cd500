"""`weft demo`: the main job with its defaults, held against a single process, and what to try next."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weft.errors import ConfigError, InternalError, WeftError
from weft.launcher.environment import read_rank_variables
from weft.observe import draw_run, write_page
from weft.training.command import add_train_arguments, fail, read_options, summary, train
from weft.training.options import TrainOptions

# Sums are taken in another order on several ranks, so the last digits differ, and training magnifies the
# difference, more on some processors than on others. So only the first steps are judged. Seen in them: 1e-6
# from rounding; 5e-4 where gradients were summed in place of averaged, which AdamW nearly hides; 0.2 where a
# rank was left out. At higher rates rounding is past the bound within these steps (7e-5 at 0.01, 0.2 at 0.1);
# at lower ones a wrong gradient may stay below it.
JUDGED_STEPS = 50
EQUAL_WITHIN = 1e-5
JUDGED_RATES = (1e-4, 3e-3)

NEXT = """\
What to try next
  weft train --strategy fsdp               the same with parameters in shards; or tp, ddp+tp, rpc, ...
  weft train --ranks 4 --hook int8         gradients in a quarter of the bytes
  weft train --data FILE --model small     your own text
  weft plan gpt-7b --ranks 64              what a large model would need, without a cluster
  examples/ddp.py                          the same loop, written by hand
  docs/quickstart.md                       a model of your own
(`weft` is in .venv/bin where scripts/demo has set up.)"""


def define_demo_command(parser: argparse.ArgumentParser) -> None:
    """Say what `weft demo` takes, which is what `weft train` takes, and what runs it."""
    parser.description = "Train on 2 ranks, then in one process, compare, and draw where the time went."
    add_train_arguments(parser)
    parser.set_defaults(run=_run, steps=300, record=Path("weft-demo"))


def _run(arguments: argparse.Namespace) -> int:
    try:
        if arguments.checkpoint is not None or arguments.resume:
            raise ConfigError(
                "demo: it trains from the first step to the last. Use `weft train` for checkpoints."
            )
        if read_rank_variables(os.environ) is not None:
            raise ConfigError("demo: it starts its ranks itself. Run it without torchrun, with --ranks N.")
        run_demo(read_options(arguments))
    except WeftError as error:
        return fail("demo", error)
    except OSError as error:
        return fail("demo", ConfigError(f"demo: {error.filename}: {error.strerror or error}."))
    return 0


def run_demo(options: TrainOptions) -> None:
    """Train, compare with one process, draw. Raises InternalError after that when the first losses differ."""
    # The same for both runs: with all cores for the single process it would only measure threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    directory = options.record or Path("weft-demo")
    _clear(directory)
    ranks = _describe_ranks(options)
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
    say(f"\n{describe_losses(spread.losses, alone.losses, ranks)}")
    say(f"\nWhere the time went, in the last steps on {ranks}\n")
    say(draw_run(directory, width=min(shutil.get_terminal_size().columns, 110)))
    page = directory / "report.html"
    write_page(directory, page)
    say(f"\nAll of it, to zoom into: {page}\n\n{NEXT}")
    say(f"\n{judge_losses(options, spread.losses, alone.losses)}")


def find_obstacle(options: TrainOptions) -> str | None:
    """Why the first losses can't tell right gradients from wrong ones; None where they can."""
    lowest, highest = JUDGED_RATES
    if options.hook != "none":
        return f"hook {options.hook} compresses gradients"
    if options.uneven:
        return "with --uneven the ranks see fewer batches than a single process"
    if options.rate > highest:
        return f"at a learning rate above {highest:g} rounding grows within the first steps"
    if options.rate < lowest:
        return f"at a learning rate below {lowest:g} wrong gradients hardly show in the first steps"
    return None


def describe_losses(spread: Sequence[float], alone: Sequence[float], ranks: str) -> str:
    """Both final losses, and how far the curves are apart."""
    apart = max(abs(one - other) for one, other in zip(spread, alone, strict=False))
    return (
        f"final loss  {ranks}: {spread[-1]:.4f}  single process: {alone[-1]:.4f}  "
        f"(never more than {apart:.0e} apart)"
    )


def judge_losses(options: TrainOptions, spread: Sequence[float], alone: Sequence[float]) -> str:
    """Say that the first losses are equal, or not judged. Raises InternalError for one that differs."""
    obstacle = find_obstacle(options)
    if obstacle is not None:
        return f"not judged: {obstacle}"
    pairs = list(zip(spread, alone, strict=False))[:JUDGED_STEPS]
    for step, (one, other) in enumerate(pairs, start=1):
        # Written so that a loss which is not a number counts as different.
        if not abs(one - other) <= EQUAL_WITHIN:
            raise InternalError(
                f"demo: at step {step} the loss of {_describe_ranks(options)} is {one:.7f} and that of a "
                f"single process {other:.7f}; in the first {len(pairs)} steps rounding makes {EQUAL_WITHIN} "
                "at most. Gradients are not the mean over the ranks: please report it, with what "
                "`python -m torch.utils.collect_env` prints."
            )
    return f"equal: in the first {len(pairs)} steps the losses are less than {EQUAL_WITHIN} apart"


def _describe_ranks(options: TrainOptions) -> str:
    return f"{options.ranks} rank{'s' if options.ranks > 1 else ''}"


def say(text: str) -> None:
    """Print at once: a reader should see how far it is, through a pipe too."""
    print(text, flush=True)


def _clear(directory: Path) -> None:
    """Remove the record of an earlier run, and nothing else."""
    for path in (directory / "run.json", directory / "report.html", *directory.glob("rank-*.jsonl")):
        path.unlink(missing_ok=True)

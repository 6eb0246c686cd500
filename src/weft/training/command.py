"""`weft train`: its arguments, where its ranks come from, and what becomes of its errors."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from weft.errors import ConfigError, LaunchError, WeftError
from weft.launcher import launch
from weft.launcher.environment import read_rank_variables
from weft.training.directories import undone_on_error
from weft.training.gradient_hooks import HOOKS
from weft.training.job import Outcome, check_files, run_rank
from weft.training.layout import KINDS
from weft.training.model import SIZES
from weft.training.options import TrainOptions, check_options

EXAMPLES = """\
examples:
  weft train --ranks 2 --strategy fsdp
  weft train --ranks 4 --strategy ddp+tp --record run && weft report run
  weft train --data book.txt --model small --checkpoint saved --steps 1000
  weft train --data book.txt --model small --checkpoint saved --steps 1000 --resume
  torchrun --nnodes 2 --nproc-per-node 8 ... -m weft train --strategy fsdp
"""


def define_train_command(parser: argparse.ArgumentParser) -> None:
    """Say what `weft train` takes, and what runs it."""
    parser.description = (
        "Train a byte-level transformer on a text, on ranks of this machine or under torchrun."
    )
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_train_arguments(parser)
    parser.set_defaults(run=_run)


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a run can be told. Defaults are those of TrainOptions."""
    default = TrainOptions()
    ranks = parser.add_argument_group("ranks")
    ranks.add_argument("--ranks", metavar="N", type=int, help="how many; torchrun knows it (default: 2)")
    ranks.add_argument("--strategy", choices=[*KINDS], default=default.strategy, help="(default: ddp)")
    ranks.add_argument("--tp", metavar="N", type=int, help="size of the tensor-parallel axis (default: 2)")
    ranks.add_argument("--shard", metavar="N", type=int, help="ranks that hsdp shards over (default: half)")
    ranks.add_argument("--hook", choices=HOOKS, default=default.hook, help="what gradients travel as")
    ranks.add_argument("--compile", action="store_true", help="run the model through torch.compile")
    ranks.add_argument("--uneven", action="store_true", help="each rank has a batch less than the one before")
    ranks.add_argument("--backend", help="as for init_process_group (default: what fits the hardware)")
    model = parser.add_argument_group("model and data")
    model.add_argument("--model", choices=[*SIZES], default=default.model, help="(default: tiny)")
    model.add_argument("--data", metavar="FILE", type=Path, help="a text (default: one that comes with weft)")
    model.add_argument("--steps", metavar="N", type=int, default=default.steps, help="(default: %(default)s)")
    model.add_argument(
        "--batch",
        metavar="N",
        type=int,
        default=default.batch,
        help="sequences a step, of all ranks together",
    )
    model.add_argument("--context", metavar="N", type=int, help="bytes of a sequence (default: the model's)")
    model.add_argument(
        "--rate", type=float, default=default.rate, help="learning rate (default: %(default)s)"
    )
    model.add_argument(
        "--warmup", metavar="N", type=int, default=default.warmup,
        help="steps in which the rate rises (default: %(default)s)",
    )  # fmt: skip
    model.add_argument(
        "--decay", metavar="N", type=int,
        help="step by which it has fallen to a tenth, along a cosine (default: --steps, or the checkpoint's)",
    )  # fmt: skip
    model.add_argument("--seed", type=int, default=default.seed)
    disk = parser.add_argument_group("on the disk")
    disk.add_argument("--checkpoint", metavar="DIR", type=Path, help="write checkpoints here")
    disk.add_argument("--every", metavar="N", type=int, default=default.every, help="steps between them")
    disk.add_argument("--keep", metavar="N", type=int, default=default.keep, help="how many stay")
    disk.add_argument("--resume", action="store_true", help="go on from the newest one")
    disk.add_argument("--record", metavar="DIR", type=Path, help="record the run here, for `weft report`")


def read_options(arguments: argparse.Namespace) -> TrainOptions:
    """The options that the arguments give. Raises ConfigError for what can't be together."""
    given = {name: value for name, value in vars(arguments).items() if name in TrainOptions.__annotations__}
    under_torchrun = read_rank_variables(os.environ)
    if given["ranks"] is None:
        given["ranks"] = TrainOptions.ranks if under_torchrun is None else under_torchrun.size
    options = TrainOptions(**given)
    check_options(options)
    return options


def train(options: TrainOptions) -> Outcome:
    """Run on ranks of this machine, or as the one rank that torchrun has made this process.

    Raises ConfigError, before any rank starts where that can be known, and LaunchError when a rank fails.
    """
    check_options(options)
    variables = read_rank_variables(os.environ)
    with undone_on_error() as made:
        if variables is None or variables.rank == 0:
            check_files(options, made)
        if variables is not None:
            return run_rank(options)
        try:
            return launch(run_rank, ranks=options.ranks, backend=options.backend, args=(options,))[0]
        except LaunchError as error:
            if isinstance(error.__cause__, ConfigError):
                raise error.__cause__ from None  # a mistake that only a rank could see: its line says all
            raise


def fail(command: str, error: WeftError) -> int:
    """Print the error of a command and give its exit code: 2 for what other arguments can mend."""
    is_mistake = isinstance(error, ConfigError)
    message = str(error).removeprefix(f"{command}: ")
    if is_mistake:
        message = message.removeprefix("train: ").replace("\n", " ")
    print(f"weft {command}: {message}", file=sys.stderr, flush=True)
    return 2 if is_mistake else 1


def _run(arguments: argparse.Namespace) -> int:
    try:
        options = read_options(arguments)
        outcome = train(options)
    except WeftError as error:
        return fail("train", error)
    if read_rank_variables(os.environ) is None or os.environ["RANK"] == "0":
        print(summary(options, outcome), flush=True)
    return 0


def summary(options: TrainOptions, outcome: Outcome) -> str:
    """What a run came to, in two lines at most."""
    if not outcome.losses:
        return f"all {options.steps} steps were made before: nothing to do"
    made = len(outcome.losses)
    ranks = f"{options.ranks} rank{'s' if options.ranks > 1 else ''}"
    line = (
        f"loss {outcome.losses[-1]:.4f} after step {outcome.first_step + made}: {made} steps of "
        f"{outcome.num_parameters:,} parameters on {ranks} ({options.strategy}) in {outcome.secs:.1f} s"
    )
    if options.record is not None:
        line += f"\nrecorded in {options.record}: `weft report {options.record}` shows it"
    return line

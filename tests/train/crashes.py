"""A process that dies at every step of writing a checkpoint, one after the other: what was written is found.

Each death is a fork that ends, without a last word, as it makes its n-th call that changes the disk. Run as a
program, `python -m tests.train.crashes DIRECTORY`, since forks are of a process that has one thread.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.default_planner
import torch.distributed.checkpoint.state_dict_loader
import torch.distributed.checkpoint.state_dict_saver
from torch import nn

import weft
import weft.training.checkpoint_reader  # all that a fork needs is imported before it
from weft.training import Checkpoints

_CALLS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")
_MOST_CALLS = 200


def save(directory: Path, value: float, die_at: int | None) -> None:
    """Clean up after the one before, and write step 1 with this value."""
    torch.set_num_threads(1)
    model = nn.Linear(2, 2)
    trainer = weft.Trainer(model, nn.functional.mse_loss, lambda params: torch.optim.SGD(params, lr=0.0))
    trainer.num_steps = 1
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    checkpoints = Checkpoints(directory)
    if die_at is not None:
        _die_at_call(die_at)
    checkpoints.hold()
    checkpoints.clean()
    checkpoints.save(trainer, {"value": value})


def _die_at_call(number: int) -> None:
    left = [number]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **keywords: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)
            return call(*args, **keywords)

        return counting

    for name in _CALLS:
        setattr(os, name, counted(getattr(os, name)))


def found(directory: Path) -> float:
    """The value of what the next process finds, whole."""
    checkpoints = Checkpoints(directory)
    checkpoints.hold()
    checkpoints.clean()
    assert checkpoints.steps() == [1], checkpoints.steps()
    assert {path.name for path in directory.iterdir()} == {".lock", "step-00000001"}, [*directory.iterdir()]
    model = nn.Linear(2, 2)
    trainer = weft.Trainer(model, nn.functional.mse_loss, lambda params: torch.optim.SGD(params, lr=0.0))
    checkpoints.load(trainer, 1)
    (value,) = {one for param in model.parameters() for one in param.detach().flatten().tolist()}
    assert checkpoints.about(1) == {"value": value}
    return value


def in_fork(act: Callable[[], object]) -> int:
    """The exit code of a fork that does it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def check(directory: Path, number: int, allowed: tuple[float, ...]) -> None:
    value = found(directory)
    assert value in allowed, f"{value} was found after a death at call {number}, and not one of {allowed}"


def main(below: Path) -> int:
    """How many places there were to die at."""
    whole = below / "whole"
    assert in_fork(partial(save, whole, 1.0, None)) == 0
    for number in range(_MOST_CALLS):
        directory = shutil.copytree(whole, below / "case")
        code = in_fork(partial(save, directory, 2.0, number))
        assert code in (0, 9), code
        # What comes next has one of both, whole, and the new one where it was reported.
        allowed = (2.0,) if code == 0 else (1.0, 2.0)
        assert in_fork(partial(check, directory, number, allowed)) == 0
        shutil.rmtree(directory)
        if code == 0:
            return number
    raise AssertionError("it never came to the end")


if __name__ == "__main__":
    print(f"died at {main(Path(sys.argv[1]))} calls")

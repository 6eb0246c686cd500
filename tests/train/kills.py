"""A process killed at random moments of writing checkpoints: none that was reported written is ever lost.

Each kill is one process: it loads the newest checkpoint, compares every parameter with what that step must
hold, and writes one checkpoint after another, some of them twice, until SIGKILL ends it. Processes are forks
of one that has imported torch and computed nothing. `scripts/kills --of checkpoints` does it for long.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait as wait_readable
from pathlib import Path

import torch
from torch import nn

import weft
from weft.training import Checkpoints

NUMEL = 40_000
KEEP = 2
START_SECS = 60.0  # a loaded machine
WRITE_SECS = 0.05  # about as long as it takes to write one


def train_and_save(directory: Path, seed: int, reports: socket.socket) -> None:
    """Go on from the newest checkpoint and write more, reporting each, until killed."""
    torch.set_num_threads(1)  # this is a fork: a pool of threads is started here or nowhere
    chance = random.Random(seed)
    checkpoints = Checkpoints(directory, keep=KEEP)
    model = nn.Linear(NUMEL, 1)
    trainer = weft.Trainer(model, nn.functional.mse_loss, lambda params: torch.optim.SGD(params, lr=0.0))
    checkpoints.clean()
    step = max(checkpoints.steps(), default=0)
    if step:
        checkpoints.load(trainer, step)
        for name, param in model.named_parameters():
            wrong = int((param != step).sum())
            assert not wrong, f"{wrong} values of '{name}' are not of step {step}"
    report(reports, loaded=step)
    while True:
        is_second = step > 0 and chance.random() < 0.3
        step += not is_second
        trainer.num_steps = step
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(step)
        report(reports, writing=step)
        checkpoints.save(trainer, {"seed": seed})
        report(reports, written=step)


def report(reports: socket.socket, **words: int) -> None:
    reports.send(json.dumps(words).encode())


def kill_writers(kills: int, seed: int, directory: Path) -> Iterator[int]:
    """Kill this many writers, one after the other; yields the last step that each had reported written."""
    written = 0
    for number in range(kills):
        written = _kill_writer(directory, seed + number, written)
        yield written


def _kill_writer(directory: Path, seed: int, written: int) -> int:
    """One writer's life. Fails if it did not find what the writers before it had written."""
    chance = random.Random(seed)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _run_writer(directory, seed, theirs)
    theirs.close()
    try:
        loaded = _next_report(ours, seed)["loaded"]
        assert loaded >= written, f"step {written} had been written, the newest is {loaded}; seed {seed}"
        for _ in range(chance.randrange(1, 6)):
            written = _next_report(ours, seed).get("written", written)
        threading.Event().wait(chance.uniform(0, WRITE_SECS))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    while packet := ours.recv(1000):  # what it had said before it was gone counts
        written = max(written, json.loads(packet).get("written", 0))
    ours.close()
    return written


def _run_writer(directory: Path, seed: int, reports: socket.socket) -> None:
    try:
        train_and_save(directory, seed, reports)
    except BaseException as error:
        reports.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
    finally:
        os._exit(1)


def _next_report(reports: socket.socket, seed: int) -> dict[str, int]:
    assert wait_readable([reports], START_SECS), f"the writer hangs; seed {seed}"
    words = json.loads(reports.recv(10_000))
    assert "failed" not in words, f"{words['failed']}; seed {seed}"
    return words


def kill_for(kills: int, seed: int) -> float:
    """Kill this many; how many seconds it took."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in kill_writers(kills, seed, folder):
            whole = len(Checkpoints(folder).steps())
            assert whole <= KEEP + 1, f"{whole} checkpoints are kept; seed {seed}"
    return time.monotonic() - began


def main(kills: int, seed: int) -> None:
    """Kill this many writers and say how it went, ten at a time."""
    for first in range(0, kills, 10):
        number = min(10, kills - first)
        secs = kill_for(number, seed + first)
        print(
            f"{first + number} of {kills} kills of writers of checkpoints; the last {number} in {secs:.0f} s"
        )

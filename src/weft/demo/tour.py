"""A tour of what weft can do today. Plain user code: nothing here is out of a user's reach.

Each stop prints what it is about to do, does it, checks the result and shows it.
What the ranks run is in jobs.py, how a table looks in table.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Literal

import torch

import weft
from weft.demo.jobs import Timing, average_rank, list_ways, record_step, time_collectives
from weft.demo.table import format_bytes, format_table

NEXT = """\
What to try next
  scripts/demo --ranks 4 --size 64      more ranks, larger tensors
  src/weft/demo/jobs.py                 the code that just ran: change it, run it again
  weft.launch(fn, ranks=4)              your own function on four ranks
  torchrun --nproc-per-node=2 job.py    the same with torchrun: call weft.init() in job.py
  docs/design.md                        how it is built, and why"""


def run_tour(num_ranks: int, num_bytes: int) -> None:
    """Walk through all stops, on ranks of this machine, with tensors of up to `num_bytes`.

    Raises LaunchError when a rank fails, InternalError when a result is wrong.
    """
    # Ranks share this machine's cores: with torch's default each would start a thread for every core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cores, gpus = count(os.cpu_count() or 1, "core"), count(num_gpus, "GPU")
    say(f"weft on torch {torch.__version__}, {cores}, {gpus}")
    show_launch(num_ranks)
    show_backends(num_ranks, num_bytes)
    show_records(num_ranks)
    say(f"\n{NEXT}")


def show_launch(num_ranks: int) -> None:
    """Run one function on ranks that are processes, then on ranks that are threads."""
    say(f"\n1. weft.launch runs a function on {count(num_ranks, 'rank')} and returns the results by rank")
    wanted = [(num_ranks - 1) / 2] * num_ranks
    kinds: list[Literal["process", "thread"]] = ["process", "thread"]
    for kind in kinds:
        start_secs = time.perf_counter()
        results = weft.launch(average_rank, ranks=num_ranks, kind=kind)
        took_secs = time.perf_counter() - start_secs
        if results != wanted:
            raise weft.InternalError(f"{kind} ranks gave {results}; it must be {wanted}.")
        say(f"   {kind:8} ranks averaged their numbers: {results}, in {took_secs:.2f} s")


def show_backends(num_ranks: int, num_bytes: int) -> None:
    """Move tensors over every backend, check what arrives, and compare the times."""
    ways = list_ways(num_ranks)
    names = [way.name for way in ways]
    say(f"\n2. Tensors between the ranks ({count(num_ranks, 'process')}), over {', '.join(names)}")
    sizes = [max(num_bytes // divisor // 4, 1) * 4 for divisor in (256, 16, 1)]  # whole float32 numbers
    timings: list[Timing] = weft.launch(time_collectives, ranks=num_ranks, args=(ways, sizes))[0]
    say("   Every result was right. A call took, in ms (the median, on the slowest rank):\n")
    is_compared = {"gloo", "weft"} <= set(names)
    rows = [["", *names, *(["gloo / weft"] if is_compared else [])]]
    for timing in timings:
        cells = [f"{timing.median_secs[name] * 1e3:.3f}" for name in names]
        if is_compared:
            cells.append(f"{timing.median_secs['gloo'] / timing.median_secs['weft']:.1f}x")
        rows.append([f"{timing.op} {format_bytes(timing.num_bytes)}", *cells])
    say(format_table(rows, indent="   "))


def show_records(num_ranks: int) -> None:
    """Record what a training step communicates."""
    say("\n3. weft.record() notes all collectives that go through weft.comm. One training step, on rank 0:\n")
    events: Sequence[weft.comm.Event] = weft.launch(record_step, ranks=num_ranks, kind="thread")[0]
    rows = [["operation", "ranks", "bytes in", "bytes out", "ms"]]
    for event in events:
        took_ms = (event.end_secs - event.start_secs) * 1e3
        sizes = [format_bytes(event.bytes_in), format_bytes(event.bytes_out)]
        rows.append([f"{event.op} ({event.detail})", str(event.group_size), *sizes, f"{took_ms:.3f}"])
    say(format_table(rows, indent="   "))


def count(number: int, noun: str) -> str:
    """A number of things in words: 1 rank, 2 ranks."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"


def say(text: str) -> None:
    """Print at once: a reader should see how far it is, through a pipe too."""
    print(text, flush=True)

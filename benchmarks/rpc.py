"""How long does a remote call take in weft.rpc, against torch.distributed.rpc?

Each candidate is two processes of this host, a caller and a callee, with one thread each for torch's
operators and the library's own defaults for everything else. They are started once; then their blocks of
calls take turns. `burst` starts 2,000 null calls at once and waits for them all; `remote + to_here` makes a
value on the other side and fetches it, a hundred times. Echoes are checked before they are timed.

`torch` is torch.distributed.rpc, `weft` is weft.rpc, `weft tcp` is weft.rpc as between two hosts: over the
loopback device, with every frame enciphered. `socket` is a bare Unix socket: bytes there and back, no
function and no pickle. `ray` is an actor, where Ray is installed; it is measured after the others, since its
daemons never rest.
"""

from __future__ import annotations

import argparse
import importlib.util
import secrets
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from harness import CaseResult, Schedule, Summary, summarise
from question import Question, ask
from report import Goal
from rpc_pairs import Block, Library, Pair, RayLibrary, RpcLibrary, SocketLibrary, Work, pose_as_two_hosts

KB, MB = 2**10, 2**20

LIBRARIES: dict[str, Library] = {
    "torch": RpcLibrary("torch.distributed.rpc"),
    "weft": RpcLibrary("weft.rpc"),
    # 127.0.0.1 would mean: this host only.
    "weft tcp": RpcLibrary(
        "weft.rpc", {"listen": "127.0.0.2", "secret": secrets.token_hex()}, pose_as_two_hosts
    ),
    "ray": RayLibrary(),
    "socket": SocketLibrary(),
}


@dataclass(frozen=True)
class Case:
    """What is timed, in which blocks its candidates take turns, and what is asked of weft over torch."""

    name: str
    work: Work
    size: int
    num_calls: int
    rounds_factor: int  # a short call is timed in more rounds
    limit: float

    @property
    def num_inner(self) -> int:
        """How many remote calls a timed one is made of."""
        return self.size if self.work in (Work.BURST, Work.REMOTE) else 1


CASES = [
    Case("null call", Work.NULL, 0, 50, 4, 0.35),
    Case("echo 4 KB", Work.ECHO, 4 * KB, 50, 4, 0.35),
    Case("echo 1 MB", Work.ECHO, MB, 10, 4, 0.4),
    Case("echo 16 MB", Work.ECHO, 16 * MB, 3, 2, 0.4),
    Case("burst of 2,000", Work.BURST, 2000, 2, 1, 1 / 3),
    Case("100 remote + to_here", Work.REMOTE, 100, 5, 1, 1 / 3),
]


def plan_goals(case: Case) -> list[Goal]:
    """What is asked of a case, and what is reported of it."""
    return [
        Goal(case.name, "weft", "torch", case.limit),
        Goal(case.name, "weft tcp", "torch", None),
        Goal(case.name, "weft", "ray", None),
        Goal(case.name, "weft", "socket", None),
    ]


def measure_together(
    names: Sequence[str], cases: Sequence[Case], question: Question
) -> list[dict[str, Summary]]:
    """Start these candidates, measure all cases, and end them. What a library doesn't do is left out."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, ExitStack() as running:
        pairs: list[Pair] = []
        for name in names:
            pairs.append(Pair(name, LIBRARIES[name], Path(folder, name.replace(" ", "-"))))
            running.callback(pairs[-1].close)
        return [
            measure_case(case, pairs, question.schedule(case.num_calls, case.rounds_factor)) for case in cases
        ]


def measure_case(case: Case, pairs: Sequence[Pair], schedule: Schedule) -> dict[str, Summary]:
    """Let the pairs take turns at a case."""
    print(f"measuring {case.name}: {', '.join(pair.name for pair in pairs)}", file=sys.stderr, flush=True)
    block = Block(case.work, case.size, schedule.num_calls)
    timed: dict[str, list[float]] = {}
    for _ in range(schedule.num_rounds):
        for pair in pairs:
            seconds = pair.time_block(block)
            if seconds is not None:
                timed.setdefault(pair.name, []).extend(seconds)
    return {name: summarise(seconds) for name, seconds in timed.items()}


def describe_rates(case: Case, result: CaseResult) -> list[str]:
    """Calls a second, in words, where a timed call is made of many."""
    if case.num_inner == 1:
        return []
    rates = (f"{name} {case.num_inner / seen.median_secs:,.0f}" for name, seen in result.summaries.items())
    return [f"{case.name}, a second: {', '.join(rates)}."]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--without", metavar="NAMES", default="", help="leave out candidates: names with commas between them"
    )


def choose_libraries(question: Question) -> list[list[str]]:
    """The candidates that were asked for and that there are, in the companies that they are measured in."""
    left_out = set(question.options.without.split(",")) - {""}
    if unknown := sorted(left_out - set(LIBRARIES)):
        question.parser.error(f"--without: there is no {unknown[0]!r}; there are: {', '.join(LIBRARIES)}")
    if importlib.util.find_spec("ray") is None:
        left_out.add("ray")
    companies = [[name for name in LIBRARIES if name != "ray"], ["ray"]]
    kept = [[name for name in company if name not in left_out] for company in companies]
    return [company for company in kept if company]


def main() -> None:
    question = ask("rpc", __doc__, add_options)
    cases = question.choose(CASES)
    results = [CaseResult("rpc", case.name, {}) for case in cases]
    for names in choose_libraries(question):
        for result, summaries in zip(results, measure_together(names, cases, question), strict=True):
            result.summaries.update(summaries)
    notes = [note for pair in zip(cases, results, strict=True) for note in describe_rates(*pair)]
    question.answer(results, [goal for case in cases for goal in plan_goals(case)], notes)


if __name__ == "__main__":
    sys.exit(main())

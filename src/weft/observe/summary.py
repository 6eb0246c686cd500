"""What a run's records come to: figures by rank, and sentences. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from weft.observe.figures import hidden_share
from weft.observe.quantities import say_bytes, say_count, say_secs, say_share
from weft.observe.reading import Kind, RankLog, Run, Traffic

_ALIKE = 0.02  # ranks that differ by less are called equally fast


@dataclass(frozen=True)
class RankSummary:
    """The median step of one rank."""

    rank: int
    num_steps: int
    secs: float
    compute_secs: float
    comm_secs: float
    wait_secs: float
    memory_bytes: int  # the most of all steps


@dataclass(frozen=True)
class Summary:
    """The whole run."""

    num_steps: int  # of the rank that came furthest
    median_secs: float
    hidden_share: float
    comm_secs: float  # of all ranks and steps
    ranks: list[RankSummary]
    slowest: RankSummary | None  # None: one rank only, or no step
    behind_secs: float  # how much longer the slowest computes, in a step, than the median rank
    losses: list[tuple[int, float]]  # by step: the mean of the ranks that noted one

    @property
    def is_even(self) -> bool:
        """Whether no rank is slower than the others by more than a bit."""
        slowest = self.slowest
        return slowest is None or self.behind_secs <= _ALIKE * (slowest.compute_secs - self.behind_secs)


def summarize(run: Run) -> Summary:
    """Add a run up."""
    ranks = [_summarize_rank(log) for log in run.logs if log.steps]
    all_secs = [step.secs for log in run.logs for step in log.steps]
    comm_secs = sum(step.comm_secs for log in run.logs for step in log.steps)
    wait_secs = sum(step.wait_secs for log in run.logs for step in log.steps)
    slowest = max(ranks, key=lambda rank: rank.compute_secs) if len(ranks) > 1 else None
    behind = 0.0
    if slowest is not None:
        behind = slowest.compute_secs - statistics.median(rank.compute_secs for rank in ranks)
        if len(ranks) == 2:  # the median of two lies between them
            behind = slowest.compute_secs - min(rank.compute_secs for rank in ranks)
    return Summary(
        num_steps=max((rank.num_steps for rank in ranks), default=0),
        median_secs=statistics.median(all_secs) if all_secs else math.nan,
        hidden_share=hidden_share(comm_secs, wait_secs),
        comm_secs=comm_secs,
        ranks=ranks,
        slowest=slowest,
        behind_secs=behind,
        losses=scalar_by_step(run, "loss"),
    )


def _summarize_rank(log: RankLog) -> RankSummary:
    return RankSummary(
        rank=log.rank,
        num_steps=len(log.steps),
        secs=statistics.median(step.secs for step in log.steps),
        compute_secs=statistics.median(step.compute_secs for step in log.steps),
        comm_secs=statistics.median(step.comm_secs for step in log.steps),
        wait_secs=statistics.median(step.wait_secs for step in log.steps),
        memory_bytes=max(step.memory_bytes for step in log.steps),
    )


def scalar_by_step(run: Run, name: str) -> list[tuple[int, float]]:
    """A noted number by step, the mean of the ranks that noted it."""
    noted: dict[int, list[float]] = {}
    for log in run.logs:
        for step in log.steps:
            if name in step.scalars:
                noted.setdefault(step.step, []).append(step.scalars[name])
    return [(step, sum(values) / len(values)) for step, values in sorted(noted.items())]


def add_up(logs: Iterable[RankLog]) -> dict[Kind, Traffic]:
    """The traffic of all ranks, by feature, op and label."""
    total: dict[Kind, Traffic] = {}
    for log in logs:
        for kind, traffic in log.traffic.items():
            total.setdefault(kind, Traffic()).add(traffic)
    return total


def by_op(total: dict[Kind, Traffic]) -> dict[tuple[str, str], Traffic]:
    """The same by feature and op, the most bytes first."""
    found: dict[tuple[str, str], Traffic] = {}
    for (feature, op, _), traffic in total.items():
        found.setdefault((feature, op), Traffic()).add(traffic)
    return dict(sorted(found.items(), key=lambda item: -item[1].bytes_in))


def write_sentences(run: Run, summary: Summary) -> list[str]:
    """What the run shows, in plain sentences."""
    if not summary.num_steps:
        return ["No step of this run was finished."]
    sentences = [say_steps(run, summary), *_say_losses(summary.losses), say_traffic(run, summary)]
    return sentences if summary.slowest is None else [*sentences, say_slowest(summary, summary.slowest)]


def say_steps(run: Run, summary: Summary) -> str:
    """How many steps, and how long one takes."""
    return (
        f"{say_count(run.num_ranks, 'rank')} made {say_count(summary.num_steps, 'step')}; the median step "
        f"took {say_secs(summary.median_secs)}."
    )


def say_traffic(run: Run, summary: Summary) -> str:
    """How much is communicated, and how much of it is hidden."""
    total = add_up(run.logs)
    given = sum(traffic.bytes_in for traffic in total.values())
    num_rank_steps = sum(rank.num_steps for rank in summary.ranks)
    if not given and not summary.comm_secs:
        return "Nothing was communicated."
    return (
        f"A rank gave {say_bytes(given / num_rank_steps)} to collectives in an average step, which took "
        f"{say_secs(summary.comm_secs / num_rank_steps)}; {say_share(summary.hidden_share)} of that time "
        "was hidden behind computation."
    )


def _say_losses(losses: list[tuple[int, float]]) -> list[str]:
    if not losses:
        return []
    bad = next((step for step, loss in losses if not math.isfinite(loss)), None)
    if bad is not None:
        return [f"The loss is not a finite number from step {bad} on."]
    (first, before), (last, after) = losses[0], losses[-1]
    if first == last:
        return [f"The loss at step {first} was {before:.4g}."]
    return [f"The loss went from {before:.4g} at step {first} to {after:.4g} at step {last}."]


def say_slowest(summary: Summary, slowest: RankSummary) -> str:
    """Which rank the others wait for."""
    if summary.is_even:
        return f"All ranks are equally fast: none computes {say_share(_ALIKE)} longer than the others."
    usual = slowest.compute_secs - summary.behind_secs
    share = summary.behind_secs / usual if usual > 0 else 0.0
    is_pair = len(summary.ranks) == 2
    rest = "the other, which waits." if is_pair else "the median rank. The others wait."
    return (
        f"Rank {slowest.rank} is the slowest: it computes {say_secs(slowest.compute_secs)} a step, "
        f"{say_secs(summary.behind_secs)} ({say_share(share)}) longer than {rest}"
    )

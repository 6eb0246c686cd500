"""A plan as text: a table, the collectives of each strategy, and why they stand in this order. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from weft.planning.api import StrategyPlan
from weft.planning.simulate import Simulated
from weft.planning.units import show_bytes, show_count, show_secs


def show_plans(plans: Sequence[StrategyPlan]) -> str:
    """Everything there is to say, best first."""
    parts = [_table(plans), _traffic_table(plans), "\n".join(explain(plans))]
    return "\n\n".join(part for part in parts if part)


def explain(plans: Sequence[StrategyPlan]) -> list[str]:
    """Sentences: why the first is first, and what keeps the others behind it."""
    sentences: list[str] = []
    best = plans[0] if plans and plans[0].fits else None
    if best is None:
        sentences.append("No strategy fits: take more ranks, a smaller batch, or ranks with more memory.")
    for plan in plans:
        if plan.step is None:
            sentences.append(f"{plan.strategy} can't be: {plan.refusal}")
        elif not plan.fits:
            sentences.append(_why_too_large(plan, plan.step))
        elif plan is best:
            sentences.append(_why_first(plan, plan.step))
        else:
            assert best is not None
            assert best.step is not None
            sentences.append(_why_behind(plan, plan.step, best.tokens_per_sec, best.step))
    return sentences


def _why_first(plan: StrategyPlan, step: Simulated) -> str:
    time = step.time
    room = f"{show_bytes(step.memory.total)} of {show_bytes(plan.memory_limit_bytes)}"
    if time.communication_secs == 0:
        talk = "ranks don't talk to each other"
    else:
        part = time.hidden_secs / time.communication_secs
        talk = (
            f"{part:.0%} of its {show_secs(time.communication_secs)} of communication hide behind computing"
        )
    return (
        f"{plan.strategy} is first: it fits ({room} a rank) and makes the most tokens a second, "
        f"{show_count(plan.tokens_per_sec)}; {talk}."
    )


def _why_too_large(plan: StrategyPlan, step: Simulated) -> str:
    memory = step.memory
    kinds = {
        "parameters, gradients and optimizer state": memory.parameters + memory.gradients + memory.optimizer,
        "activations": memory.activations,
        "gathered parameters and buffers of messages": memory.communication,
    }
    largest = max(kinds, key=lambda kind: kinds[kind])
    return (
        f"{plan.strategy} does not fit: a rank would need {show_bytes(memory.total)} and has "
        f"{show_bytes(plan.memory_limit_bytes)}; {show_bytes(kinds[largest])} of it are {largest}."
    )


def _why_behind(plan: StrategyPlan, step: Simulated, best_rate: float, best: Simulated) -> str:
    factor = best_rate / plan.tokens_per_sec
    if factor < 1.005:
        return f"{plan.strategy} is as fast as the first ({show_bytes(step.memory.total)} a rank)."
    tokens = plan.tokens
    waits = step.time.exposed_secs / tokens - best.time.exposed_secs / (best_rate * best.time.total_secs)
    computes = step.time.compute_secs / tokens - best.time.compute_secs / (best_rate * best.time.total_secs)
    if waits >= computes:
        most = max(step.traffic, key=lambda traffic: traffic.bytes_out)
        why = (
            f"it stands still for communication {step.time.exposed_secs / step.time.total_secs:.0%} of a "
            f"step, with {show_bytes(most.bytes_out)} through {most.count} {most.op} of {most.group_size} "
            "ranks"
        )
    else:
        why = (
            f"a token takes more computing: {show_secs(step.time.compute_secs)} a step on each rank, with "
            "smaller pieces of work or the same work on several ranks"
        )
    return f"{plan.strategy} is {factor:.2f} times slower: {why}."


def _table(plans: Sequence[StrategyPlan]) -> str:
    kinds = ("memory", "params", "grads", "optim", "activ", "comm")
    rows = [["strategy", "ranks", "fits", *kinds, "step", "exposed", "tokens/s"]]
    for plan in plans:
        shape = "x".join(str(size) for _, size in plan.axes)
        if plan.step is None:
            rows.append([plan.strategy, shape, "can't be", *[""] * 9])
            continue
        memory, time = plan.step.memory, plan.step.time
        kept = (memory.parameters, memory.gradients, memory.optimizer)
        amounts = map(show_bytes, (memory.total, *kept, memory.activations, memory.communication))
        secs = map(show_secs, (time.total_secs, time.exposed_secs))
        fits = "yes" if plan.fits else "no"
        rows.append([plan.strategy, shape, fits, *amounts, *secs, show_count(plan.tokens_per_sec)])
    return align(rows, num_left=3)


def _traffic_table(plans: Sequence[StrategyPlan]) -> str:
    rows = [["a step of a rank", "collective", "of", "ranks", "times", "gives", "gets"]]
    for plan in plans:
        name = plan.strategy
        for traffic in plan.step.traffic if plan.step is not None else ():
            amounts = map(show_bytes, (traffic.bytes_in, traffic.bytes_out))
            numbers = map(str, (traffic.group_size, traffic.count))
            rows.append([name, traffic.op, traffic.feature, *numbers, *amounts])
            name = ""
    return align(rows, num_left=3) if len(rows) > 1 else ""


def align(rows: Sequence[Sequence[str]], num_left: int) -> str:
    """Columns of text: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)

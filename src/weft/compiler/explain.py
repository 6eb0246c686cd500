"""What a compiled backward reduces when: the schedule that the passes made, in words."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from weft.compiler.backend import run_graphs
from weft.compiler.graphs import LAUNCHES, WAIT
from weft.compiler.ops import END, RECEIVE, SEND
from weft.compiler.passes.wait_late import UNPACKING
from weft.compiler.pipeline import Work, name_of
from weft.errors import StateError

MB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Launch:
    """One reduction of a backward."""

    what: str  # the op
    names: tuple[str, ...]  # of the parameters
    num_bytes: int
    at: int  # its place among the graph's calls
    until: int  # where it is waited for
    overlaps: tuple[str, ...]  # what is computed in between


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reductions of a compiled module's backward, in order."""

    launches: tuple[Launch, ...]
    num_calls: int  # in the backward graph
    num_graphs: int  # that forward and backward were made of
    is_in_graph: bool  # gradients are reduced in the graph; else when autograd hands them over

    def __str__(self) -> str:
        if not self.is_in_graph:
            return (
                f"{self.num_graphs} graphs; none has all gradients of the module, so they are reduced after "
                "the compiled backward, as without a compiler."
            )
        lines = [f"{len(self.launches)} reductions in a backward of {self.num_calls} calls"]
        for number, launch in enumerate(self.launches):
            inside = Counter(launch.overlaps)
            words = ", ".join(f"{count} {op}" for op, count in inside.most_common(4)) or "nothing"
            first, last = launch.names[0], launch.names[-1]
            named = first if first == last else f"{first} ... {last}"
            lines.append(
                f"  {number}: {launch.what} of {len(launch.names)} gradients, {launch.num_bytes / MB:.2f} MB "
                f"({named}), at call {launch.at}, waited for at {launch.until}; meanwhile {words}"
            )
        return "\n".join(lines)


def explain(model: nn.Module, *args: Any, loss: Callable[[Any], torch.Tensor] | None = None) -> Explanation:
    """Run one step of a compiled model, print what its backward reduces when, and return it.

    All ranks must call it. `loss` makes a number of the model's output, the sum if it isn't given. Gradients
    are left as they were. The schedule is that of the graphs before Inductor fuses what is between.
    """
    works: list[Work] = []
    engine = functools.partial(run_graphs, on_graph=works.append)
    before = [(param, param.grad) for param in model.parameters()]
    torch.compiler.reset()
    try:
        output = torch.compile(_inner(model), backend=engine)(*args)
        number = output.sum() if loss is None else loss(output)
        if not number.requires_grad:
            raise StateError("explain: the loss needs no gradient, so there is no backward to explain.")
        number.backward()
    finally:
        torch.compiler.reset()  # these graphs are for looking at
        for param, grad in before:
            param.grad = grad
    found = _explanation(works)
    print(found)
    return found


def _inner(model: nn.Module) -> nn.Module:
    return getattr(model, "_orig_mod", model)


def _explanation(works: list[Work]) -> Explanation:
    reducing = [work for work in works if work.found]
    launches = [launch for work in reducing for launch in _launches(work)]
    num_calls = sum(len(_calls(work.graph)) for work in reducing)
    return Explanation(tuple(launches), num_calls, len(works), bool(reducing))


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _launches(work: Work) -> list[Launch]:
    calls = _calls(work.graph)
    place = {node: at for at, node in enumerate(calls)}
    names = [
        (found.buckets[at], tuple(slot.name for slot in found.buckets[at].slots))
        for found in work.found
        for at in range(len(found.buckets))
    ]
    nodes = [node for node in calls if node.target in LAUNCHES]
    made: list[Launch] = []
    for node, (bucket, inside) in zip(nodes, names, strict=False):
        until = min(place[user] for user in _ends_of(node))
        between = [other for other in calls[place[node] + 1 : until] if _is_computed(other)]
        ops = tuple(name_of(other.target) for other in between)
        made.append(Launch(name_of(node.target), inside, bucket.num_bytes, place[node], until, ops))
    return made


def _ends_of(launch: fx.Node) -> list[fx.Node]:
    pending, ends = list(launch.users), []
    while pending:
        node = pending.pop()
        if node.target in (WAIT, RECEIVE, END):
            ends.append(node)
        elif node.target is not SEND:
            pending += node.users
    return ends


def _is_computed(node: fx.Node) -> bool:
    return node.target not in LAUNCHES and node.target not in UNPACKING

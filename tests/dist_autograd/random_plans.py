"""Random graphs: what each node does, on which worker, and how its result comes to who needs it.

Pure: a plan is drawn by hypothesis, and says nothing about RPC. random_runs.py runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

NUM_WORKERS = 3
LEAVES_A_WORKER = 2
SIDE = 2  # every value is a matrix of this size
MAX_NODES = 12
REACH = 4  # how far back a node's inputs lie: far enough to branch, near enough to go deep

# What a node does with its inputs. Those with "own" use a leaf of the worker that runs them.
ONE_INPUT = ["relu", "rows", "in place", "view in place", "twice", "detach"]
ONE_AND_OWN = ["own product", "own matmul", "own rows"]
TWO_INPUTS = ["add", "mul", "matmul", "cat"]
NO_INPUT = ["own leaf"]

# How the root asks for a node: with its own hands, by a call of each kind, or through a third worker.
WAYS = ["sync", "async", "remote", "nested", "proxy"]


@dataclass(frozen=True)
class Node:
    """`inputs` are numbers of earlier nodes, `leaf` is one of the worker's own."""

    op: str
    worker: int
    inputs: tuple[int, ...]
    leaf: int
    way: str
    via: int
    fetched_by: str  # "root": it fetches the value and sends it on; "user": the RRef is sent on


@dataclass(frozen=True)
class Plan:
    """Nodes in an order that can be run; the loss is the sum of those in `used`."""

    nodes: tuple[Node, ...]
    used: tuple[int, ...]
    passes: int

    def needed(self) -> set[int]:
        """The nodes that the loss depends on, through whatever."""
        needed = set(self.used)
        for number in reversed(range(len(self.nodes))):
            if number in needed:
                needed.update(self.nodes[number].inputs)
        return needed

    def without_the_unused(self) -> Plan:
        """The same loss, from a graph in which every result is used and takes a gradient.

        What a detach cuts off is left out too: a node in its place gives a leaf.
        """
        nodes = [
            node if node.op != "detach" else Node("own leaf", node.worker, (), node.leaf, *self._way(node))
            for node in self.nodes
        ]
        whole = Plan(tuple(nodes), self.used, self.passes)
        needed = sorted(whole.needed())
        place = {number: i for i, number in enumerate(needed)}
        kept = [
            Node(
                nodes[number].op,
                nodes[number].worker,
                tuple(place[each] for each in nodes[number].inputs),
                nodes[number].leaf,
                *self._way(nodes[number]),
            )
            for number in needed
        ]
        return Plan(tuple(kept), tuple(place[number] for number in self.used), self.passes)

    @staticmethod
    def _way(node: Node) -> tuple[str, int, str]:
        return node.way, node.via, node.fetched_by


@st.composite
def nodes(draw: Any, number: int) -> Node:
    ops = NO_INPUT if number == 0 else [*NO_INPUT, *ONE_INPUT, *ONE_AND_OWN, *TWO_INPUTS]
    op = draw(st.sampled_from(ops))
    num_inputs = 0 if op in NO_INPUT else 2 if op in TWO_INPUTS else 1
    workers = st.integers(0, NUM_WORKERS - 1)
    return Node(
        op,
        draw(workers),
        tuple(draw(st.integers(max(0, number - REACH), number - 1)) for _ in range(num_inputs)),
        draw(st.integers(0, LEAVES_A_WORKER - 1)),
        draw(st.sampled_from(WAYS)),
        draw(workers),
        draw(st.sampled_from(["root", "user"])),
    )


@st.composite
def plans(draw: Any) -> Plan:
    number = draw(st.integers(2, MAX_NODES))
    made = tuple(draw(nodes(i)) for i in range(number))
    used = draw(st.sets(st.integers(number // 2, number - 1), min_size=1, max_size=3))
    return Plan(made, tuple(sorted(used)), draw(st.integers(1, 2)))

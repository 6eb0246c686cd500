"""Graphs made by hand, written down line by line, and run without a group.

A run takes all ranks to have the same gradients: a sum is the number of ranks times what one sends. What a
collective brings is NaN until it was waited for, so a use that comes too early shows in the numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from weft.compiler import Bucket, Slot, Wire, enlist
from weft.compiler.graphs import WAIT, c10d
from weft.compiler.ops import MARK, REDUCE, owner_of

SIZE = 2  # ranks of every group
CPU = torch.device("cpu")
Lines = list[str]


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def slot(index: int, *shape: int, strides: tuple[int, ...] | None = None) -> Slot:
    return Slot(index, f"p{index}", shape, dense_strides(shape) if strides is None else strides)


def bucket(*slots: Slot, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Bucket:
    return Bucket(slots, dtype, device)


class HandOwner:
    """An owner that says its buckets, writes down what graphs ask of it, and reduces as a run does."""

    def __init__(self, label: str, *buckets: Bucket, **wire: Any) -> None:
        self.label = label
        self.params: list[tuple[int, torch.Tensor]] = []
        self.heard: Lines = []
        self.ends: list[torch.Tensor] = []
        self.marks = [torch.arange(1.0, len(one.slots) + 2).to(one.dtype) for one in buckets]
        self._buckets = buckets
        self._in_flight: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._placed: dict[tuple[int, int], torch.Tensor] = {}
        self.number = enlist(self)
        self.wire = Wire(self.number, f"group of {label}", SIZE, **wire).encode()

    def parameters(self) -> Iterable[tuple[int, torch.Tensor]]:
        return self.params

    def listen(self) -> None:
        self.heard.append("listen")

    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    def begin(self, order: Sequence[int]) -> list[torch.Tensor]:
        self.heard.append(f"begin {list(order)}")
        return [marks / SIZE for marks in self.marks]

    def end(self, reduced: Sequence[torch.Tensor]) -> None:
        self.heard.append("end")
        self.ends = [marks.clone() for marks in reduced]

    def open(self, order: Sequence[int]) -> None:
        self.heard.append(f"open {list(order)}")
        self._placed.clear()

    def place(self, bucket: int, at: int) -> tuple[torch.Tensor, float]:
        self.heard.append(f"place {at} of {bucket}")
        found = self._buckets[bucket].slots[at]
        lying = torch.empty_strided(found.shape, found.strides, dtype=self._buckets[bucket].dtype)
        return self._placed.setdefault((bucket, at), lying.fill_(torch.nan)), 1.0

    def send(self, bucket: int, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        self.heard.append(f"send {bucket}")
        inside = [self._placed.get((bucket, at), gradient) for at, gradient in enumerate(gradients)]
        ready = torch.cat([*self._flat(bucket, inside), self.marks[bucket]])
        flat = torch.full_like(ready, torch.nan)
        self._in_flight.append((flat, ready))
        return flat

    def _flat(self, bucket: int, gradients: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
        for place, gradient in zip(self._buckets[bucket].slots, gradients, strict=True):
            lying = torch.empty_strided(place.shape, place.strides).copy_(gradient)
            yield lying.as_strided((place.numel,), (1,))

    def receive(self) -> None:
        self.heard.append("receive")
        for flat, ready in self._in_flight:
            flat.copy_(ready)
        self._in_flight.clear()

    def leave(self) -> None:
        self.heard.append("leave")

    def reduce_one(self, gradient: torch.Tensor, index: int) -> torch.Tensor:
        self.heard.append(f"reduce {index}")
        return gradient.clone()


class Draft:
    """A graph under way. Its nodes know what they bring, as those of a compiler do."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._mode = FakeTensorMode()

    def given(
        self, name: str, *shape: int, strides: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> fx.Node:
        node = self.graph.placeholder(name)
        with self._mode:
            node.meta["val"] = torch.empty_strided(shape, strides or dense_strides(shape), dtype=dtype)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values, named = pytree.tree_map_only(fx.Node, lambda one: one.meta["val"], (args, kwargs))
        with self._mode:
            node.meta["val"] = target(*values, **named)
        return node

    def mark(self, owner: HandOwner, index: int, gradient: fx.Node) -> fx.Node:
        return self.call(MARK, gradient, owner.number, index, owner.wire)

    def reduce(self, owner: HandOwner, index: int, gradient: fx.Node) -> fx.Node:
        return self.call(REDUCE, gradient, owner.number, index, owner.wire)

    def give(self, *nodes: fx.Node) -> fx.Graph:
        self.graph.output(nodes)
        return self.graph


# Written down


def written(graph: fx.Graph) -> Lines:
    """Every node in order: `name = op(arguments)`. Without the names of inputs, owners by their labels."""
    named: dict[fx.Node, str] = {}
    used: Counter[str] = Counter()
    lines: Lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            named[node] = str(node.target)
            continue
        args = ", ".join(_write(arg, named) for arg in _told(node))
        if node.op == "output":
            lines.append(f"output{args}")
            continue
        op = _op(node.target)
        named[node] = f"{op}{used[op] or ''}"
        used[op] += 1
        lines.append(f"{named[node]} = {op}({args})")
    return lines


def _told(node: fx.Node) -> list[Any]:
    """Arguments without what a reader can't read: a wire, a schedule."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not str(schema).startswith("weft::"):
        return [*node.args, *node.kwargs.values()]
    kept = [(value, one.name) for value, one in zip(node.args, schema.arguments, strict=True)]
    return [
        owner_of(value).label if name == "owner" else value  # type: ignore[arg-type, attr-defined]
        for value, name in kept
        if name not in ("wire", "schedule")
    ]


def _write(arg: Any, named: dict[fx.Node, str]) -> str:
    if isinstance(arg, fx.Node):
        return named.get(arg, f"later({arg})")
    if isinstance(arg, list):
        return f"[{', '.join(_write(one, named) for one in arg)}]"
    if isinstance(arg, tuple):
        return f"({', '.join(_write(one, named) for one in arg)})"
    return str(arg)


def _op(target: Any) -> str:
    name = getattr(target, "_opname", None) or getattr(target, "__name__", str(target))
    return {"convert_element_type": "convert", "wait_tensor": "wait"}.get(name, name)


# Run


class _Run(fx.Interpreter):
    """Calls of collectives are played; all else runs as it is."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(nn.Module(), graph=graph)
        self._in_flight: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is c10d.all_reduce.default:
            return self._launch(args[0])
        if target is c10d.all_reduce_coalesced.default:
            return [self._launch(one) for one in args[0]]
        if target is WAIT:
            flat, ready = self._in_flight.pop(id(args[0]))
            return flat.copy_(ready)
        return super().call_function(target, args, kwargs)

    def _launch(self, sent: torch.Tensor) -> torch.Tensor:
        flat = torch.full_like(sent, torch.nan)
        self._in_flight[id(flat)] = flat, sent * SIZE
        return flat


def run(graph: fx.Graph, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """What a graph brings. Inputs are given in the order of its placeholders."""
    results = _Run(graph).run(*inputs)
    return [result.clone(memory_format=torch.preserve_format) for result in results]


def assert_same(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """To the bit; a NaN, which stands for what has not come yet, equals nothing."""
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)

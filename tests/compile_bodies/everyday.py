"""Compiled training in small: what every run does."""

from __future__ import annotations

from tests.compile_bodies.pairs import Pair, fresh


def steps(wrap: str, backend: str, fullgraph: bool) -> None:
    fresh()
    Pair(wrap=wrap, backend=backend, fullgraph=fullgraph, is_exact=backend != "inductor").train()

"""Which modules a plan's names mean. Pure: names in, matches out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeVar

T = TypeVar("T")
MAX_NEAR = 3  # names offered for one that matches nothing


@dataclass(frozen=True)
class Miss:
    """A name of a plan that matches no module."""

    name: str
    token: str  # the first part that doesn't match
    near: tuple[str, ...]  # names that are there, the most alike first

    def words(self, *, is_skipped: bool) -> str:
        """What to tell the user: torch's own words, and what may have been meant."""
        near = f" Did you mean {' or '.join(map(repr, self.near))}?" if self.near else ""
        end = ", skipping this plan entry" if is_skipped else ""
        return (
            f"Parallelize plan key '{self.name}' could not be resolved: no submodule matching token "
            f"'{self.token}'{end}.{near}"
        )


def plan_matches(plan: Mapping[str, T], names: Sequence[str]) -> tuple[list[tuple[str, str, T]], list[Miss]]:
    """For each name of the plan, in order, the modules that it means, and the names that mean none.

    `names` are the modules' qualified names. Parts between dots are matched one by one, with
    the wildcards of a shell; "" means the module itself.
    """
    matches: list[tuple[str, str, T]] = []
    misses: list[Miss] = []
    by_depth: dict[int, list[str]] = {}
    for name in names:
        by_depth.setdefault(name.count(".") + 1 if name else 0, []).append(name)
    for pattern, style in plan.items():
        tokens = pattern.split(".") if pattern else []
        found = [name for name in by_depth.get(len(tokens), []) if _fits(name, tokens)]
        matches += [(pattern, name, style) for name in found]
        if not found:
            misses.append(Miss(pattern, _first_missing(tokens, names), _near(pattern, names)))
    return matches, misses


def _fits(name: str, tokens: Sequence[str]) -> bool:
    parts = name.split(".") if name else []
    return all(fnmatchcase(part, token) for part, token in zip(parts, tokens, strict=True))


def _first_missing(tokens: Sequence[str], names: Iterable[str]) -> str:
    alive = [name.split(".") for name in names if name]
    for depth, token in enumerate(tokens):
        alive = [parts for parts in alive if len(parts) > depth and fnmatchcase(parts[depth], token)]
        if not alive:
            return token
    return tokens[-1] if tokens else ""


def _near(pattern: str, names: Sequence[str]) -> tuple[str, ...]:
    known = [name for name in names if name]
    # A wildcard is like any text: compare what is written around it.
    near = difflib.get_close_matches(pattern, known, n=MAX_NEAR, cutoff=0.5)
    if not near:
        last = pattern.rsplit(".", 1)[-1]
        near = [name for name in known if name.rsplit(".", 1)[-1] == last][:MAX_NEAR]
    return tuple(near)

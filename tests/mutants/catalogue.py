"""The catalogue of mutants: what is changed in weft's source, where, and what a user would suffer from it.

The entries are data, in catalogue/*.toml:

    [[mutant]]
    name = "ddp-mean-forgets-a-rank"
    file = "data_parallel/reducer.py"      # below src/weft
    kind = "wrong number"
    old = "buffer.div_(self.group_size)"   # exactly once in the file, or in the function that `within` names
    new = "buffer.div_(self.group_size - 1)"
    suffers = "Gradients are too large; training diverges or converges elsewhere, and nothing says so."

Optional: `within = "Reducer.finish"`; `reached_by = ["Reducer.finish"]` for lines outside functions, which
run at import (default: every function of the file); `needs_gpu = true` where nothing shows it on a CPU.

An entry must not be equivalent: some program of a user behaves differently, and a test could tell.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.probes import find_functions

CATALOGUE = Path(__file__).with_name("catalogue")
PACKAGE = Path(__file__).resolve().parents[2] / "src" / "weft"

KINDS = (
    "wrong number",  # a divisor, a size, a scale, an index
    "wrong operation",  # a sum for a mean, a reduce op, a comparison
    "off by one",  # a boundary of a shard, a bucket, a slice
    "skipped wait",  # a handle, an event, a barrier, a stream
    "lost work",  # a bucket, a parameter, a message, a hook that is left out
    "wrong order",  # of collectives, hooks, locks, buffers
    "stale state",  # something that is not reset, invalidated, released or freed
    "unseen failure",  # a death, an error, a timeout that nobody hears of
    "wrong error",  # another type, another rank, no name
    "check dropped",  # a user's mistake, a peer's lie that passes
    "lock dropped",  # what two threads or processes may do at once
    "wrong route",  # a path, a backend, a dtype, a rank that something goes to
)


class CatalogueError(ValueError):
    """An entry that doesn't fit the tree, or says too little."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    name: str
    file: str
    kind: str
    old: str
    new: str
    suffers: str
    within: str = ""
    reached_by: tuple[str, ...] = ()
    needs_gpu: bool = False

    @property
    def part(self) -> str:
        """The folder of weft it is in, or the file's own name."""
        return Path(self.file).parts[0].removesuffix(".py")

    @property
    def text(self) -> str:
        return (PACKAGE / self.file).read_text()

    @property
    def fingerprint(self) -> str:
        """Stays the same as long as a result holds: the file's text and the change."""
        return hashlib.sha256("\0".join((self.text, self.old, self.new)).encode()).hexdigest()[:16]

    def apply(self, text: str) -> str:
        """The file's text with the change."""
        at = self._find(text)
        return text[:at] + self.new + text[at + len(self.old) :]

    def changed_lines(self, text: str) -> set[int]:
        """The lines of the original that are changed; where lines are only added, those around them."""
        before, after = text.splitlines(), self.apply(text).splitlines()
        found: set[int] = set()
        for what, start, end, _, _ in difflib.SequenceMatcher(None, before, after, False).get_opcodes():
            if what == "insert":
                found |= {start, start + 1}
            elif what != "equal":
                found |= set(range(start + 1, end + 1))
        return found

    @property
    def line(self) -> int:
        """The first line of the change."""
        return min(self.changed_lines(self.text))

    def describe_change(self) -> str:
        """The change in one line: what is removed, what is put there."""
        before, after = self.text.splitlines(), self.apply(self.text).splitlines()
        lines = [line for line in difflib.ndiff(before, after) if line.startswith(("- ", "+ "))]
        return "; ".join(f"{line[0]} {' '.join(line[2:].split())}" for line in lines)

    def _find(self, text: str) -> int:
        start, end = 0, len(text)
        if self.within:
            functions = find_functions(ast.parse(text))
            if self.within not in functions:
                raise CatalogueError(f"{self.name}: {self.file} has no function {self.within}")
            first, last = functions[self.within]
            lines = text.splitlines(keepends=True)
            start, end = len("".join(lines[: first - 1])), len("".join(lines[:last]))
        if (count := text.count(self.old, start, end)) != 1:
            where = f"{self.file}, {self.within}" if self.within else self.file
            raise CatalogueError(f"{self.name}: the text is {count} times in {where}, and must be there once")
        return text.index(self.old, start, end)


def read_catalogue(folder: Path = CATALOGUE, pattern: str = "*.toml") -> list[Mutant]:
    """All mutants, in the order of the files."""
    mutants: list[Mutant] = []
    for path in sorted(folder.glob(pattern)):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            try:
                mutants.append(Mutant(**entry | {"reached_by": tuple(entry.get("reached_by", ()))}))
            except TypeError as error:
                raise CatalogueError(f"{path.name}: {entry.get('name', entry)}: {error}") from error
    return mutants


def check_mutant(mutant: Mutant) -> None:
    """Make sure that an entry applies to the tree, changes its meaning, and is still Python."""
    if mutant.kind not in KINDS:
        raise CatalogueError(f"{mutant.name}: '{mutant.kind}' is none of the kinds: {', '.join(KINDS)}")
    if not mutant.suffers.endswith("."):
        raise CatalogueError(f"{mutant.name}: `suffers` is a sentence")
    text = mutant.text
    try:
        after = ast.parse(mutant.apply(text))
    except SyntaxError as error:
        raise CatalogueError(f"{mutant.name}: not Python any more: {error}") from error
    functions = find_functions(ast.parse(text))
    if ast.dump(after) == ast.dump(ast.parse(text)):
        raise CatalogueError(f"{mutant.name}: nothing is changed but the layout or a comment")
    for name in mutant.reached_by:
        if name not in functions:
            raise CatalogueError(f"{mutant.name}: {mutant.file} has no function {name}")


def choose_mutants(mutants: Sequence[Mutant], names: Sequence[str]) -> list[Mutant]:
    """Those of these names, or of these parts; all where none is named."""
    known = {mutant.name for mutant in mutants} | {mutant.part for mutant in mutants}
    if unknown := [name for name in names if name not in known]:
        raise CatalogueError(f"no mutant and no part has the name {', '.join(unknown)}")
    return [mutant for mutant in mutants if not names or mutant.name in names or mutant.part in names]

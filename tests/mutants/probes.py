"""Probes: one call at the head of every block of weft's source, which tells the recorder that the block ran.

The syntax tree is changed and the text is not: what Python shows of the source, and every line number, stays.
A block is a run of statements that execute one after another; a new one begins in each branch and after each
compound statement. Lines outside functions have no probe: they run at import, whichever test comes first.

Invariant: the probes of a file are numbered by its text alone, so two copies of one tree agree.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType
from typing import Any

MARK = "_reach_mark"
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Compound = (
    ast.If | ast.For | ast.AsyncFor | ast.While | ast.Try | ast.TryStar | ast.With | ast.AsyncWith | ast.Match
)


@dataclass(frozen=True)
class Probe:
    """A block: the function it is in ("Reducer.finish.note") and the lines that are its own."""

    function: str
    lines: tuple[int, ...]


@dataclass(frozen=True)
class ProbedFile:
    """A file below src/weft: its probes have the numbers from `first` on."""

    path: str
    digest: str
    first: int
    probes: tuple[Probe, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> ProbedFile:
        probes = tuple(Probe(probe["function"], tuple(probe["lines"])) for probe in saved.pop("probes"))
        return cls(**saved, probes=probes)


def digest_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def probe_file(path: Path, name: str, first: int) -> tuple[ProbedFile, CodeType]:
    """The probes of one file, numbered from `first`, and its code with them."""
    text = path.read_text()
    tree = ast.parse(text, str(path))
    inserter = _Inserter(first)
    inserter.insert(tree)
    code = compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)
    return ProbedFile(name, digest_text(text), first, tuple(inserter.finish())), code


def find_functions(tree: ast.Module) -> dict[str, tuple[int, int]]:
    """The first and last line of every function, by its name as Probe.function has it."""
    found: dict[str, tuple[int, int]] = {}

    def walk(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = outer
            if isinstance(child, _Function | ast.ClassDef):
                name = f"{outer}.{child.name}" if outer else child.name
            if isinstance(child, _Function):
                # Of overloads, and of the getter and setter of a property, all lines.
                start, end = found.get(name, (child.lineno, 0))
                found[name] = (min(start, _first_line(child)), max(end, child.end_lineno or 0))
            walk(child, name)

    walk(tree, "")
    return found


def _first_line(node: _Function) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


class _Inserter:
    """Walks a tree, inserts calls, and notes which lines each of them stands for."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._functions: list[str] = []
        self._lines: list[set[int]] = []

    def finish(self) -> list[Probe]:
        return [
            Probe(function, tuple(sorted(lines)))
            for function, lines in zip(self._functions, self._lines, strict=True)
        ]

    def insert(self, tree: ast.Module) -> None:
        for node in tree.body:
            self._definitions(node, "")
        # After the docstring and the imports from __future__, which must come first.
        at = 0
        for index, node in enumerate(tree.body):
            if _is_docstring(node) or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
                at = index + 1
        alias = ast.alias("mark", MARK)
        tree.body.insert(at, ast.ImportFrom("weft._reach", [alias], 0))

    # -- where probes go ----------------------------------------------------------------

    def _definitions(self, node: ast.AST, outer: str) -> None:
        """Put probes into the functions and lambdas below a node that itself gets none."""
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node, outer)
            case ast.ClassDef():
                for child in node.body:
                    self._definitions(child, f"{outer}.{node.name}" if outer else node.name)
            case ast.Lambda():
                self._lambda(node, outer)
            case _:
                for child in ast.iter_child_nodes(node):
                    self._definitions(child, outer)

    def _function(self, node: _Function, outer: str) -> None:
        if any(_names_compiler(decorator) for decorator in node.decorator_list):
            return
        name = f"{outer}.{node.name}" if outer else node.name
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self._definitions(default, outer)
        start = 1 if _is_docstring(node.body[0]) else 0
        body = node.body[start:]
        if not body or all(_is_ellipsis(statement) for statement in body):
            return
        # The arguments' defaults are evaluated elsewhere, but show in what the function does.
        head = range(_first_line(node), body[0].lineno)
        node.body[start:] = self._block(body, name, head)

    def _lambda(self, node: ast.Lambda, outer: str) -> None:
        name = f"{outer}.<lambda>" if outer else "<lambda>"
        self._definitions(node.body, name)
        call = self._call(self._probe(name, _lines_of(node)))
        node.body = ast.BoolOp(ast.Or(), [call, node.body])  # the call returns None

    def _block(self, body: Sequence[ast.stmt], name: str, lines: Sequence[int] = ()) -> list[ast.stmt]:
        probe = self._probe(name, lines)
        out: list[ast.stmt] = [ast.Expr(self._call(probe))]
        for index, statement in enumerate(body):
            own = set(_lines_of(statement))
            if isinstance(statement, _Compound):
                own = self._compound(statement, name, own)
            elif isinstance(statement, _Function | ast.ClassDef):
                own = {statement.lineno}
                self._definitions(statement, name)
            else:
                self._definitions(statement, name)
            self._lines[probe - self._first] |= own
            out.append(statement)
            if isinstance(statement, _Compound) and index + 1 < len(body):
                probe = self._probe(name, ())
                out.append(ast.Expr(self._call(probe)))
        return out

    def _compound(self, node: ast.stmt, name: str, lines: set[int]) -> set[int]:
        """Put probes into the blocks of a statement; returns the lines of its heads."""
        own = set(lines)
        holders: list[ast.AST] = [node]
        holders += getattr(node, "handlers", []) + getattr(node, "cases", [])
        blocks: list[list[ast.stmt]] = []
        for holder in holders:
            for field, value in ast.iter_fields(holder):
                is_block = field in ("body", "orelse", "finalbody") and isinstance(value, list)
                if is_block and value:
                    own -= {line for statement in value for line in _lines_of(statement)}
                    blocks.append(value)
                elif isinstance(value, ast.expr):  # the head: a condition, what is iterated over
                    self._definitions(value, name)
        for block in blocks:
            block[:] = self._block(block, name)
        return own

    # -- probes -------------------------------------------------------------------------

    def _probe(self, name: str, lines: Sequence[int]) -> int:
        self._functions.append(name)
        self._lines.append(set(lines))
        return self._first + len(self._functions) - 1

    @staticmethod
    def _call(probe: int) -> ast.Call:
        return ast.Call(ast.Name(MARK, ast.Load()), [ast.Constant(probe)], [])


def _lines_of(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _is_ellipsis(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...


def _names_compiler(decorator: ast.expr) -> bool:
    """Whether the function's source is compiled by something else than Python: triton.jit, torch.jit."""
    return any(
        isinstance(node, ast.Attribute | ast.Name) and "jit" in ast.unparse(node)
        for node in ast.walk(decorator)
    )

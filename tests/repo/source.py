"""Read weft's source without running it: files, syntax trees, and what each file names.

The rules themselves are in the test files beside this one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "weft"


@dataclass(frozen=True)
class Source:
    """One Python file: its path below src/weft, and its text."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def package(self) -> str:
        """The dotted name that a relative import in this file starts from."""
        return ".".join(["weft", *Path(self.path).parts[:-1]])


@dataclass(frozen=True)
class Reference:
    """A dotted name that a file imports or reaches through an import, and the line where."""

    name: str
    line: int


def read_package() -> list[Source]:
    return [
        Source(str(path.relative_to(PACKAGE)), path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))
    ]


def find_imports(source: Source) -> list[Reference]:
    """List every import of a file, wherever it stands: in a function, under TYPE_CHECKING, as a literal.

    `from a import b` gives `a.b`: b may be a module, and a rule that knows only `a` matches the prefix.
    """
    return [reference for node in ast.walk(source.tree) for reference in _imports_of(node, source.package)]


def find_references(source: Source) -> list[Reference]:
    """List the imports of a file and the attributes it reaches through them, aliases resolved."""
    aliases = find_aliases(source)
    chains = [
        Reference(f"{aliases[chain[0]]}.{'.'.join(chain[1:])}", node.lineno)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and (chain := chain_of(node)) and chain[0] in aliases
    ]
    return find_imports(source) + chains


def _imports_of(node: ast.AST, package: str) -> Iterator[Reference]:
    match node:
        case ast.Import(names=names):
            for alias in names:
                yield Reference(alias.name, node.lineno)
        case ast.ImportFrom(names=names):
            for alias in names:
                yield Reference(f"{_resolve_module(node, package)}.{alias.name}", node.lineno)
        case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
            called = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", None)
            if called in ("import_module", "__import__"):
                yield Reference(name, node.lineno)


def _resolve_module(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parts = package.split(".")
    parents = parts[: len(parts) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])


def find_aliases(source: Source) -> dict[str, str]:
    """Map the names that a file binds by imports to what they are."""
    aliases: dict[str, str] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                # `import a.b` binds a; `import a.b as c` binds c to a.b.
                top = alias.name.split(".")[0]
                aliases[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                module = _resolve_module(node, source.package)
                aliases[alias.asname or alias.name] = f"{module}.{alias.name}"
    return aliases


def chain_of(node: ast.Attribute) -> list[str]:
    """Give `["a", "b", "c"]` for `a.b.c`, and nothing when the chain starts at a call or an index."""
    parts: list[str] = []
    at: ast.expr = node
    while isinstance(at, ast.Attribute):
        parts.append(at.attr)
        at = at.value
    return [at.id, *reversed(parts)] if isinstance(at, ast.Name) else []

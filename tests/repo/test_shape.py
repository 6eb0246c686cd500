"""Functions stay short, files are well named, and `__init__.py` only re-exports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.repo.source import Source, read_package

MAX_FUNCTION_LINES = 80

# A name that says nothing about what is inside collects what has no place.
EMPTY_NAMES = {"base", "common", "helper", "helpers", "misc", "util", "utils"}


def find_long_functions(sources: list[Source]) -> list[str]:
    """List functions past the limit, docstring counted and decorators not."""
    problems: list[str] = []
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    problems.append(f"{source.path}:{node.lineno}: {node.name} has {lines} lines")
    return problems


def find_empty_names(sources: list[Source]) -> list[str]:
    """List files and folders whose name, leading underscores aside, says nothing."""
    return [
        source.path
        for source in sources
        if any(part.removesuffix(".py").lstrip("_") in EMPTY_NAMES for part in Path(source.path).parts)
    ]


def find_work_in_init(sources: list[Source]) -> list[str]:
    """List statements of `__init__.py` files that are not a docstring, an import or `__all__`."""
    problems: list[str] = []
    for source in sources:
        if Path(source.path).name != "__init__.py":
            continue
        for index, node in enumerate(source.tree.body):
            match node:
                case ast.Import() | ast.ImportFrom():
                    continue
                # weft itself loads its names at first use: checkers read imports, and dir() the names.
                case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=[]) if are_imports(node.body):
                    continue
                case ast.Assign(targets=[ast.Name(id="__getattr__")], value=ast.Attribute()):
                    continue
                case ast.FunctionDef(name="__dir__"):
                    continue
                case ast.Expr(value=ast.Constant(value=str())) if index == 0:
                    continue
                case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List() | ast.Tuple()):
                    continue
            problems.append(f"{source.path}:{node.lineno}: {ast.unparse(node).splitlines()[0]}")
    return problems


def are_imports(body: list[ast.stmt]) -> bool:
    return all(isinstance(node, ast.Import | ast.ImportFrom) for node in body)


def test_no_function_is_too_long() -> None:
    assert find_long_functions(read_package()) == []


def test_every_name_says_something() -> None:
    assert find_empty_names(read_package()) == []


def test_init_files_only_re_export() -> None:
    assert find_work_in_init(read_package()) == []


@pytest.mark.parametrize("head", ["def f():\n", "async def f():\n", "class A:\n  def f(self):\n"])
def test_a_long_function_is_found(head: str) -> None:
    assert find_long_functions([Source("a.py", head + "    x = 1\n" * 79)]) == []
    assert len(find_long_functions([Source("a.py", head + "    x = 1\n" * 80)])) == 1


def test_an_empty_name_is_found() -> None:
    paths = [
        "utils.py",
        "comm/_common.py",
        "helpers/x.py",
        "comm/base.py",
        "comm/basement.py",
        "comm/group.py",
    ]
    assert find_empty_names([Source(path, "") for path in paths]) == paths[:4]


@pytest.mark.parametrize(
    "text",
    [
        "x = 1",
        "def f(): ...",
        "if TYPE_CHECKING:\n    x = 1",
        "import os\nos.fork()",
        "__all__ = find()",
        "import a\n'b'",
    ],
)
def test_work_in_init_is_found(text: str) -> None:
    assert len(find_work_in_init([Source("comm/__init__.py", text)])) == 1
    assert find_work_in_init([Source("comm/group.py", text)]) == []


def test_re_exports_pass() -> None:
    text = (
        '"""Say what."""\nfrom __future__ import annotations\nfrom .group import Group\n__all__ = ["Group"]\n'
    )
    assert find_work_in_init([Source("comm/__init__.py", text)]) == []

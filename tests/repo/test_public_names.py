"""Every public name resolves, stands in order, has a docstring and is documented."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import weft
from tests.repo.source import ROOT
from weft import first_use

Module = ModuleType | SimpleNamespace


def find_unresolved(module: Module) -> list[str]:
    return [name for name in module.__all__ if not hasattr(module, name)]


def find_undescribed(module: Module) -> list[str]:
    """List public classes, functions and modules that have no docstring of their own."""
    values = {name: getattr(module, name, None) for name in module.__all__}
    kinds = (inspect.isclass, inspect.isroutine, inspect.ismodule)
    return [name for name, value in values.items() if any(is_(value) for is_ in kinds) and not value.__doc__]


def order_of(name: str) -> tuple[int, str]:
    """Order names as ruff's RUF022 does: CONSTANTS, then Classes, then the rest."""
    if name.isupper() and len(name) > 1:
        return (0, name)
    return (1 if name[:1].isupper() else 2, name)


def find_undocumented(names: list[str], pages: list[str]) -> list[str]:
    """List names that no page shows as code: the same word in the prose does not count."""
    shown: set[str] = set()
    for page in pages:
        for code in re.findall(r"```.*?```|`[^`\n]+`", page, flags=re.DOTALL):
            shown.update(re.findall(r"\w+", code))
    return [name for name in names if name not in shown]


def read_pages() -> list[str]:
    pages: list[Path] = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page.read_text() for page in pages]


def test_there_are_public_names() -> None:
    assert "launch" in weft.__all__


def test_public_names_are_those_that_are_loaded_and_those_that_checkers_see() -> None:
    loaded = [name for names in first_use.HOMES.values() for name in names.split()]
    tree = ast.parse(Path(weft.__file__).read_text())
    seen = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    parts = [name for name, home in seen.items() if home == "weft"]
    assert sorted([*loaded, *parts, "__version__"]) == sorted(weft.__all__)
    assert {home: {*names.split()} for home, names in first_use.HOMES.items()} == {
        home: {name for name in seen if seen[name] == home} for home in {*seen.values()} - {"weft"}
    }


def test_every_public_name_resolves() -> None:
    assert find_unresolved(weft) == []


def test_public_names_are_in_order_and_unique() -> None:
    assert list(weft.__all__) == sorted(set(weft.__all__), key=order_of)


def test_every_public_name_has_a_docstring() -> None:
    assert find_undescribed(weft) == []


def test_every_public_name_is_documented() -> None:
    assert find_undocumented(list(weft.__all__), read_pages()) == []


def test_a_name_that_does_not_resolve_is_found() -> None:
    assert find_unresolved(SimpleNamespace(__all__=["a", "b"], a=1)) == ["b"]


def test_a_missing_docstring_is_found() -> None:
    class Described:
        """Has one, which its subclass does not inherit."""

    class Bare(Described):
        pass

    module = SimpleNamespace(
        __all__=["Described", "Bare", "f", "N"], Described=Described, Bare=Bare, f=lambda: 0, N=3
    )
    assert find_undescribed(module) == ["Bare", "f"]


def test_a_name_only_in_prose_is_undocumented() -> None:
    pages = ["Record it with `weft.launch(f)`.", "```python\nweft.init()\n```\nA Join of two."]
    assert find_undocumented(["launch", "init", "Join", "record"], pages) == ["Join", "record"]


def test_constants_come_before_classes_and_those_before_functions() -> None:
    assert sorted(["init", "Join", "CPU_ONLY", "comm", "CPUOffload"], key=order_of) == [
        "CPU_ONLY",
        "CPUOffload",
        "Join",
        "comm",
        "init",
    ]

"""Every Python block of docs/testing.md is a test file that passes."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import weft.testing

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def load_block(block: str, path: Path) -> ModuleType:
    path.write_text(block)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_tests(module: ModuleType) -> list[Callable[[], None]]:
    return [value for name, value in vars(module).items() if name.startswith("test_")]


@pytest.fixture
def block_path(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "a_block_of_the_page.py"
    yield path
    sys.modules.pop(path.stem, None)


@pytest.mark.threads
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: re.findall(r"def (test_\w+)", block)[0])
def test_a_block_of_the_page_passes(block: str, block_path: Path) -> None:
    tests = find_tests(load_block(block, block_path))
    assert tests
    for test in tests:
        test()


def test_a_block_that_is_wrong_is_found(block_path: Path) -> None:
    (test,) = find_tests(load_block("def test_x():\n    assert 1 == 2\n", block_path))
    with pytest.raises(AssertionError):
        test()


def test_the_page_shows_every_name_of_the_kit() -> None:
    shown = set(re.findall(r"\w+", " ".join(re.findall(r"```.*?```|`[^`\n]+`", PAGE, flags=re.DOTALL))))
    assert [name for name in weft.testing.__all__ if name not in shown] == []


def test_public_names_resolve_and_are_in_order() -> None:
    names = weft.testing.__all__
    assert [name for name in names if not hasattr(weft.testing, name)] == []
    assert names == sorted(set(names), key=lambda name: (not name.isupper(), not name[0].isupper(), name))

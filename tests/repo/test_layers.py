"""Imports inside weft point down the ladder."""

from __future__ import annotations

import textwrap

import pytest

from tests.repo.source import Source, find_imports, read_package

# Lowest first. A part may import what stands below its rung.
LADDER: list[set[str]] = [
    {"errors", "version", "first_use", "rank_thread"},
    {"torch_private"},
    {"trust"},
    {"comm", "local", "tensors", "autograd", "modules"},
    {"comm_hooks", "join"},
    {"data_parallel", "optimizers", "fsdp", "tensor_parallel", "rpc", "compiler"},
    {"dist_autograd"},
    {"launcher", "observe", "testing"},
    {"training"},
    {"planning"},
    {"__init__", "__main__"},
]

# And these of its own rung, or above it.
BESIDE: dict[str, set[str]] = {
    "comm": {"tensors"},
    "local": {"comm", "tensors"},
    "autograd": {"comm"},
    "modules": {"comm"},
    # How a feature comes into a compiled graph is its own to say; the passes know them all by one protocol.
    "data_parallel": {"compiler"},
    "fsdp": {"compiler"},
    "tensor_parallel": {"compiler"},
    "testing": {"launcher"},
    "__main__": {"__init__"},
}

RUNG = {part: rung for rung, parts in enumerate(LADDER) for part in parts}


def part_of_path(path: str) -> str:
    """Name the part of weft that a file belongs to: its top folder, or itself."""
    return path.split("/")[0].removesuffix(".py")


def part_of_import(name: str) -> str | None:
    """Name the part of weft that an import reaches; None for an import from elsewhere."""
    top, _, rest = name.partition(".")
    if top != "weft":
        return None
    part = rest.split(".")[0]
    # `from weft import launch` reaches a public name, so __init__.
    return part if part in RUNG else "__init__"


def find_upward_imports(sources: list[Source]) -> list[str]:
    problems: list[str] = []
    for source in sources:
        importer = part_of_path(source.path)
        if importer not in RUNG:
            problems.append(f"{source.path}: '{importer}' has no place on the ladder; give it one in LADDER")
            continue
        for reference in find_imports(source):
            imported = part_of_import(reference.name)
            if imported is None or imported == importer or imported in BESIDE.get(importer, set()):
                continue
            if RUNG[imported] >= RUNG[importer]:
                problems.append(f"{source.path}:{reference.line}: {importer} imports {reference.name}")
    return problems


def test_imports_point_down() -> None:
    assert find_upward_imports(read_package()) == []


def test_there_is_source_to_check() -> None:
    assert "errors.py" in [source.path for source in read_package()]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("comm/group.py", "import weft.local"),
        ("comm/group.py", "from weft import local"),
        ("comm/group.py", "from weft.local.board import Board"),
        ("comm/group.py", "from ..local import board"),
        ("comm/deep/group.py", "from ...local.board import Board"),
        ("comm/group.py", "def f():\n    from weft.fsdp import api"),
        ("comm/group.py", "if TYPE_CHECKING:\n    from weft.rpc.agent import Agent"),
        ("comm/group.py", "import importlib\nimportlib.import_module('weft.local')"),
        ("comm/group.py", "import weft"),
        ("comm/group.py", "from weft import launch"),
        ("errors.py", "from weft.comm import group"),
        ("errors.py", "from .comm import group"),
        ("tensors/flat.py", "import weft.autograd"),
        ("fsdp/api.py", "import weft.data_parallel"),
        ("launcher/api.py", "import weft.testing"),
        ("testing/pool.py", "import weft"),
        ("launcher/api.py", "import weft.__main__"),
        ("newcomer/x.py", "import os"),
    ],
)
def test_an_import_that_points_up_is_found(path: str, text: str) -> None:
    assert len(find_upward_imports([Source(path, text)])) == 1


def test_imports_that_point_down_pass() -> None:
    text = textwrap.dedent("""
        from __future__ import annotations
        import weft.errors
        from weft.comm import group
        from weft.errors import ConfigError
        from . import board
        from .board import Board
        import torch.distributed as dist
        import weftlike
    """)
    assert find_upward_imports([Source("local/group.py", text)]) == []


def test_the_top_may_import_everything() -> None:
    text = "from weft.launcher import launch\nfrom weft.comm import record\nfrom . import testing, training"
    assert find_upward_imports([Source("__init__.py", text), Source("__main__.py", text)]) == []

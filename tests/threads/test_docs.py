"""The Python blocks of the documents run as they stand."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (
    "comm_hooks.md",
    "communication.md",
    "data_parallel.md",
    "dist_autograd.md",
    "fully_shard.md",
    "join.md",
    "launch.md",
    "local_group.md",
    "optimizers.md",
    "remote_module.md",
    "rpc.md",
    "tensor_parallel.md",
)
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(block: str, tmp_path: Path) -> None:
    path = tmp_path / "block.py"
    path.write_text(block)
    runpy.run_path(str(path), run_name="__main__")


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    pages = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert [page for page in sorted(pages) if page not in index] == []

"""The Python blocks of the documents run as they stand.

Those of testing.md are test files: tests/testing/test_docs.py runs them. The README's are in
tests/repo/test_readme.py, and so is what the documents show of commands.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pooled import run_script

DOCS = Path(__file__).parents[2] / "docs"
TESTED_ELSEWHERE = {"testing.md"}
PAGES = [path for path in sorted(DOCS.glob("*.md")) if path.name not in TESTED_ELSEWHERE]
FEATURES = (
    "activation_checkpointing.md",
    "comm_hooks.md",
    "communication.md",
    "compile.md",
    "data_loading.md",
    "data_parallel.md",
    "dist_autograd.md",
    "fully_shard.md",
    "gpus_and_hosts.md",
    "join.md",
    "launch.md",
    "local_group.md",
    "notebook.md",
    "optimizers.md",
    "plan.md",
    "remote_module.md",
    "report.md",
    "rpc.md",
    "saving_and_loading.md",
    "tensor_parallel.md",
    "train.md",
    "with_other_libraries.md",
)


def find_blocks(path: Path) -> list[str]:
    """The scripts of a page: its Python blocks, or all of them together where the page says so."""
    page = path.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    return ["\n".join(blocks)] if "The blocks of this page are one script" in page else blocks


BLOCKS = [
    pytest.param(block, id=f"{path.name}-{number}")
    for path in PAGES
    for number, block in enumerate(find_blocks(path))
]
# A block with tests in it is a test file as well.
CALL_TESTS = """
for _name, _test in list(globals().items()):
    if _name.startswith("test_"):
        _test()
"""


@pytest.mark.threads
@pytest.mark.processes
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "block.py"
    path.write_text(block + CALL_TESTS)
    monkeypatch.chdir(tmp_path)  # for what a block writes
    run_script(path, monkeypatch)


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_every_block_says_what_it_is(path: Path) -> None:
    fences = re.findall(r"^ *```.*$", path.read_text(), flags=re.MULTILINE)
    opening = [fence for fence in fences[::2] if fence not in ("```python", "```bash", "```diff", "```text")]
    assert opening == []
    assert [fence for fence in fences[1::2] if fence != "```"] == []


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_what_is_called_text_is_no_python(path: Path) -> None:
    for block in re.findall(r"^```text\n(.*?)^```", path.read_text(), flags=re.DOTALL | re.MULTILINE):
        with pytest.raises(SyntaxError):
            compile(block, path.name, "exec")


@pytest.mark.parametrize("name", FEATURES)
def test_a_page_of_a_feature_says_how_it_fails(name: str) -> None:
    heads = re.findall(r"^## (.*)$", (DOCS / name).read_text(), flags=re.MULTILINE)
    assert [head for head in heads if re.match(r"How it fails$|When (it|a rank|ranks) ", head)]


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    pages = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert [page for page in sorted(pages) if page not in index] == []

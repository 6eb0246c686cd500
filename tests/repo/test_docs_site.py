"""The docs site: every page is on it, links lead somewhere, and the reference has what users are shown."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import weft
from scripts.docs_site import check_links, pages, reference
from tests.repo.commands import find_blocks
from tests.repo.source import ROOT

DOCS = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [
    *DOCS,
    *(ROOT / path for path in pages.DOCUMENTS if not path.startswith("docs/") and (ROOT / path).exists()),
]
MKDOCS = (ROOT / "scripts" / "docs_site" / "mkdocs.yml").read_text()


def find_named(page: str) -> set[str]:
    """The dotted names of weft in a page's code: in its blocks, what they import, and in code spans."""
    code = [*find_blocks(page, "python"), *re.findall(r"`([^`\n]+)`", page)]
    named = {
        name for text in code for name in re.findall(r"(?<![\w./-])weft(?:\.[A-Za-z_]\w*)+(?![\w/])", text)
    }
    for block in find_blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "weft":
                named |= {f"{node.module}.{alias.name}" for alias in node.names}
    return named


def find_anchors(page: str) -> set[str]:
    """What a page's headings are called in links: as GitHub does, and the site too."""
    prose = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    heads = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads}


def find_broken_anchors(path: Path) -> list[str]:
    broken: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+\.md#[^)\s]+|#[^)\s]+)\)", path.read_text()):
        file, _, anchor = target.partition("#")
        where = path.parent / file if file else path
        if "://" not in target and anchor not in find_anchors(where.read_text()):
            broken.append(target)
    return broken


# -- pages ---------------------------------------------------------------------------


def test_every_page_is_in_the_index_and_in_the_navigation() -> None:
    linked = pages.find_linked((ROOT / "docs" / "README.md").read_text(), "docs/README.md")
    names = {path.name for path in DOCS} - {"README.md"}
    assert sorted(name for name in names if f"docs/{name}" not in linked) == []
    assert (
        sorted(name for name in names if not re.search(rf": {re.escape(name)}$", MKDOCS, re.MULTILINE)) == []
    )


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_anchors_are_there(path: Path) -> None:
    assert find_broken_anchors(path) == []


def test_a_missing_anchor_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# `Join`: it's\n```bash\n# no head\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "## A part\n[a](#a-part) [b](other.md#join-its) [c](#b-part) [d](other.md#no-head) [e](x.md)\n"
    )
    assert find_broken_anchors(page) == ["#b-part", "other.md#no-head"]


@pytest.mark.parametrize(
    ("path", "link", "expected"),
    [
        ("docs/join.md", "launch.md#x", "launch.md#x"),
        ("docs/join.md", "../src/weft/errors.py", "source/src/weft/errors.py.md"),
        ("docs/join.md", "README.md", "contents.md"),
        ("docs/join.md", "../README.md", "index.md"),
        ("docs/join.md", "../examples", "source/examples/index.md"),
        ("docs/join.md", "#x", "#x"),
        ("docs/join.md", "https://x.y", "https://x.y"),
        ("README.md", "docs/join.md", "join.md"),
        ("README.md", "LICENSE", "source/LICENSE.md"),
        ("benchmarks/results/SUMMARY.md", "../../README.md", "index.md"),
    ],
)
def test_links_lead_to_pages_of_the_site(path: str, link: str, expected: str) -> None:
    assert pages.rewrite_links(f"See [`a`]({link}).", path) == f"See [`a`]({expected})."


def test_links_in_code_are_left_alone() -> None:
    text = "`[a](b.md)`\n```python\nx[a](b.md)\n```\n"
    assert pages.rewrite_links(text, "README.md") == text
    assert pages.find_linked(text, "README.md") == set()


def test_listings_are_made_of_what_is_linked() -> None:
    found = pages.find_sources(["README.md", "docs/quickstart.md"], ["src/weft/errors.py"])
    assert {"LICENSE", "examples", "examples/ddp.py", "src/weft/errors.py"} <= set(found)
    assert not any(path.startswith("docs/") for path in found)
    assert "ddp.py: Data parallel by hand" in pages.make_listing("examples").replace(
        "[ddp.py](ddp.py.md)", "ddp.py"
    )
    assert pages.make_listing("src/weft/errors.py").endswith("\n```\n")


def test_a_fence_is_longer_than_those_inside() -> None:
    assert pages.fence("```bash\nx\n```", "markdown") == "````markdown\n```bash\nx\n```\n````\n"
    assert pages.fence("x\n", "text") == "```text\nx\n```\n"


# -- the reference -------------------------------------------------------------------


def test_every_entry_is_what_users_import() -> None:
    entries = [*reference.list_top_level()]
    for namespace in reference.NAMESPACES:
        entries += reference.list_entries(namespace)
        entries += [entry for _, found in reference.list_parts(namespace) for entry in found]
    assert len(entries) > 150
    for entry in entries:
        module, _, name = entry.name.rpartition(".")
        defined = getattr(importlib.import_module(entry.module), entry.qualname)
        assert getattr(importlib.import_module(module), name) is defined, entry


def test_every_public_name_is_described() -> None:
    assert [name for name in weft.__all__ if not reference.is_described(f"weft.{name}")] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_names_that_pages_show_are_described(path: Path) -> None:
    named = [name for name in find_named(path.read_text()) if not reference.is_module(name)]
    assert sorted(name for name in named if not reference.is_described(name)) == []


def test_names_of_weft_itself_are_described_once() -> None:
    described = [
        entry.path for namespace in reference.NAMESPACES for entry in reference.list_entries(namespace)
    ]
    assert len(described) == len(set(described))
    assert {entry.path for entry in reference.list_top_level()} <= set(described)


def test_what_is_internal_is_there() -> None:
    for namespace in reference.NAMESPACES:
        exported = set(importlib.import_module(namespace.name).__all__) if namespace.internal else set()
        assert namespace.internal <= exported, namespace.name


def test_what_is_not_described_is_found() -> None:
    assert reference.is_described("weft.comm.all_reduce")
    assert reference.is_described("weft.fully_shard.state")
    assert reference.is_described("weft.comm_hooks.default_hooks.fp16_compress_hook")
    for name in (
        "weft.nothing",
        "weft.comm.nothing",
        "weft.comm.cut",
        "weft.shm",
        "weft.comm_hooks.saved.restore",
    ):
        assert not reference.is_described(name), name


def test_names_are_read_from_blocks_imports_and_spans() -> None:
    block = "```python\nfrom weft.join import Join\nweft.launch(f)\n```\n"
    page = f"`weft.init()`, `src/weft/errors.py`, weft.no\n{block}"
    assert find_named(page) == {"weft.init", "weft.join", "weft.join.Join", "weft.launch"}


# -- the built site ------------------------------------------------------------------


def test_broken_links_of_the_site_are_found(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.html").write_text(
        '<h1 id="part">C</h1><a href="../a.html#no">a</a><img src="gone.png">'
    )
    (tmp_path / "a.html").write_text(
        '<a href="b/c.html#part"></a><a href="b/c.html?x#gone"></a><a href="gone.html"></a>'
        '<a href="#me" id="me"></a>'
        '<a href="https://x.y"></a><script src="https://x.y/z.js"></script><a href="mailto:a@b"></a>'
    )
    assert check_links.find_faults(tmp_path) == [
        "a.html: loads https://x.y/z.js from elsewhere",
        "a.html: b/c.html?x#gone: there is no such anchor",
        "a.html: gone.html: there is no such file",
        "b/c.html: ../a.html#no: there is no such anchor",
        "b/c.html: gone.png: there is no such file",
    ]

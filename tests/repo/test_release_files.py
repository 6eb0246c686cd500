"""CHANGELOG.md and CITATION.cff speak of the version that the tree is, and weft requires what it imports."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions

from ruamel.yaml import YAML

from tests.repo.source import ROOT, Source, find_imports, read_package
from tests.repo.test_checks import check_schema
from weft.version import __version__

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Builds of torch for GPUs bring it, and the file that imports it is for GPUs.
COMES_WITH_TORCH = {"triton"}


def find_packages(sources: Iterable[Source]) -> set[str]:
    """The names of others' packages that files import, anywhere in them."""
    names = {reference.name.split(".")[0] for source in sources for reference in find_imports(source)}
    return names - sys.stdlib_module_names - {"weft", "weft_cli", ""}


def find_releases(changelog: str) -> list[tuple[str, str]]:
    """The versions of a changelog with their dates, newest first."""
    return re.findall(r"^## (\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)$", changelog, flags=re.MULTILINE)


def test_the_changelog_has_the_form_it_names() -> None:
    headings = re.findall(r"^## (.*)$", CHANGELOG, flags=re.MULTILINE)
    releases = find_releases(CHANGELOG)
    assert headings == ["Unreleased", *(f"{version} - {date}" for version, date in releases)]
    assert releases == sorted(releases, reverse=True, key=lambda release: release[1])
    assert set(re.findall(r"^### (.*)$", CHANGELOG, flags=re.MULTILINE)) <= KINDS


def test_the_version_is_the_newest_release_or_on_the_way_to_the_next() -> None:
    newest = find_releases(CHANGELOG)[0][0]
    assert __version__ == newest or "dev" in __version__


def test_the_citation_is_valid_and_of_the_newest_release() -> None:
    path = ROOT / "CITATION.cff"
    assert check_schema("vendor.citation-file-format", path) == ""
    citation = YAML(typ="safe", pure=True).load(path)
    newest, date = find_releases(CHANGELOG)[0]
    assert (citation["version"], str(citation["date-released"])) == (newest, date)


def test_the_version_is_said_in_one_place() -> None:
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["hatch"]["version"] == {"path": "src/weft/version.py"}


def test_what_is_imported_is_required_and_the_other_way_round() -> None:
    required = {re.split(r"[<>=~! ]", text)[0] for text in PROJECT["project"]["dependencies"]}
    distributions = packages_distributions()
    imported = find_packages(read_package()) - COMES_WITH_TORCH
    by_distribution = {name: required & {*distributions.get(name, ())} for name in imported}
    assert [name for name, found in by_distribution.items() if not found] == []
    assert required == set().union(*by_distribution.values())


def test_a_package_that_only_a_function_imports_is_found() -> None:
    text = "import os\nimport weft.comm\nfrom . import beside\ndef draw():\n    from rich.table import Table"
    assert find_packages([Source("training/progress.py", text)]) == {"rich"}

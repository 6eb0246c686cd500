"""What the README and the documents show is true: commands, links, and what the example prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.commands import (
    find_blocks,
    find_broken_commands,
    find_broken_programs,
    find_commands,
    find_scripts,
    find_subcommands,
    why_broken,
)
from tests.repo.source import ROOT

README = (ROOT / "README.md").read_text()
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MAX_README_LINES = 149


def find_broken_links(page: str, folder: Path) -> list[str]:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page) if "://" not in link]
    return [link for link in links if link and not (folder / link).exists()]


def find_promised_output(example: str) -> str:
    """Read what an example says it prints: the comment after each print."""
    return "".join(
        f"{line}\n" for line in re.findall(r"^ *print\(.*\)  # (.*)$", example, flags=re.MULTILINE)
    )


def test_the_two_commands_are_there() -> None:
    assert find_commands(README)[:2] == ["scripts/demo", "scripts/test"]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_exist_and_their_options_parse(path: Path) -> None:
    page = path.read_text()
    assert find_broken_programs(page, ROOT) == []
    assert find_broken_commands(page) == {}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_scripts_parse(path: Path) -> None:
    for script in find_scripts(path.read_text()):
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert done.stderr == ""


def test_commands_of_weft_that_are_named_exist() -> None:
    named = {name for path in PAGES for name in find_subcommands(path.read_text())}
    assert named >= {"train", "report"}
    assert {name: reason for name in named if (reason := why_broken(["weft", name, "--help"]))} == {}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    assert find_broken_links(path.read_text(), path.parent) == []


@pytest.mark.parametrize("example", find_blocks(README, "python"))
def test_the_example_prints_what_it_says(example: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == find_promised_output(example) != ""


def test_a_missing_program_is_found(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name, mode in [("run", 0o755), ("data", 0o644)]:
        (tmp_path / "scripts" / name).touch(mode=mode)
    page = "Try `scripts/gone now`.\n```bash\nscripts/run -x  # fine\nscripts/data\npip install x\n```\n"
    assert find_broken_programs(page, tmp_path) == ["scripts/data", "scripts/gone now"]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("weft train --ranks 2 --strategy ddp", ""),
        ("weft train --ranks two", "invalid int value: 'two'"),
        ("weft train --strategy none", "invalid choice: 'none'"),
        ("weft fly", "invalid choice: 'fly'"),
        ("python -m weft train --fast", "unrecognized arguments: --fast"),
        ("scripts/bench --all --quick", ""),
        ("scripts/bench collectives --rounds 3", ""),
        ("scripts/bench --fast", "unrecognized arguments: --fast"),
        ("scripts/bench nothing", "there is no benchmark 'nothing'"),
        ("scripts/check --fast", "scripts/check takes ['--fix', '--list',"),
        ("scripts/conformance --target mars", "invalid choice: 'mars'"),
        ("X=1 torchrun --nproc-per-node 2 examples/ddp.py", ""),
        ("torchrun --nproc-per-nod 2 examples/gone.py", "there is no file examples/gone.py"),
        ("torchrun --fast examples/ddp.py", "unrecognized arguments: --fast"),
        ("torchrun --nnodes 2 -m weft train --fast", "unrecognized arguments: --fast"),
        ("python examples/gone.py", "there is no file examples/gone.py"),
        ("fly", "there is no fly"),
    ],
)
def test_a_broken_command_is_found(command: str, reason: str) -> None:
    found = why_broken(command.split())
    assert reason in found
    assert bool(reason) == bool(found)


def test_a_script_is_no_list_of_commands() -> None:
    script = "#!/usr/bin/env bash\nif fly; then\n    echo\nfi\n"
    page = f"```bash\n{script}```\n```bash\nscripts/test  # all\n```\n"
    assert find_scripts(page) == [script]
    assert find_commands(page) == ["scripts/test"]


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "here.md").touch()
    page = "[a](here.md) [b](here.md#part) [c](gone.md) [d](https://example.com) [e](#part)"
    assert find_broken_links(page, tmp_path) == ["gone.md"]


def test_promised_output_is_read_from_comments() -> None:
    assert find_promised_output("x = 1  # no\nprint(x)  # 1\nif x:\n    print([x])  # [1]\n") == "1\n[1]\n"

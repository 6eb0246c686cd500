"""What the README shows is true: its commands and links exist, its example prints what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.source import ROOT

README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def find_blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)


def find_commands(page: str) -> list[str]:
    """List the commands of a page: lines of its bash blocks, and code spans that start like one."""
    lines = [
        line.partition("#")[0].strip() for block in find_blocks(page, "bash") for line in block.splitlines()
    ]
    spans = re.findall(r"`((?:scripts/|\.ci/)[^`\n]+)`", page)
    return [command for command in lines + spans if command]


def find_broken_commands(page: str, root: Path) -> list[str]:
    """List commands whose program is a file of the repository and is missing or not executable."""
    broken: list[str] = []
    for command in find_commands(page):
        program = command.split()[0]
        if "/" in program and not (os.access(root / program, os.X_OK) and (root / program).is_file()):
            broken.append(command)
    return broken


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


@pytest.mark.parametrize("page", [README, CONTRIBUTING], ids=["README", "CONTRIBUTING"])
def test_commands_exist(page: str) -> None:
    assert find_broken_commands(page, ROOT) == []


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=str
)
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


def test_a_broken_command_is_found(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name, mode in [("run", 0o755), ("data", 0o644)]:
        (tmp_path / "scripts" / name).touch(mode=mode)
    page = "Try `scripts/gone now`.\n```bash\nscripts/run -x  # fine\nscripts/data\npip install x\n```\n"
    assert find_broken_commands(page, tmp_path) == ["scripts/data", "scripts/gone now"]


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "here.md").touch()
    page = "[a](here.md) [b](here.md#part) [c](gone.md) [d](https://example.com) [e](#part)"
    assert find_broken_links(page, tmp_path) == ["gone.md"]


def test_promised_output_is_read_from_comments() -> None:
    assert find_promised_output("x = 1  # no\nprint(x)  # 1\nif x:\n    print([x])  # [1]\n") == "1\n[1]\n"

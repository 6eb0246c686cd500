"""pre-commit and GitHub's workflows run what scripts/check, .ci/run and scripts/nightly run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.repo.source import ROOT
from tests.repo.test_matrix import matrix

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read_yaml(path: Path) -> Any:
    return YAML(typ="safe", pure=True).load(path)


def find_steps(workflow: Path) -> Iterator[dict[str, Any]]:
    for job in read_yaml(workflow)["jobs"].values():
        yield from job["steps"]


def find_commands(workflow: Path) -> list[str]:
    """The commands of a workflow's steps."""
    return [step["run"] for step in find_steps(workflow) if "run" in step]


def check_schema(schema: str, *paths: Path) -> str:
    """What is wrong with files by a schema that check-jsonschema carries with it; nothing if all is well."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def list_checks() -> dict[str, str]:
    done = subprocess.run([ROOT / "scripts" / "check", "--list"], capture_output=True, text=True, check=True)
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def test_pre_commit_makes_the_same_checks() -> None:
    (repository,) = read_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local", "another repository would bring versions of its own"
    hooks = {hook["id"]: hook for hook in repository["hooks"]}
    assert list(hooks) == list(list_checks())
    for name, hook in hooks.items():
        assert hook["entry"] == f"scripts/check {name}"
        assert hook["language"] == "system"
        assert hook["pass_filenames"] is False


def test_a_check_that_is_not_there_is_an_error() -> None:
    done = subprocess.run([ROOT / "scripts" / "check", "typos"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no check 'typos'" in done.stderr


def test_workflows_fit_their_schema_and_end() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "nightly.yml"]
    assert check_schema("vendor.github-workflows", *WORKFLOWS) == ""
    assert check_schema("custom.github-workflows-require-timeout", *WORKFLOWS) == ""


def test_a_workflow_that_does_not_fit_is_found(tmp_path: Path) -> None:
    workflow = tmp_path / "ci.yml"
    workflow.write_text(WORKFLOWS[0].read_text().replace("runs-on:", "run-on:", 1))
    assert "run-on" in check_schema("vendor.github-workflows", workflow)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_a_commit(workflow: Path) -> None:
    used = [step["uses"] for step in find_steps(workflow) if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name)] == []


def test_ci_runs_what_its_script_runs() -> None:
    script = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("scripts/")]
    commands = [command.removeprefix("sudo ") for command in find_commands(WORKFLOWS[0])]
    assert sorted(commands) == sorted(script)


def test_the_nightly_workflow_runs_every_part_and_every_version() -> None:
    jobs = read_yaml(WORKFLOWS[1])["jobs"]
    assert list(jobs) == ["full", "matrix", "gpu"]
    for part in ("full", "gpu"):
        assert f"scripts/nightly {part}" in find_commands(WORKFLOWS[1])
    assert jobs["gpu"]["if"] == "vars.GPU_RUNNER == 'true'"
    rows = jobs["matrix"]["strategy"]["matrix"]
    versions = {(torch, python) for torch in rows["torch"] for python in rows["python"]}
    versions |= {(row["torch"], row["python"]) for row in rows["include"]}
    chosen = matrix.choose_versions(Namespace(torch=None, python=None))
    assert versions == {(version.torch, version.python) for version in chosen}


# -- scripts/nightly, on scripts that only say that they ran ---------------------------


@pytest.fixture
def nightly(tmp_path: Path) -> Path:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copy(ROOT / "scripts" / "nightly", scripts)
    write_script(scripts / "test", 'echo "test $*"')
    write_script(scripts / "matrix", 'echo "matrix $*"')
    (scripts / "environment.sh").write_text("use_environment() { python=scripts/python; }\n")
    write_script(scripts / "python", "exit 0")
    return scripts


def write_script(path: Path, text: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def run_nightly(scripts: Path, *parts: str) -> tuple[int, list[str]]:
    """Its exit status, and what it prints without the times."""
    done = subprocess.run([scripts / "nightly", *parts], capture_output=True, text=True, check=False)
    return done.returncode, re.sub(r" +\d+ s$", "", done.stdout, flags=re.MULTILINE).splitlines()


def test_nightly_runs_all_parts(nightly: Path) -> None:
    assert run_nightly(nightly) == (
        0,
        [
            "== scripts/test --full -m not(gpu)",
            "test --full -m not(gpu)",
            "== scripts/matrix",
            "matrix ",
            "== scripts/test --full -m gpu",
            "test --full -m gpu",
            "",
            "full     passed",
            "matrix   passed",
            "gpu      passed",
        ],
    )


def test_nightly_goes_on_after_a_failure_and_says_so(nightly: Path) -> None:
    write_script(nightly / "test", "exit 7")
    status, lines = run_nightly(nightly)
    assert status == 1
    assert lines[-3:] == ["full     failed (7)", "matrix   passed", "gpu      failed (7)"]


def test_nightly_leaves_the_gpu_out_where_there_is_none(nightly: Path) -> None:
    write_script(nightly / "python", "exit 3")
    status, lines = run_nightly(nightly)
    assert (status, lines[-1]) == (0, "gpu      no GPU")
    assert "test --full -m gpu" not in lines
    status, lines = run_nightly(nightly, "gpu")
    assert (status, lines[-1]) == (1, "gpu      failed (3)")


def test_nightly_does_not_take_a_broken_environment_for_a_missing_gpu(nightly: Path) -> None:
    write_script(nightly / "python", "exit 1")
    status, lines = run_nightly(nightly)
    assert (status, lines[-1]) == (1, "gpu      failed (1)")

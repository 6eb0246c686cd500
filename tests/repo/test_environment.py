"""The environment is made once, follows its inputs, and survives interruption and company."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.repo.source import ROOT


def load_script() -> ModuleType:
    # scripts/ is not a package: it has to run before anything is installed.
    spec = importlib.util.spec_from_file_location("environment", ROOT / "scripts" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


environment = load_script()
Environment = environment.Environment


class FakePip:
    """Stands for pip and for making the venv: notes what was asked, fails when told to."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.failing = False

    def __call__(self, environment: Any, extras: Sequence[str], lock: int) -> None:
        self.asked.append(list(extras))
        if self.failing:
            raise KeyboardInterrupt
        (environment.where / "package").touch()


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in environment.INPUTS:
        (tmp_path / name).write_text("one")
    monkeypatch.setattr(environment.venv, "create", lambda where, with_pip: None)
    return tmp_path


@pytest.fixture
def pip() -> FakePip:
    return FakePip()


def test_installs_once(root: Path, pip: FakePip) -> None:
    environment.ensure_environment(Environment(root), ["dev"], pip)
    environment.ensure_environment(Environment(root), ["dev"], pip)
    environment.ensure_environment(Environment(root), [], pip)
    assert pip.asked == [["dev"]]


@pytest.mark.parametrize("name", environment.INPUTS)
def test_installs_again_when_an_input_changed(root: Path, pip: FakePip, name: str) -> None:
    environment.ensure_environment(Environment(root), ["dev"], pip)
    (root / name).write_text("two")
    environment.ensure_environment(Environment(root), ["dev"], pip)
    assert pip.asked == [["dev"], ["dev"]]


def test_installs_again_when_the_repository_moved(root: Path, pip: FakePip) -> None:
    environment.ensure_environment(Environment(root), ["dev"], pip)
    moved = root.rename(root.with_name("moved"))
    environment.ensure_environment(Environment(moved), ["dev"], pip)
    assert len(pip.asked) == 2


def test_extras_add_up(root: Path, pip: FakePip) -> None:
    environment.ensure_environment(Environment(root), ["dev"], pip)
    environment.ensure_environment(Environment(root), ["bench"], pip)
    environment.ensure_environment(Environment(root), ["dev"], pip)
    assert pip.asked == [["dev"], ["bench", "dev"]]


def test_starts_over_after_an_interruption(root: Path, pip: FakePip) -> None:
    environment.ensure_environment(Environment(root), ["dev"], pip)
    (root / ".venv" / "left over").touch()
    pip.failing = True
    (root / "constraints.txt").write_text("two")
    with pytest.raises(KeyboardInterrupt):
        environment.ensure_environment(Environment(root), ["dev"], pip)
    pip.failing = False
    # Back to the first inputs: the old stamp must not vouch for what the interrupted install left.
    (root / "constraints.txt").write_text("one")
    environment.ensure_environment(Environment(root), ["dev"], pip)
    assert len(pip.asked) == 3
    assert not (root / ".venv" / "left over").exists()


def test_keeps_an_environment_made_by_hand(root: Path, pip: FakePip) -> None:
    (root / ".venv").mkdir()
    (root / ".venv" / "by hand").touch()
    environment.ensure_environment(Environment(root), ["dev"], pip)
    assert pip.asked == [["dev"]]
    assert (root / ".venv" / "by hand").exists()


def test_makes_a_new_one_when_its_python_is_gone(root: Path, pip: FakePip) -> None:
    environment.ensure_environment(Environment(root), ["dev"], pip)
    (root / ".venv" / "bin").mkdir()
    (root / ".venv" / "bin" / "python").symlink_to(root / "no such python")
    environment.ensure_environment(Environment(root), ["dev"], pip)
    assert len(pip.asked) == 2
    assert not (root / ".venv" / "bin").exists()


def test_two_at_once_install_once(root: Path) -> None:
    asked: list[str] = []
    installing = threading.Event()
    proceed = threading.Event()

    def slow(environment: Any, extras: Sequence[str], lock: int) -> None:
        asked.append("install")
        installing.set()
        assert proceed.wait(timeout=30)

    first = threading.Thread(target=environment.ensure_environment, args=(Environment(root), ["dev"], slow))
    second = threading.Thread(target=environment.ensure_environment, args=(Environment(root), ["dev"], slow))
    first.start()
    assert installing.wait(timeout=30)
    second.start()
    proceed.set()
    first.join()
    second.join()
    assert asked == ["install"]

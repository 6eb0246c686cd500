"""weft as installed: its version, a command that doesn't wait for torch, an import that starts nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import weft
import weft_cli
from weft.__main__ import main

SOURCE = Path(weft.__file__).parents[1]


def test_the_version_is_one_that_installers_can_order() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?(\.dev\d+)?", weft.__version__)


HELP = [command.help for command in weft_cli.COMMANDS.values()]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("argument", "said"), [("--version", [f"weft {weft.__version__}\n"]), ("--help", HELP)]
)
def test_the_command_needs_neither_torch_nor_an_installation(argument: str, said: list[str]) -> None:
    # Without site-packages there is no torch that could be imported, and no metadata of weft.
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import weft_cli; weft_cli.main()", argument],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert [text for text in said if text not in done.stdout] == []


@pytest.mark.parametrize("name", weft_cli.COMMANDS)
def test_every_command_says_what_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    assert exit_.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) > 10


def test_the_module_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"weft {weft.__version__}\n"


def test_the_command_passes_other_arguments_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["weft", "plan", "gpt-7b", "--ranks", "none"])
    with pytest.raises(SystemExit) as exit_:
        weft_cli.main()
    assert exit_.value.code == 2
    assert "argument --ranks" in capsys.readouterr().err


# What a process has started does not survive a fork.
PROGRAM = """
import os
import threading

import torch
import weft

assert not torch.cuda.is_initialized()
assert threading.active_count() == 1
# A thread of autograd's engine would be one of the kernel's threads of this process.
threads = {open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")}
assert not any(name.startswith("pt_autograd") for name in threads), threads
child = os.fork()
if child == 0:
    x = torch.ones(2, requires_grad=True)
    (x * 2).sum().backward()
    os._exit(0 if x.grad.tolist() == [2.0, 2.0] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.processes
def test_a_process_can_be_forked_after_the_import() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


LOADED = """
import sys
import torch
before = {*sys.modules}
import weft
import torch.distributed as dist
assert hasattr(dist.Backend, "WEFT")
assert {name for name in sys.modules if name.startswith("weft")} == {"weft", "weft.first_use", "weft.version"}
assert {name.partition(".")[0] for name in {*sys.modules} - before} == {"weft"}
assert {"launch", "rpc", "Trainer"} <= {*dir(weft)}
weft.launch
tools = ("weft.observe", "weft.planning", "weft.training", "weft.rpc", "weft.fsdp", "weft.__main__")
assert not [name for name in sys.modules if name.startswith(tools)]
assert weft.errors.ConfigError is weft.ConfigError
try:
    weft.nothing
except AttributeError as error:
    assert "has no attribute 'nothing'" in str(error)
else:
    raise AssertionError
"""


@pytest.mark.processes
def test_a_name_loads_its_module_when_it_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

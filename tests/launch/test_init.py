"""init(): the environment's world, or a world of one, and always the one that is there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from weft.errors import ConfigError, PeerTimeoutError
from weft.launcher import World, init, launch
from weft.launcher.agreement import RankVariables
from weft.launcher.environment import read_rank_variables
from weft.launcher.stores import free_port

REPO = Path(__file__).parents[2]
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
LOCAL = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [*TORCHRUN, *LOCAL]:
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_variables_of_torchrun_are_read() -> None:
    assert read_rank_variables({}) is None
    assert read_rank_variables(TORCHRUN | LOCAL) == RankVariables(1, 4, local_rank=1, local_size=2)


@pytest.mark.parametrize("missing", TORCHRUN)
def test_incomplete_environment_names_what_is_missing(missing: str) -> None:
    environment = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(ConfigError, match=rf"but not {missing}\. torchrun sets all"):
        read_rank_variables(environment)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "one"}, "RANK='one', which must be an integer"),
        ({"RANK": "4"}, "RANK=4 and WORLD_SIZE=4"),
        ({"RANK": "-1"}, "RANK=-1 and WORLD_SIZE=4"),
        (LOCAL | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2"),
    ],
)
def test_impossible_environment_is_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rank_variables(TORCHRUN | changes)


def test_init_itself_refuses_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        init()
    assert not dist.is_initialized()


def test_the_host_of_the_store_waits_for_ranks_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(PeerTimeoutError, match=r"Not there: \[1, 2\] of 3"):
        init(timeout=0.3)
    assert not dist.is_initialized()


def test_world_of_one_works_and_is_found_again() -> None:
    world = init()
    assert (world.rank, world.size, world.local_rank, world.backend) == (0, 1, 0, "weft")
    tensor = torch.ones(1, device=world.device)
    dist.all_reduce(tensor)
    assert init() == world
    assert init(backend="weft") == world


def test_another_backend_than_the_one_there_is_refused() -> None:
    init(backend="gloo")
    with pytest.raises(ConfigError, match=r"'weft' was asked for, but .* initialised with 'gloo'"):
        init(backend="weft")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "smoke"}, "'smoke', which c10d does not know"),
        ({"backend": "cpu:gloo,cuda:smoke"}, "'smoke', which c10d does not know"),
        ({"timeout": 0}, "timeout is in seconds"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        init(**options)
    assert not dist.is_initialized()


@pytest.mark.threads
def test_thread_ranks_get_their_own_world_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (TORCHRUN | LOCAL).items():
        monkeypatch.setenv(name, value)
    worlds: list[World] = launch(init, ranks=3, kind="thread")
    assert [(world.rank, world.size, world.local_rank) for world in worlds] == [
        (0, 3, 0),
        (1, 3, 1),
        (2, 3, 2),
    ]


SCRIPT = """
import torch
import torch.distributed as dist
from weft.launcher import init
from weft.trust import job_secret

world = init()
if world.size > 1:  # nobody gave them a secret: all have the one that rank 0 made
    derived = [None] * world.size
    dist.all_gather_object(derived, job_secret().derive("test"))
    assert len(set(derived)) == 1, derived
tensor = torch.tensor([float(world.rank + 1)])
dist.all_reduce(tensor)
assert init(backend=world.backend) == world
text = f"{world.rank} of {world.size}, local {world.local_rank}, {world.backend}, sum {tensor.item()}\\n"
print(text, end="")
dist.destroy_process_group()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("starter", "lines"),
    [
        ([], ["0 of 1, local 0, weft, sum 1.0"]),
        (
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
            ["0 of 2, local 0, weft, sum 3.0", "1 of 2, local 1, weft, sum 3.0"],
        ),
    ],
    ids=["alone", "torchrun"],
)
def test_script_runs_alone_and_under_torchrun(starter: list[str], lines: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    finished = subprocess.run(
        [sys.executable, *starter, str(script)],
        env=os.environ | {"PYTHONPATH": str(REPO / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    assert sorted(finished.stdout.split("\n"))[1:] == lines
    said = "weft: 2 ranks on backend 'weft': ranks of one host that have no GPU"
    assert finished.stderr.count(said) == (1 if starter else 0)

"""init(): the environment's world, or a world of one, and always the one that is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from weft.errors import ConfigError
from weft.launcher import World, init, launch
from weft.launcher.environment import RankVariables, default_backend, read_rank_variables

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


def test_default_backend_is_local_where_all_ranks_share_the_host() -> None:
    assert default_backend(None) == "weft"
    assert default_backend(RankVariables(0, 2, local_rank=0, local_size=2)) == "weft"
    assert default_backend(RankVariables(0, 4, local_rank=0, local_size=2)) != "weft"


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

"""State dicts of sharded models, checkpoints into other worlds and meshes, full state dicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fsdp_bodies import state
from tests.fsdp_bodies.running import on_threads


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", state.BODIES)
def test_state(body: Callable[..., None], ranks: int) -> None:
    on_threads(body, ranks)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("checkpoint") / "two"
    on_threads(state.save, 2, str(path))
    return str(path)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(2, "the same"), (3, "the same"), (4, "the same"), (4, "hybrid"), (2, "other dim"), (2, "one group")],
)
def test_a_checkpoint_is_loaded_into_another_world(checkpoint: str, ranks: int, layout: str) -> None:
    on_threads(state.load, ranks, checkpoint, layout)


def test_a_checkpoint_is_loaded_into_a_plain_model(checkpoint: str) -> None:
    assert Path(checkpoint).is_dir()
    state.load_plain(checkpoint)

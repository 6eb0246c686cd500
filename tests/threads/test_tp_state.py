"""State dicts of parallel models, and checkpoints into other worlds and meshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.tp_bodies import state
from tests.tp_bodies.running import LIBRARIES, WEFT, on_threads

# From, to: layouts and ranks.
WORLDS = [
    ("sequence", 4, "copies", 2),
    ("copies", 2, "sequence", 4),
    ("fully_shard x tp", 4, "sequence", 4),
    ("sequence", 4, "fully_shard", 4),
    ("fully_shard", 2, "fully_shard x tp", 4),
    ("replicate x tp", 4, "copies", 2),
]


@LIBRARIES
@pytest.mark.parametrize("body", state.BODIES)
def test_state(body: Callable[..., None], tp: Any) -> None:
    on_threads(body, 2, tp)


@pytest.mark.parametrize("body", state.WEFT_ONLY)
def test_ours_alone(body: Callable[..., None]) -> None:
    on_threads(body, 2, WEFT)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], str]:
    """Saved once for each layout and number of ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def find(layout: str, ranks: int) -> str:
        path = folder / f"{layout} on {ranks}"
        if not path.exists():
            on_threads(state.save, ranks, WEFT, str(path), layout)
        return str(path)

    return find


@pytest.mark.parametrize(("saved", "savers", "loaded", "loaders"), WORLDS)
def test_a_checkpoint_is_loaded_into_another_world(
    checkpoints: Callable[[str, int], str], saved: str, savers: int, loaded: str, loaders: int
) -> None:
    on_threads(state.load, loaders, WEFT, checkpoints(saved, savers), loaded)


@pytest.mark.parametrize(("layout", "ranks"), [("sequence", 4), ("fully_shard x tp", 4)])
def test_a_checkpoint_is_loaded_into_a_plain_model(
    checkpoints: Callable[[str, int], str], layout: str, ranks: int
) -> None:
    state.load_plain(checkpoints(layout, ranks))

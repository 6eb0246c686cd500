"""Tensor subclasses that say how they are gathered, and parameters that begin on the meta device."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fsdp_bodies import extension
from tests.fsdp_bodies.running import on_threads


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("body", extension.BODIES)
def test_extension(body: Callable[..., None], ranks: int) -> None:
    on_threads(body, ranks)

"""What users may get wrong with tensor parallel."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.tp_bodies import misuse
from tests.tp_bodies.running import WEFT, on_threads


@pytest.mark.parametrize("body", misuse.BODIES)
def test_misuse(body: Callable[..., None]) -> None:
    on_threads(body, 2, WEFT)

"""`give`, for tests of an owner's optimizer: what a context holds."""

from __future__ import annotations

import pytest

from tests.dist_autograd.both_optimizers import Give
from weft.dist_autograd import api


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Give:
    """Say what the context holds."""
    return lambda gradients: monkeypatch.setattr(api, "get_gradients", lambda _: gradients)

"""Gradient hooks of compiled models on process-ranks: the numbers of eager ones."""

from __future__ import annotations

import pytest

from tests.compile_bodies import hooks
from weft.testing.pool import shared_pool


@pytest.mark.parametrize("group", ["gloo", "weft"])
@pytest.mark.parametrize("wrap", ["replicate", "ddp"])
@pytest.mark.parametrize("name", hooks.HOOKS)
def test_plain_backward(name: str, wrap: str, group: str) -> None:
    shared_pool(2).run(hooks.same_as_eager, args=(name, "plain", wrap), backend=group, timeout=120)


@pytest.mark.parametrize("name", hooks.HOOKS)
def test_traced_backward(name: str) -> None:
    shared_pool(2).run(hooks.run_some, args=([name], "weft"), backend="gloo", timeout=120)

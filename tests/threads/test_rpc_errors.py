"""Exceptions and timeouts between workers that are threads of one process."""

from __future__ import annotations

import pytest

from tests.rpc_bodies import errors, timeouts
from tests.rpc_bodies.running import Body, on_threads


@pytest.mark.parametrize("body", [*errors.BODIES, *errors.WEFT_ONLY])
def test_errors(body: Body) -> None:
    on_threads(body)


@pytest.mark.parametrize("body", [*timeouts.BODIES, *timeouts.WEFT_ONLY])
def test_timeouts(body: Body) -> None:
    on_threads(body)


def test_a_default_from_the_options() -> None:
    on_threads(timeouts.the_default_is_the_options, rpc_timeout=0.25)

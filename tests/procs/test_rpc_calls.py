"""Calls, payloads, errors and timeouts between workers that are processes.

Bodies of one kind run in one group of workers, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.rpc_bodies import async_functions, calls, calls_weft, errors, kept_tensors, payloads, timeouts
from tests.rpc_bodies.running import Body, on_processes


@pytest.mark.parametrize(
    "bodies",
    [
        [*calls.BODIES, *calls.ON_PROCESSES, *calls_weft.WEFT_ONLY, *calls_weft.PROCESSES_ONLY],
        [*payloads.BODIES, *payloads.WEFT_ONLY, *kept_tensors.BODIES],
        [*errors.BODIES, *errors.WEFT_ONLY],
        [*timeouts.BODIES, *timeouts.WEFT_ONLY],
        [*async_functions.BODIES, *async_functions.WEFT_ONLY],
    ],
    ids=["calls", "payloads", "errors", "timeouts", "async functions"],
)
def test_bodies(bodies: Sequence[Body]) -> None:
    on_processes(bodies)


def test_async_functions_on_one_thread() -> None:
    on_processes(async_functions.ONE_THREAD, num_worker_threads=1)


def test_a_default_from_the_options() -> None:
    on_processes(timeouts.the_default_is_the_options, rpc_timeout=0.25)

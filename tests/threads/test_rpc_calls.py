"""Calls between workers that are threads of one process."""

from __future__ import annotations

import pytest

from tests.rpc_bodies import async_functions, calls, calls_weft, kept_tensors, payloads
from tests.rpc_bodies.running import Body, on_threads


@pytest.mark.parametrize("body", [*calls.BODIES, *calls_weft.WEFT_ONLY])
def test_calls(body: Body) -> None:
    on_threads(body)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("body", [*payloads.BODIES, *payloads.WEFT_ONLY, *kept_tensors.BODIES])
def test_payloads(body: Body) -> None:
    on_threads(body)


@pytest.mark.parametrize("body", [*async_functions.BODIES, *async_functions.WEFT_ONLY])
def test_async_functions(body: Body) -> None:
    on_threads(body)


@pytest.mark.parametrize("body", async_functions.ONE_THREAD)
def test_async_functions_on_one_thread(body: Body) -> None:
    on_threads(body, num_worker_threads=1)


@pytest.mark.parametrize("body", [calls.nested_calls, calls.calls_to_oneself])
def test_one_worker_is_a_world(body: Body) -> None:
    on_threads(body, ranks=1)

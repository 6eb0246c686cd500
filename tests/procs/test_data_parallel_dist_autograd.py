"""Data parallel under distributed autograd, on process-ranks. Bodies of one kind share their workers."""

from __future__ import annotations

import pytest

from tests.ddp_rpc_bodies import (
    held,
    places_of_work,
    remote_graphs,
    remote_parts,
    same_on_weft,
    same_options,
    same_steps,
    uneven,
)
from tests.ddp_rpc_bodies.running import on_processes

pytestmark = pytest.mark.full

BACKEND = pytest.mark.parametrize("backend", ["weft", "gloo"])


@BACKEND
def test_same_steps(backend: str) -> None:
    on_processes(same_steps.BODIES, backend)


@BACKEND
def test_same_options(backend: str) -> None:
    on_processes(same_options.BODIES, backend)


@BACKEND
def test_remote_parts(backend: str) -> None:
    on_processes(remote_parts.BODIES, backend)


@BACKEND
def test_remote_graphs(backend: str) -> None:
    on_processes(remote_graphs.BODIES, backend)


@BACKEND
def test_same_on_weft(backend: str) -> None:
    on_processes(same_on_weft.BODIES, backend)


@BACKEND
def test_held(backend: str) -> None:
    on_processes([*held.BODIES, *held.PROCESS_BODIES], backend)


@BACKEND
def test_uneven(backend: str) -> None:
    on_processes(uneven.BODIES, backend, ranks=4)


@BACKEND
def test_places_of_work(backend: str) -> None:
    on_processes(places_of_work.BODIES, backend)


@BACKEND
def test_groups(backend: str) -> None:
    on_processes(places_of_work.BODIES_OF_FOUR, backend, ranks=4, has_server=False)

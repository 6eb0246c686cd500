"""One body with torch.distributed.autograd and with weft.dist_autograd: the same gradients and errors.

Tests of this folder that hold for torch's, too, run here with that: what they ask for is what torch does.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import autograd as torch_autograd

from tests.dist_autograd import (
    test_contexts,
    test_corners,
    test_cuts,
    test_failing,
    test_hooks,
    test_optimizer,
    test_passes,
    test_received,
    test_sharing,
)
from tests.dist_autograd.training import Trace, run_loops
from tests.rpc.crew import Crew
from tests.rpc.workers import RANKS, TORCH, WEFT, Body, find_bodies_for_torch, joined, run_each
from weft import dist_autograd

pytestmark = pytest.mark.full

GROUPS = {
    "contexts, cuts": [test_contexts, test_cuts],
    "received, passes": [test_received, test_passes, test_sharing, test_corners],
    "hooks, failing": [test_hooks, test_failing, test_optimizer],
}


def run_bodies(bodies: Sequence[Body], rank: int, stores: list[str]) -> None:
    dist.init_process_group("gloo", init_method=stores[0], rank=rank, world_size=RANKS)
    with joined(TORCH, init_method=stores[1]) as worker:
        run_each(worker, bodies)
    dist.destroy_process_group()


def on_crew(act: Any, *args: Any) -> list[Any]:
    """On processes of their own: torch's RPC begins only once in a process."""
    with Crew(RANKS) as crew:
        stores = [crew.meeting(), crew.meeting()]
        acting = [member.begin(act, *args, rank, stores) for rank, member in enumerate(crew.members)]
        # Where one fails the others may wait for it.
        done, waiting = wait(acting, timeout=120, return_when=FIRST_EXCEPTION)
        errors = [error for future in done if isinstance(error := future.exception(), Exception)]
        assert not waiting or errors, f"{len(waiting)} of {RANKS} hang"
        if errors:
            raise ExceptionGroup(f"{args[0]}", errors)
        return [future.result() for future in acting]


@pytest.mark.processes
@pytest.mark.parametrize("modules", GROUPS.values(), ids=GROUPS)
def test_bodies_with_torch(modules: Sequence[ModuleType]) -> None:
    on_crew(run_bodies, find_bodies_for_torch(modules))


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return {lib: on_crew(run_loops, lib)[0] for lib in (TORCH, WEFT)}


@pytest.mark.processes
@pytest.mark.parametrize("loop", ["pipeline", "tables", "recurrent"])
def test_the_same_training(traces: dict[str, Trace], loop: str) -> None:
    """Losses, gradients and parameters of each step."""
    torchs, wefts = (
        {name: value for name, value in traces[lib].items() if name.startswith(loop)} for lib in (TORCH, WEFT)
    )
    assert len(torchs) > 20
    assert list(torchs) == list(wefts)
    for name, value in torchs.items():
        torch.testing.assert_close(
            wefts[name], value, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_same_names() -> None:
    for name in dir(torch_autograd):
        is_theirs = name.startswith("_") and not name.startswith("__") and name != "_init"
        if is_theirs or name in ("context", "backward", "get_gradients", "DistAutogradContext"):
            assert hasattr(dist_autograd, name), name
    for name in ["_context_id", "_send_functions", "_recv_functions", "_known_worker_ids"]:
        assert hasattr(getattr(torch_autograd, "DistAutogradContext"), name)  # noqa: B009
        assert hasattr(dist_autograd.DistAutogradContext, name), name


def test_the_signature_of_backward() -> None:
    parameters = inspect.signature(dist_autograd.backward).parameters
    assert list(parameters) == ["context_id", "roots", "retain_graph", "gradients", "exact"]
    assert (parameters["retain_graph"].default, parameters["exact"].default) == (False, False)
    assert parameters["gradients"].kind is parameters["exact"].kind is inspect.Parameter.KEYWORD_ONLY
